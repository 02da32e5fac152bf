"""Checks that every spec makes of its numbers, raising with name, value and expectation."""

from __future__ import annotations

import math

from minicluster.errors import InputError

STRICT = {"extra": "forbid", "strict": True}
"""Value of `__pydantic_config__` in each spec; a plain dict, so that specs import no pydantic."""


def positive(**values: float | None) -> None:
    """Refuse values that are not finite and above zero; `None` means not given."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(name, value, "a positive, finite number")


def not_negative(**values: float | None) -> None:
    """Refuse values that are not finite or below zero; `None` means not given."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InputError(name, value, "a finite number, zero or more")


def fraction(**values: float | None) -> None:
    """Refuse values outside (0, 1]; `None` means not given."""
    for name, value in values.items():
        if value is not None and not 0 < value <= 1:
            raise InputError(name, value, "a fraction above 0 and at most 1")


def one_of(allowed: tuple[str, ...], **values: str | None) -> None:
    """Refuse values that are not among those allowed; `None` means not given."""
    for name, value in values.items():
        if value is not None and value not in allowed:
            raise InputError(name, value, "one of " + ", ".join(allowed))
