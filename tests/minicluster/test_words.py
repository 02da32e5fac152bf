"""Seconds and phases as screens show them, and sums of phases."""

from __future__ import annotations

import pytest

from minicluster.phases import (
    FIRST_DECODE_STEP,
    HANDOFF,
    KV_FETCH,
    QUEUED_PREFILL,
    TTFT_PHASES,
    label,
    phase_s,
)
from minicluster.units import seconds, signed_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (46e-6, "46 µs"),
        (0.9996e-3, "1.00 ms"),
        (0.00123, "1.23 ms"),
        (0.009996, "10.0 ms"),
        (0.6229, "622.9 ms"),
        (0.99996, "1.00 s"),
        (1.234, "1.23 s"),
        (9.996, "10.0 s"),
        (457.81, "457.8 s"),
    ],
)
def test_latencies_are_written_for_people(value: float, text: str) -> None:
    """Microseconds below a millisecond, milliseconds below a second; three digits at least."""
    assert seconds(value) == text
    assert (signed_seconds(value), signed_seconds(-value - 1e-12)) == (f"+{text}", f"-{text}")


EACH = {name: float(2**k) for k, name in enumerate(TTFT_PHASES)}


@pytest.mark.parametrize(
    ("known", "name", "expected"),
    [
        (EACH, HANDOFF, 8 + 16 + 32),
        (EACH, QUEUED_PREFILL, 2 + 4),
        ({KV_FETCH: 5.0, FIRST_DECODE_STEP: 1.0}, HANDOFF, 6.0),
        ({HANDOFF: 5.0}, HANDOFF, 5.0),
        ({HANDOFF: 5.0}, KV_FETCH, None),
        ({FIRST_DECODE_STEP: 5.0}, HANDOFF, None),
        ({}, "prefill", None),
    ],
)
def test_a_sum_is_known_where_its_parts_are(
    known: dict[str, float], name: str, expected: float | None
) -> None:
    """A part is not known by its sum, and a sum not by one of its parts."""
    assert phase_s(known, name) == expected


def test_screens_show_words() -> None:
    """Spaces instead of underscores, and the capitals of abbreviations."""
    assert [label(name) for name in ("kv_transfer", "first_decode_step", "ttft")] == [
        "KV transfer",
        "first decode step",
        "TTFT",
    ]
