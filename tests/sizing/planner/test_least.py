"""The smallest count that holds, from any guess."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sizing.planner.closed_form import least, least_near


@given(threshold=st.integers(1, 5000), start=st.integers(1, 50))
def test_least(threshold: int, start: int) -> None:
    """Doubling and halving finds the smallest count that holds."""
    assert least(lambda count: count >= threshold, start) == max(threshold, start)


@given(threshold=st.integers(1, 300), guess=st.integers(1, 300), floor=st.integers(1, 50))
def test_least_near(threshold: int, guess: int, floor: int) -> None:
    """From any guess the smallest count that holds is found, between floor and ceiling."""
    found = least_near(lambda count: count >= threshold, guess, floor, 200)
    assert found == (None if threshold > 200 else max(threshold, floor))


def test_least_gives_up() -> None:
    """What never holds ends the search after bounded work."""
    assert least(lambda _: False, 1) is None
