"""Quantities as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.units import seconds

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def read(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (46e-6, "46 µs"),
        (0.9994e-3, "999 µs"),
        (0.9996e-3, "1.00 ms"),
        (0.00123, "1.23 ms"),
        (0.009994, "9.99 ms"),
        (0.009996, "10.0 ms"),
        (0.0512, "51.2 ms"),
        (0.6229, "622.9 ms"),
        (0.99994, "999.9 ms"),
        (0.99996, "1.00 s"),
        (1.234, "1.23 s"),
        (9.996, "10.0 s"),
        (34.56, "34.6 s"),
        (457.81, "457.8 s"),
    ],
)
def test_latencies_are_written_for_people(value: float, text: str) -> None:
    """Microseconds below a millisecond, milliseconds below a second; three digits at least."""
    assert seconds(value) == text


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_order_is_kept(one: float, other: float) -> None:
    """The longer time is never written as the shorter one."""
    low, high = sorted((one, other))
    assert read(seconds(low)) <= read(seconds(high)) * (1 + 1e-12)
