"""A series whose values depend on one another: intervals, and where its warm-up ends."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minicluster.stats.batch_means import FEWEST, batch_means, quantile_interval, surely_below
from minicluster.stats.warmup import FEWEST_GROUPS, GROUP, mser5, mser5_of_measured, rises


def correlated(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Return a normal series, mean 0, deviation 1, with values *width* apart independent."""
    noise = rng.standard_normal(count + width - 1)
    return np.convolve(noise, np.full(width, width**-0.5), mode="valid")


@pytest.mark.parametrize("width", [1, 30])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_intervals_hold_the_truth_as_often_as_they_say(width: int, share: float) -> None:
    rng = np.random.default_rng(0)
    truth = NormalDist().inv_cdf(share)
    held = 0
    for _ in range(150):
        found = quantile_interval(correlated(rng, 10_000, width), share)
        held += found.low_s <= truth <= (np.inf if found.high_s is None else found.high_s)
    assert 0.85 <= held / 150 <= 0.97


def test_few_values_have_no_interval() -> None:
    """Below forty values nothing is claimed, and above them no end beyond the largest value."""
    few = quantile_interval(np.arange(FEWEST - 1.0), 0.5)
    assert (few.low_s, few.high_s) == (None, None)
    assert quantile_interval(np.arange(50.0), 0.99).high_s is None
    assert not surely_below(np.zeros(FEWEST - 1), 1.0, 0.5)


@pytest.mark.parametrize("count", [40, 57, 319, 320, 1001])
def test_batches_share_a_series_out(count: int) -> None:
    """Means of stretches, each times its length, add up to the series; weights are lengths."""
    values = np.random.default_rng(4).standard_normal(count)
    means = batch_means(values, 8)
    lengths = np.diff(np.append(np.arange(8) * count // 8, count))
    assert float(means @ lengths) == pytest.approx(values.sum())
    assert batch_means(values, 8, np.full(count, 3.0)) == pytest.approx(means)
    assert batch_means(np.full(count, 2.5), 8, values**2) == pytest.approx(2.5)


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


@pytest.mark.parametrize("count", [16, 40, 150])
def test_a_rise_is_seen_where_there_is_none_as_rarely_as_it_says(count: int) -> None:
    """In 0.3 % of 4,000 runs: twelve, and more than 24 with a chance of one in a thousand."""
    rng = np.random.default_rng(count)
    seen = sum(rises(rng.lognormal(0, 0.5, count)) for _ in range(4000))
    assert seen <= 24


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
