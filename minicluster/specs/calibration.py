"""Timed engine steps, one row of steps.csv each, and the constants fitted to them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, get_type_hints

from minicluster.errors import Fault, InputError
from minicluster.files import read_table, write_table
from minicluster.specs.checks import Count, NotNegative, Positive, Spec, Whole, choice
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey(Spec):
    """Machine, engine and model that a calibration is valid for; any other needs one of its own."""

    processor: str
    cores: int
    engine: str
    engine_version: str
    model_config_hash: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec(Spec):
    """Constants fitted to the steps of one machine, timed on `date` (ISO 8601)."""

    name: str
    date: str
    key: CalibrationKey
    num_rows: int
    prefill: StepCoefficients
    decode: StepCoefficients
    path: PathCoefficients
    interference: Interference


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Spec):
    """
    One grid point, the mean of `repeats` observations.

    Attributes:
        phase: `prefill`: seconds of one prompt in a saturated prefill pool. `decode`: seconds of
            one step, averaged over tokens. `request`: TTFT of the prefill pool alone, idle.
            `path`: TTFT of the whole system, idle.
        tokens: prompt tokens (0 for decode).
        batch: sequences decoded together, mean over tokens (0 for prefill).
        context: mean cached tokens per sequence during the step (0 for prefill).
        other_busy_fraction: share of the time in which the other pool was busy.
        other_batch: for prefill, sequences that decode held, mean over time; else 0.
        joins: for decode, requests that joined the batch per step; else 0.
        others_fraction: share of the cores that other processes took meanwhile.
    """

    phase: Annotated[str, choice("prefill", "decode", "request", "path")]
    tokens: Whole
    batch: NotNegative
    context: NotNegative
    other_busy_fraction: NotNegative
    repeats: Count
    seconds: Positive
    date: str
    key: CalibrationKey
    other_batch: NotNegative = 0.0
    joins: NotNegative = 0.0
    others_fraction: NotNegative = 0.0


OWN = tuple(field.name for field in fields(Measurement) if field.name != "key")
KEY = tuple(field.name for field in fields(CalibrationKey))
TYPES = get_type_hints(Measurement) | get_type_hints(CalibrationKey)
"""Types of the columns: whole numbers, numbers, text."""


def read_measurements(path: Path) -> tuple[Measurement, ...]:
    """
    Read steps.csv, at least one row.

    Raises InputError: no table, a column missing, a value of the wrong type, or rows of several
    machines or models.
    """
    lines = read_table(path, "a CSV of `serving measure`", OWN + KEY)
    rows = tuple(_row(line, place) for place, line in lines)
    if not rows:
        raise InputError(str(path), Fault("has no rows"), "the timed steps of `serving measure`")
    if len({row.key for row in rows}) > 1:
        raise InputError(
            str(path),
            Fault("has rows of several machines or models"),
            "the rows of one machine and one model",
        )
    return rows


def _row(line: dict[str, str | None], place: str) -> Measurement:
    values: dict[str, str | int | float] = {}
    for name in OWN + KEY:
        text = line.get(name)
        if text is None:
            raise InputError(f"{place}: {name}", None, "a cell of that column")
        try:
            values[name] = TYPES[name](text)
        except ValueError:
            raise InputError(f"{place}: {name}", text, "a number") from None
    key = CalibrationKey(**{name: values.pop(name) for name in KEY})  # type: ignore[arg-type]
    try:
        return Measurement(key=key, **values)  # type: ignore[arg-type]
    except InputError as error:
        raise error.inside(place) from None


def write_measurements(path: Path, rows: Iterable[Measurement]) -> None:
    """Write steps.csv, whole or not at all."""
    cells = (
        (*(getattr(row, name) for name in OWN), *(getattr(row.key, name) for name in KEY))
        for row in rows
    )
    write_table(path, OWN + KEY, cells)
