"""A grid of scenarios, each planned: scenario files by the values of some of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.plan import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    listed = tuple(value.strip() for value in _split(values, place))
    if not equals or not key.strip() or not all(listed):
        raise InputError(place, text, "key=value,value, for example workload.requests_per_s=1,2")
    return Swept(key=key.strip(), values=listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCase:
    """
    One point of a grid.

    Attributes:
        values: value of each key, in the order of the keys.
        scenario: the scenario with these values, or why it cannot be read.
    """

    label: str
    values: tuple[str, ...]
    scenario: Inputs | InputError


def read_cases(
    keys: Sequence[Swept], load: Callable[[tuple[str, ...]], Inputs], name: str = ""
) -> tuple[GridCase, ...]:
    """
    Read a scenario at every point of a grid.

    Args:
        load: reads the scenario with the overrides of a point.
        name: name of the scenario, which begins each label.

    Raises:
        InputError: a scenario that is wrong without overrides, or at every point.
    """
    load(())
    cases = []
    for combination in points(keys):
        scenario: Inputs | InputError
        try:
            scenario = load(combination)
        except InputError as error:
            scenario = error
        label = " ".join(filter(None, (name, *combination)))
        values = tuple(override.partition("=")[2] for override in combination)
        cases.append(GridCase(label=label, values=values, scenario=scenario))
    errors = [case.scenario for case in cases if isinstance(case.scenario, InputError)]
    if len(errors) == len(cases):
        raise errors[-1]
    return tuple(cases)


def points(keys: Sequence[Swept]) -> tuple[tuple[str, ...], ...]:
    """
    Return the overrides of every combination, the last key fastest.

    Raises:
        InputError: a key twice, or more than `MAX_POINTS` points.
    """
    names = [swept.key for swept in keys]
    if len(set(names)) < len(names):
        raise InputError("--key", max(names, key=names.count), "each key once, all values with it")
    count = 1
    for swept in keys:
        count *= len(swept.values)
    if count > MAX_POINTS:
        raise InputError("--key", f"{count:,} points", f"at most {MAX_POINTS:,}")
    return tuple(
        tuple(f"{name}={value}" for name, value in zip(names, values, strict=True))
        for values in product(*(swept.values for swept in keys))
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
