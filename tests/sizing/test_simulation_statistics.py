"""Warm-up, percentiles and intervals of a run."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from sizing.simulation.statistics import (
    FEWEST,
    mean_interval,
    quantile,
    quantile_interval,
    settled_from,
    surely_below,
)


def correlated(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Return a normal series, mean 0, deviation 1, with values *width* apart independent."""
    noise = rng.standard_normal(count + width - 1)
    return np.convolve(noise, np.full(width, width**-0.5), mode="valid")


@pytest.mark.parametrize("width", [1, 30])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_intervals_hold_the_truth_as_often_as_they_say(width: int, share: float) -> None:
    """90 % intervals of percentiles hold the true one in 85 to 97 % of runs, correlated or not."""
    rng = np.random.default_rng(0)
    truth = NormalDist().inv_cdf(share)
    held = 0
    for _ in range(300):
        found = quantile_interval(correlated(rng, 10_000, width), share)
        assert found.low_s is not None
        held += found.low_s <= truth <= (np.inf if found.high_s is None else found.high_s)
    assert 0.85 <= held / 300 <= 0.97


def test_the_mean_has_an_interval_too() -> None:
    """It holds the true mean in about 90 % of runs."""
    rng = np.random.default_rng(1)
    found = [mean_interval(5 + correlated(rng, 5000, 20)) for _ in range(300)]
    held = sum(each.low_s <= 5 <= each.high_s for each in found)  # type: ignore[operator]
    assert 0.85 <= held / 300 <= 0.95


def test_few_values_have_no_interval() -> None:
    """Below forty values nothing is claimed, and above them no end beyond the largest value."""
    few = quantile_interval(np.arange(FEWEST - 1.0), 0.5)
    assert (few.low_s, few.high_s) == (None, None)
    assert quantile_interval(np.arange(50.0), 0.99).high_s is None
    assert not surely_below(np.zeros(FEWEST - 1), 1.0, 0.5)


def test_a_limit_far_above_holds_surely() -> None:
    """A percentile without an upper end is still surely below what no value comes near."""
    rng = np.random.default_rng(2)
    values = correlated(rng, 20_000, 10)
    assert surely_below(values, 10.0, 0.99)
    assert not surely_below(values, quantile_interval(values, 0.99).value_s, 0.99)


def test_warm_up_is_cut_by_rule() -> None:
    """A transient is cut, a steady series hardly, and a growing one is called unsettled."""
    rng = np.random.default_rng(3)
    steady = correlated(rng, 20_000, 5)
    cut, settled = settled_from(steady)
    assert settled
    assert cut < 4000
    cut, settled = settled_from(steady - 20 * np.exp(-np.arange(20_000) / 500))
    assert settled
    assert 1000 < cut < 6000  # there the transient is below three deviations
    assert settled_from(steady + np.arange(20_000) / 1000) == (10_000, False)


def test_weights_count_as_repetitions() -> None:
    """A weighted percentile is that of the values repeated."""
    values, weights = np.array([1.0, 2.0, 7.0]), np.array([3.0, 1.0, 6.0])
    repeated = np.repeat(values, weights.astype(int))
    for share in (0.05, 0.3, 0.35, 0.4, 0.41, 0.99, 1.0):
        expected = quantile(repeated, share, np.ones(10))
        assert quantile(values, share, weights) == expected
