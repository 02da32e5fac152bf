"""Quantities as people read them, and values whose quantities are scaled."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

SCALES = (
    # From this many seconds on: seconds of the unit, digits behind the point, unit. Each begins
    # where the scale below it would round to one digit more.
    (9.995, 1.0, 1, "s"),
    (0.99995, 1.0, 2, "s"),
    (9.995e-3, 1e-3, 1, "ms"),
    (0.9995e-3, 1e-3, 2, "ms"),
)


def seconds(value: float) -> str:
    """Write *value* seconds with three digits that matter or more: s, ms or whole µs."""
    for least, scale, digits, unit in SCALES:
        if value >= least:
            return f"{value / scale:.{digits}f} {unit}"
    return f"{value * 1e6:.0f} µs"


def signed_seconds(difference: float) -> str:
    """Write a difference as `seconds`, with its sign."""
    return f"{'-' if difference < 0 else '+'}{seconds(abs(difference))}"


def gigabytes(size_bytes: float, digits: int = 1) -> str:
    """Write bytes in units of 10^9."""
    return f"{size_bytes / 1e9:,.{digits}f} GB"


def counted(number: int, unit: str) -> str:
    """Write a number of things by the name of one: `1 GPU`, `2 GPUs`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


Record = TypeVar("Record")


def scaled(record: Record, factor: float, affix: str = "_s") -> Record:
    """Multiply the fields of a dataclass whose names begin or end with *affix*, as times do."""
    keys = fields(record)  # type: ignore[arg-type]
    names = [key.name for key in keys if key.name.startswith(affix) or key.name.endswith(affix)]
    changed = {name: _times(getattr(record, name), factor) for name in names}
    return replace(record, **changed)  # type: ignore[type-var]


def _times(value: Any, factor: float) -> Any:  # noqa: ANN401  (numbers, or a tuple or table of them)
    if isinstance(value, tuple):
        return tuple(factor * number for number in value)
    if isinstance(value, dict):
        return {name: factor * number for name, number in value.items()}
    return factor * value
