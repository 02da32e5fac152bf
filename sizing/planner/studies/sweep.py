"""Every combination of values of some scenario keys, each planned."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_POINTS = 2_000
"""Maximum points of one sweep: a slip in a list of values must not run for a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A scenario key and its values, as TOML writes them."""

    key: str
    values: tuple[str, ...]


def parse_key(text: str, place: str = "--key") -> Swept:
    """
    Read `workload.requests_per_s=1,2,5`.

    Commas in brackets, braces and quotes belong to a value.

    Args:
        place: the option that it was typed for.

    Raises:
        InputError: no key, no value, or brackets that do not close.
    """
    key, equals, values = text.partition("=")
    found = tuple(each.strip() for each in _split(values, place))
    if not equals or not key.strip() or not all(found):
        raise InputError(place, text, "key=value,value, for example workload.requests_per_s=1,2")
    return Swept(key=key.strip(), values=found)


def points(keys: Sequence[Swept]) -> tuple[tuple[str, ...], ...]:
    """
    Return the overrides of every combination, the last key fastest.

    Raises:
        InputError: no key, a key twice, or more than `MAX_POINTS` points.
    """
    names = [each.key for each in keys]
    if not names:
        raise InputError("--key", None, "at least one, for example workload.requests_per_s=1,2,5")
    if len(set(names)) < len(names):
        raise InputError("--key", max(names, key=names.count), "each key once, all values with it")
    count = 1
    for each in keys:
        count *= len(each.values)
    if count > MAX_POINTS:
        raise InputError("--key", f"{count:,} points", f"at most {MAX_POINTS:,}")
    return tuple(
        tuple(f"{name}={value}" for name, value in zip(names, values, strict=True))
        for values in product(*(each.values for each in keys))
    )


def _split(text: str, place: str) -> Iterator[str]:
    """Split at commas outside brackets and quotes."""
    depth, quoted, start = 0, "", 0
    for at, char in enumerate(text):
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "\"'":
            quoted = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and not depth:
            yield text[start:at]
            start = at + 1
    if depth or quoted:
        raise InputError(place, text, "brackets and quotes that close")
    yield text[start:]
