"""
Limits of the values of specs, and names that are meant by unknown ones.

An error says name, value and expectation.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Check = Callable[..., None]


STRICT = {"extra": "forbid", "strict": True}
"""Value of `__pydantic_config__` in each spec; a plain dict, so that specs import no pydantic."""


def check(holds: Callable[[Any], bool], expectation: str) -> Check:
    """Return what refuses values by name that do not hold; `None` means not given."""

    def refuse(**values: object) -> None:
        for name, value in values.items():
            if value is not None and not holds(value):
                raise InputError(name, value, expectation)

    return refuse


def choice(*allowed: str) -> Check:
    """Return the check that a value is among those allowed."""
    return check(lambda value: value in allowed, "one of " + ", ".join(allowed))


def one_of(allowed: Iterable[str], **values: str | None) -> None:
    """Refuse values that are not among those allowed; `None` means not given."""
    choice(*allowed)(**values)


positive = check(lambda value: math.isfinite(value) and value > 0, "a positive, finite number")
not_negative = check(
    lambda value: math.isfinite(value) and value >= 0, "a finite number, zero or more"
)
fraction = check(lambda value: 0 < value <= 1, "a fraction above 0 and at most 1")
at_least_one = check(lambda value: value >= 1, "1 or more")

Positive = Annotated[float, positive]
NotNegative = Annotated[float, not_negative]
Fraction = Annotated[float, fraction]
AtLeastOne = Annotated[float, at_least_one]
Count = Annotated[int, positive]  # A whole number, 1 or more
Whole = Annotated[int, not_negative]  # A whole number, 0 or more


class Spec:
    """
    Base of specs, which are frozen dataclasses that refuse unknown keys and impossible values.

    A value whose type says its limits, `Count`, `Positive` and the others above, is checked where
    the spec is made, also inside a tuple or a table; `_check` refuses the rest.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    _TABLE: ClassVar[str] = ""
    """Table of its keys in a file, as errors name it; `{0.name}` stands for the spec's own name."""

    def __post_init__(self) -> None:
        """Check all values, or refuse the first that is impossible."""
        for name, limit in _limits(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(value, tuple | dict):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                limit(**{self._place(f"{name}.{key}"): number for key, number in items})
            else:
                limit(**{self._place(name): value})
        self._check()

    def _check(self) -> None:
        """Refuse what the types of the fields let through."""

    def _place(self, key: str) -> str:
        """Return how errors name a key of this spec."""
        return f"{self._TABLE.format(self)}.{key}" if self._TABLE else key


class Options(Spec):
    """Base of specs whose keys are options of a command, by which errors name them."""

    __slots__ = ()
    _NAMED: ClassVar[dict[str, str]] = {}
    """Keys whose options have another name."""

    def _place(self, key: str) -> str:
        return "--" + self._NAMED.get(key, key).replace("_", "-")


@cache
def _limits(cls: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(cls, include_extras=True)
    limits = ((name, _limit(hint)) for name, hint in hints.items())
    return tuple((name, limit) for name, limit in limits if limit is not None)


def _limit(hint: Any) -> Check | None:  # noqa: ANN401  (any type)
    own = [part for part in getattr(hint, "__metadata__", ()) if callable(part)]
    inner = (_limit(part) for part in get_args(hint))
    return own[0] if own else next((limit for limit in inner if limit is not None), None)


def attribute_docs(cls: type) -> dict[str, str]:
    """Read the `Attributes:` section of a docstring: name to meaning."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


# --- what was probably meant


NUMBER = re.compile(r"\d+")

LEAST_LIKENESS = 0.7
"""Least share of letters that a misspelt key has in common with the one that was meant."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """
    Return the known name that *name* probably misspells; `None`: none.

    Numbers are sizes and versions: a name with others is the name of another thing.
    """
    numbers = set(NUMBER.findall(name))
    alike = {key.lower(): key for key in known if numbers <= set(NUMBER.findall(key))}
    near = difflib.get_close_matches(name.lower(), alike, n=1, cutoff=0.5)
    return alike[near[0]] if near else None


def sibling(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that differs in one number alone, such as h100-8 from h100-9."""
    shape = NUMBER.sub("0", name.lower())
    for key in known:
        pairs = zip(NUMBER.findall(name), NUMBER.findall(key), strict=False)
        if NUMBER.sub("0", key.lower()) == shape and sum(a != b for a, b in pairs) == 1:
            return key
    return None


@cache
def dotted_keys(hint: Any) -> tuple[str, ...]:  # noqa: ANN401  (any hint)
    """Return the keys of a dataclass, and of the dataclasses in it, dotted; of a tuple, its own."""
    if not is_dataclass(hint):
        return tuple(key for inner in get_args(hint) for key in dotted_keys(inner))
    hints, keys = get_type_hints(hint), list[str]()
    for name in (key.name for key in fields(hint)):
        keys += [name, *(f"{name}.{key}" for key in dotted_keys(hints[name]))]
    return tuple(keys)


def key_meant(where: str, keys: Iterable[str]) -> str | None:
    """Return the key that was probably meant: most like it by its last name, in any table."""
    whole = re.sub(r"\.\d+(?=\.)", "", where)

    def likeness(key: str) -> tuple[float, ...]:
        last, other = key.rpartition(".")[2], whole.rpartition(".")[2]
        pairs = (last, other), (key, whole)
        return tuple(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    near = max(keys, key=likeness, default=None)
    return near if near is not None and likeness(near)[0] >= LEAST_LIKENESS else None
