"""Intervals of means and percentiles of a run."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from minicluster.stats.batch_means import (
    FEWEST,
    batch_means,
    mean_interval,
    quantile_interval,
    surely_below,
)


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
    for _ in range(300):
        found = quantile_interval(correlated(rng, 10_000, width), share)
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


@pytest.mark.parametrize("count", [40, 57, 319, 320, 1001])
def test_batches_share_a_series_out(count: int) -> None:
    """Means of stretches, each times its length, add up to the series; weights are lengths."""
    values = np.random.default_rng(4).standard_normal(count)
    means = batch_means(values, 8)
    lengths = np.diff(np.append(np.arange(8) * count // 8, count))
    assert float(means @ lengths) == pytest.approx(values.sum())
    assert batch_means(values, 8, np.full(count, 3.0)) == pytest.approx(means)
    assert batch_means(np.full(count, 2.5), 8, values**2) == pytest.approx(2.5)
