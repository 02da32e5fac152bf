"""The edge of what holds: the least count, the highest rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizing.planner.edge import RESOLUTION, Band, highest, least


@given(
    threshold=st.integers(1, 300),
    guess=st.integers(1, 300),
    floor=st.integers(1, 50),
    step=st.integers(1, 40),
)
def test_the_least_count_is_found_from_any_guess(
    threshold: int, guess: int, floor: int, step: int
) -> None:
    """It holds, less than a step above the least; `None` where nothing up to the ceiling holds."""
    found = least(lambda count: count >= threshold, guess, floor, 200, step=step)
    if threshold > 200:
        assert found is None
        return
    expected = max(threshold, floor)
    assert found is not None
    assert expected <= found < expected + step


@given(edge=st.floats(0.05, 20), guess=st.floats(0.05, 20), steepness=st.floats(0.3, 6))
def test_the_highest_rate_is_found_from_any_guess(
    edge: float, guess: float, steepness: float
) -> None:
    """Within the resolution, or within the band, however steeply a latency grows with the rate."""
    band = Band(least=0.9, aim=0.95, most=1.0)
    tried: list[float] = []

    def used(rate: float) -> float:
        tried.append(rate)
        return float((rate / edge) ** steepness)

    found = highest(used, 0.01, 20.5, guess=guess, band=band)
    assert found is not None
    assert found <= edge * (1 + 1e-9)
    assert used(found) >= band.least or found >= min(edge, 20.5) / (1 + RESOLUTION) ** 2
    assert len(tried) < 40


@pytest.mark.parametrize("share", [0.1, 1.5])
def test_a_latency_that_no_rate_moves_has_no_edge(share: float) -> None:
    """All rates hold, or none does."""
    band = Band(least=0.9, aim=0.95, most=1.0)
    found = highest(lambda _: share, 1.0, 10.0, guess=2.0, band=band)
    assert found == (None if share > 1 else pytest.approx(10, rel=2 * RESOLUTION))
