"""TOML and JSON to specs, by pydantic, which the specs themselves do not import."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from minicluster.errors import Fault, InputError, unreadable, written
from minicluster.files import read_text
from minicluster.specs.checks import dotted_keys, key_meant
from minicluster.specs.scenario import ScenarioSpec
from minicluster.specs.slo import ClassSlo, SloSpec
from minicluster.specs.workload import LengthRow, Lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")
TakeTrace = Callable[[dict[str, Any], str], None]
"""What writes a trace's rate and lengths into the parsed table of a load, at a place."""

Overrides = Mapping[str, object] | Sequence[str]
"""
Values that go over those of a file.

Texts `key=value`, the key dotted as in `workload.requests_per_s`, the value as TOML writes it
(quotes around text may be left out); or values by dotted key, where `None` takes the key away:
its default holds.
"""


def parse(cls: type[T], raw: object, *, place: str) -> T:
    """Turn parsed TOML or JSON into a dataclass of specs; InputError: the first thing wrong."""
    try:
        # Strict mode takes a dataclass only from JSON, and JSON has no NaN to let through.
        text = json.dumps(raw, allow_nan=False, default=str)
    except ValueError:
        raise InputError(
            place, Fault("has a number that is not finite"), "finite numbers"
        ) from None
    return _parse_json(cls, text, place)


def _parse_json(cls: type[T], text: str, place: str) -> T:
    try:
        spec: T = _adapter(cls).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        raise _first(error, cls, place) from None
    except InputError as error:
        raise error.inside(place) from None
    return spec


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    """Build the validator of a spec once: it takes milliseconds."""
    return TypeAdapter(cls)


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of what `parse` takes for a dataclass of specs; no limits in it."""
    return _adapter(cls).json_schema()


KINDS = {
    "string_type": "a text, in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
}
"""What is expected, by pydantic's type of the error."""


def _first(error: ValidationError, cls: type, place: str) -> InputError:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    value: Any = first["input"]
    kind = first["type"]
    if kind in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return InputError(f"{place}: {where}", None, "a value")
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        near = key_meant(where, dotted_keys(cls))
        ways_out = [f"did you mean {near}?"] if near else []
        ways_out += ["`sizing schema` lists every key"] if cls is ScenarioSpec else []
        return InputError(f"{place}: {where}", value, "no such key", " ".join(ways_out))
    expected = KINDS.get(kind) or first["msg"].removeprefix("Input should be ")
    return InputError(f"{place}: {where}", value, expected)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(str(path), unreadable(error), "a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), Fault(f"is not TOML: {error}"), "valid TOML") from None


def read_json(path: Path, expectation: str) -> object:
    """Read a JSON file, which should be the *expectation*, or refuse it."""
    text = read_text(path, expectation)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), Fault(f"is not JSON: {error}"), expectation) from None


def read_lines(cls: type[T], path: Path, expectation: str, *, torn: bool = False) -> tuple[T, ...]:
    """
    Read a file of JSON lines, each of them a *cls*, or refuse the first that is none.

    Args:
        torn: whether a last line without its end is left out: its writer was killed.
    """
    *lines, last = read_text(path, expectation).split("\n")
    lines += [last] if last and not torn else []
    return tuple(_parse_json(cls, line, f"{path}:{at}") for at, line in enumerate(lines, start=1))


def parse_scenario(
    raw: dict[str, Any], overrides: Overrides = (), *, place: str, take_trace: TakeTrace
) -> ScenarioSpec:
    """
    Turn a parsed scenario, which the overrides change, into a spec.

    Args:
        overrides: see `Overrides`; one of a rate takes the place of users, and the other way round;
            one of lengths that of a trace, and the other way round.
        take_trace: writes rate and lengths of a trace into the table of a load.

    Raises InputError: the first thing wrong, with its place, value and expectation.
    """
    before = _trace_of(raw)
    overridden(raw, overrides)
    overridden_keys = {key for key, _ in _pairs(overrides)}
    _replace_engine(raw.get("engine"), overridden_keys)
    if overrides:
        place += " with " + " ".join(_words(overrides))
    workload = raw.get("workload")
    if isinstance(workload, dict):
        _replace_lengths(workload, overridden_keys, place=f"{place}: workload")
        # A scenario that has a trace and its lengths was read before.
        if workload.get("trace") is not None and not (before and workload.get("lengths")):
            take_trace(workload, f"{place}: workload")
        tables = {"workload": workload}
        classes = workload.get("classes", [])
        if not isinstance(classes, list | tuple):
            expected = "a list of tables: [[workload.classes]]"
            raise InputError(f"{place}: workload.classes", classes, expected)
        own = {f"workload.classes.{at}": each for at, each in enumerate(classes)}
        tables |= {where: each for where, each in own.items() if isinstance(each, dict)}
        for where, table in tables.items():
            _check_load(table, place=f"{place}: {where}")
            if table.get("users") is not None and not (classes and table is workload):
                _rate_of_users(table, raw.get("slo"), overridden_keys, place=f"{place}: {where}")
        if classes:
            _sum_rates(workload, list(tables.values())[1:], overridden_keys, place=place)
    return parse(ScenarioSpec, raw, place=place)


LENGTH_KEYS = ("trace", "lengths", "input_tokens", "output_tokens")
"""Keys that say how long requests are: the first of them, the second or the last two."""


def _trace_of(raw: Mapping[str, Any]) -> object:
    workload = raw.get("workload")
    return workload.get("trace") if isinstance(workload, dict) else None


