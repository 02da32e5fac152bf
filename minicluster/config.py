"""TOML and JSON to specs: the only file that knows pydantic and tomllib."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from minicluster.errors import InputError
from minicluster.files import read_text
from minicluster.specs.scenario import ScenarioSpec
from minicluster.specs.slo import ClassSlo
from minicluster.specs.workload import Lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")
Overrides = Mapping[str, object] | Sequence[str]
"""
Values that go over those of a file.

Texts `key=value`, the key dotted as in `workload.requests_per_s`, the value as TOML writes it
(quotes around text may be left out); or values by dotted key, where `None` takes the key away:
its default holds.
"""


def parse(cls: type[T], raw: object, *, place: str) -> T:
    """
    Turn parsed TOML or JSON into a spec.

    Args:
        cls: a spec, or any dataclass of specs.

    Raises:
        InputError: the first thing wrong, with its place, value and expectation.
    """
    try:
        # Strict mode takes a dataclass only from JSON, and JSON has no NaN to let through.
        text = json.dumps(raw, allow_nan=False, default=str)
    except ValueError as error:
        raise InputError(place, str(error), "finite numbers") from None
    return _parse_json(cls, text, place)


def _parse_json(cls: type[T], text: str, place: str) -> T:
    try:
        found: T = _adapter(cls).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        raise _first(error, place) from None
    except InputError as error:
        raise error.inside(place) from None
    return found


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    """Build the validator of a spec once: it takes milliseconds."""
    return TypeAdapter(cls)


def _first(error: ValidationError, place: str) -> InputError:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    value: Any = first["input"]
    kind = first["type"]
    if kind in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return InputError(f"{place}: {where}", None, "a value")
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        way_out = "`sizing schema` lists every key"
        return InputError(f"{place}: {where}", value, "no such key", way_out)
    return InputError(f"{place}: {where}", value, first["msg"].removeprefix("Input should be "))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), str(error), "valid TOML") from None


def read_json(path: Path, expectation: str) -> object:
    """
    Read a JSON file.

    Raises:
        InputError: no such file, or no JSON; *expectation* is what the file should be.
    """
    text = read_text(path, expectation)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), str(error), f"valid JSON: {expectation}") from None


def read_lines(cls: type[T], path: Path, expectation: str, *, torn: bool = False) -> tuple[T, ...]:
    """
    Read a file of JSON lines, each of them a *cls*.

    Args:
        expectation: what the file should be.
        torn: whether a last line without its end is left out: its writer was killed.

    Raises:
        InputError: no such file, or the first line that is no *cls*, by its number.
    """
    *lines, last = read_text(path, expectation).split("\n")
    lines += [last] if last and not torn else []
    return tuple(_parse_json(cls, line, f"{path}:{at}") for at, line in enumerate(lines, start=1))


def parse_scenario(raw: dict[str, Any], overrides: Overrides = (), *, place: str) -> ScenarioSpec:
    """
    Turn a parsed scenario into a spec.

    Args:
        raw: what `read_toml` gave; changed by the overrides.
        overrides: see `Overrides`.

    Raises:
        InputError: the first thing wrong, with its place, value and expectation.
    """
    overridden(raw, overrides)
    if overrides:
        place += " with " + " ".join(_words(overrides))
    workload = raw.get("workload")
    if isinstance(workload, dict):
        tables = {"workload": workload}
        classes = workload.get("classes", [])
        if not isinstance(classes, list | tuple):
            expected = "a list of tables: [[workload.classes]]"
            raise InputError(f"{place}: workload.classes", classes, expected)
        if classes:
            own = {f"workload.classes.{at}": each for at, each in enumerate(classes)}
            tables |= {where: each for where, each in own.items() if isinstance(each, dict)}
            _sum_rates(workload, list(tables.values())[1:], {key for key, _ in _pairs(overrides)})
        for where, table in tables.items():
            _check_load(table, place=f"{place}: {where}")
    return parse(ScenarioSpec, raw, place=place)


def _sum_rates(workload: dict[str, Any], classes: list[dict[str, Any]], given: set[str]) -> None:
    """Write the rate of all classes; scale theirs to a rate that an override gives."""
    rates = [each.get("requests_per_s") for each in classes]
    known = [rate for rate in rates if isinstance(rate, int | float) and rate > 0]
    total, asked = sum(known), workload.get("requests_per_s")
    if "workload.requests_per_s" in given and isinstance(asked, int | float):
        for each in classes if known == rates and known else ():
            each["requests_per_s"] *= asked / total
    elif asked is None or any(key.startswith("workload.classes") for key in given):
        workload["requests_per_s"] = total or 1.0  # a class without a rate is refused by itself


def _check_load(table: dict[str, Any], *, place: str) -> None:
    """Read the lengths of a load or of a class, and the class's limits; errors name the table."""
    for key in ("input_tokens", "output_tokens"):
        if table.get(key) is not None:
            table[key] = _lengths(table[key], place=f"{place}.{key}")
    if isinstance(table.get("slo"), dict):
        parse(ClassSlo, table["slo"], place=f"{place}.slo")


def _lengths(raw: object, *, place: str) -> object:
    """Read a plain number as the length of every request; errors name the key."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        raw = {"mean": raw}
    if not isinstance(raw, dict):
        raise InputError(
            place, raw, "a whole number, or a table with a distribution",
            '{ distribution = "uniform", low = 64, high = 192 }',
        )  # fmt: skip
    parse(Lengths, raw, place=place)
    return raw


def overridden(raw: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Write *overrides* into a parsed file, in place."""
    for (key, value), words in zip(_pairs(overrides), _words(overrides), strict=True):
        *tables, last = key.split(".")
        table: Any = raw
        for name in tables:
            table = _inner(table, name)
        if not isinstance(table, dict):
            place, inside = words.partition("=")[0], ".".join(tables)
            raise InputError(place, value, f"a key inside a table; {inside} is not a table")
        table[last] = value
        if value is None:
            del table[last]
    return raw


def _inner(table: Any, name: str) -> Any:  # noqa: ANN401  (parsed TOML)
    """Return a table inside another, made where there is none, or a class of a list by its name."""
    if isinstance(table, dict):
        return table.setdefault(name, {})
    known = table if isinstance(table, list | tuple) else ()
    return next((one for one in known if isinstance(one, dict) and one.get("name") == name), None)


def _pairs(overrides: Overrides) -> Iterable[tuple[str, object]]:
    return overrides.items() if isinstance(overrides, Mapping) else map(_pair, overrides)


def _pair(text: str) -> tuple[str, object]:
    """Read `key=value`."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise InputError("--set", text, "key=value, for example workload.requests_per_s=20")
    return key.strip(), toml_value(value.strip())


def _words(overrides: Overrides) -> Iterator[str]:
    """Yield each override as it was given."""
    if isinstance(overrides, Mapping):
        yield from (f"{key}={value!r}" for key, value in overrides.items())
    else:
        yield from (f"--set {text}" for text in overrides)


def toml_value(text: str) -> object:
    """Return a value as TOML writes it; text may stand without quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return found["value"] if found.keys() == {"value"} else text
