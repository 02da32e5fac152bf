"""Quantities as people read them."""

from __future__ import annotations

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
