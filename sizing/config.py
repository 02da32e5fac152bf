"""TOML and JSON to specs: the only file that knows pydantic and tomllib."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sizing.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")


def parse(cls: type[T], raw: object, *, place: str) -> T:
    """
    Turn parsed TOML or JSON into a spec.

    Args:
        cls: a spec, or any dataclass of specs.
        raw: what tomllib or json gave.
        place: file, named in errors.

    Raises:
        InputError: the first thing wrong, with its place, value and expectation.

    """
    try:
        # Strict mode takes a dataclass only from JSON, and JSON has no NaN to let through.
        return TypeAdapter(cls).validate_json(json.dumps(raw, allow_nan=False))
    except ValidationError as error:
        raise _first(error, place) from None
    except InputError as error:
        raise InputError(
            f"{place}: {error.place}", error.value, error.expectation, error.way_out
        ) from None
    except ValueError as error:
        raise InputError(place, str(error), "finite numbers") from None


def _first(error: ValidationError, place: str) -> InputError:
    """Say the first thing that is wrong the way we say everything."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    value: Any = first["input"]
    kind = first["type"]
    if kind in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        return InputError(f"{place}: {where}", None, "a value")
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        return InputError(
            f"{place}: {where}", value, "no such key", "`sizing schema` lists every key"
        )
    expectation = first["msg"].removeprefix("Input should be ")
    return InputError(f"{place}: {where}", value, expectation)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(str(path), str(error), "valid TOML") from None