def _replace_engine(engine: object, overridden_keys: set[str]) -> None:
    """Take out the version in the file where an override names the engine alone."""
    if (
        isinstance(engine, dict)
        and "engine.name" in overridden_keys
        and "engine.version" not in overridden_keys
    ):
        engine.pop("version", None)


def _replace_lengths(workload: dict[str, Any], overridden_keys: set[str], *, place: str) -> None:
    """Take out lengths in the file that those of the overrides replace, and a trace's its rate."""
    named = [
        key for key in LENGTH_KEYS if f"workload.{key}" in overridden_keys and workload.get(key)
    ]
    if not named:
        return
    kept = {"input_tokens", "output_tokens"} if "tokens" in named[0] else {named[0]}
    for key in (*LENGTH_KEYS, *(["requests_per_s"] if named[0] == "trace" else [])):
        if key not in kept and f"workload.{key}" not in overridden_keys:
            dropped = workload.pop(key, None)
            if key == "trace" and dropped and not {"requests_per_s", "users"} & workload.keys():
                expected = "a number: lengths take the place of the trace, which had a rate"
                raise InputError(f"{place}.requests_per_s", None, expected)


def scenario_tables(scenario: ScenarioSpec) -> dict[str, Any]:
    """Return a scenario as its file has it: without the rates that follow from users."""
    raw = asdict(scenario)
    workload = raw["workload"]
    for table in (workload, *workload["classes"]):
        if table["users"] is not None:
            del table["requests_per_s"]
    if scenario.workload.has_users:
        workload.pop("requests_per_s", None)
    return raw


def _rate_of_users(
    table: dict[str, Any], slo: object, overridden_keys: set[str], *, place: str
) -> None:
    """
    Write the rate of users who get every answer as late as the limits allow.

    It is the least rate at which the SLO can hold; a plan or a prediction finds the real one. The
    key of an override takes the place of one in the file.
    """
    if table.get("requests_per_s") is not None:
        name = f"workload.classes.{table['name']}" if "name" in table else "workload"
        new = [key for key in ("users", "requests_per_s") if f"{name}.{key}" in overridden_keys]
        if new == ["requests_per_s"]:
            del table["users"]
            if f"{name}.think_s" not in overridden_keys:
                table.pop("think_s", None)
            return
        if new != ["users"]:
            expected = "no rate beside users: it follows from their answers"
            way_out = "leave out users, or requests_per_s"
            raise InputError(f"{place}.requests_per_s", table["requests_per_s"], expected, way_out)
    limits = parse(SloSpec, slo or {}, place=place.partition(": workload")[0])
    if isinstance(table.get("slo"), dict):
        limits = parse(ClassSlo, table["slo"], place=f"{place}.slo").over(limits)
    users, think_s = table["users"], table.get("think_s", 0.0)
    table["requests_per_s"] = 1.0  # where a key is missing or impossible, that key is refused
    longest = _longest_answer(table, place)
    if longest is not None and _at_least(users, 1) and _at_least(think_s, 0):
        table["requests_per_s"] = users / (limits.longest_e2e_s(longest) + think_s)


def _longest_answer(table: dict[str, Any], place: str) -> int | None:
    """Return the tokens of the longest answer; `None` where the lengths are refused later."""
    if table.get("lengths"):
        rows = parse(list[LengthRow], table["lengths"], place=f"{place}.lengths")
        return max(answer for _, answer, _ in rows)
    answer = table.get("output_tokens")
    if answer is None:
        return None
    return parse(Lengths, answer, place=f"{place}.output_tokens").max_tokens


def _at_least(value: object, least: float) -> bool:
    return isinstance(value, int | float) and value >= least


def _sum_rates(
    workload: dict[str, Any],
    classes: list[dict[str, Any]],
    overridden_keys: set[str],
    *,
    place: str,
) -> None:
    rates = [part.get("requests_per_s") for part in classes]
    positive_rates = [rate for rate in rates if isinstance(rate, int | float) and rate > 0]
    total, whole_rate = sum(positive_rates), workload.get("requests_per_s")
    if "workload.requests_per_s" in overridden_keys and isinstance(whole_rate, int | float):
        if any(part.get("users") is not None for part in classes):
            expected = "no rate of all classes: some have users"
            raise InputError(
                f"{place}: workload.requests_per_s",
                whole_rate,
                expected,
                "change each class by itself",
            )
        for part in classes if positive_rates == rates and positive_rates else ():
            part["requests_per_s"] *= whole_rate / total
    elif whole_rate is None or any(key.startswith("workload.classes") for key in overridden_keys):
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
    if isinstance(table, dict):
        return table.setdefault(name, {})
    known = table if isinstance(table, list | tuple) else ()
    return next((one for one in known if isinstance(one, dict) and one.get("name") == name), None)


def _pairs(overrides: Overrides) -> Iterable[tuple[str, object]]:
    return overrides.items() if isinstance(overrides, Mapping) else map(_pair, overrides)


def _pair(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise InputError("--set", text, "key=value, for example workload.requests_per_s=20")
    key, value = key.strip(), value.strip()
    # A version is a text, also one that looks like a number.
    return key, value.strip("\"'") if key == "engine.version" else toml_value(value)


def _words(overrides: Overrides) -> Iterator[str]:
    if isinstance(overrides, Mapping):
        yield from (f"{key}={written(value)}" for key, value in overrides.items())
    else:
        yield from (f"--set {text}" for text in overrides)


def toml_value(text: str) -> object:
    """Return a value as TOML writes it; text may stand without quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text
