"""Where the warm-up of a run ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minicluster.stats.warmup import FEWEST_GROUPS, GROUP, mser5, mser5_of_measured

RULES = (mser5, mser5_of_measured)


def steady(count: int = 20_000) -> NDArray[np.float64]:
    """Return a normal series, mean 0, deviation 1, whose neighbours depend on one another."""
    noise = np.random.default_rng(3).standard_normal(count + 4)
    return np.convolve(noise, np.full(5, 5**-0.5), mode="valid")


@pytest.mark.parametrize("rule", RULES)
def test_a_transient_is_cut(rule: Callable[[NDArray[np.float64]], tuple[int, bool]]) -> None:
    cut, settled = rule(steady())
    assert settled
    assert cut < 4000
    cut, settled = rule(steady() - 20 * np.exp(-np.arange(20_000) / 500))
    assert settled
    assert 1000 < cut < 6000  # there the transient is below three deviations
    assert rule(steady() + np.arange(20_000) / 1000) == (10_000, False)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=600))
def test_the_cut_is_a_group_of_the_first_half(values: list[float]) -> None:
    series = np.array(values)
    cut, settled = mser5(series)
    assert cut % GROUP == 0
    assert 0 <= cut <= len(values) // GROUP // 2 * GROUP
    assert settled == (
        cut < len(values) // GROUP // 2 * GROUP or len(values) < GROUP * FEWEST_GROUPS
    )
    assert mser5_of_measured(series) in {(cut, settled), (0, True)}


@given(st.floats(0.1, 10), st.floats(-100, 100))
def test_unit_and_origin_do_not_matter(factor: float, shift: float) -> None:
    """The cut is the same in seconds and in milliseconds, and of latencies all longer alike."""
    series = steady(2000) - 20 * np.exp(-np.arange(2000) / 100)
    assert mser5(series * factor + shift) == mser5(series)


def test_no_answer_counts_as_the_longest() -> None:
    series = steady(2000)
    lost = np.where(series == series.max(), np.inf, series)
    assert mser5_of_measured(lost)[0] == mser5_of_measured(series)[0]
    assert mser5_of_measured(np.full(200, np.inf)) == (0, True)


def test_a_burst_at_the_start_of_a_measured_run_stays() -> None:
    """Where such bursts come again later, one at the start is no warm-up; MSER-5 alone cuts it."""
    series = steady(4000)
    for start in (0, 900, 1800, 2700, 3600):
        series[start : start + 100] += 10
    assert mser5(series)[0] > 0
    assert mser5_of_measured(series) == (0, True)
