from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.confidence import (
    Weight,
    count_needed,
    mean_interval,
    percentile_interval,
    samples_needed,
    share_interval,
    student,
    weigh,
)
from loadtest.significance import difference
from loadtest.warmup import settled_from

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from verdict_coverage import measure

INDEPENDENT = Weight(design_effect=1.0, quantile=1.959964)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_intervals_hold_what_was_seen(count: int, good: int) -> None:
    """A share lies in its own interval, and the interval in [0, 1]."""
    share = min(good, count) / count
    found = share_interval(share, count, INDEPENDENT)

    assert found.high is not None
    assert 0 <= found.low <= share + 1e-12
    assert share - 1e-12 <= found.high <= 1


def test_wilson_closed_form() -> None:
    """81 of 263: the interval of Wilson's score as statistics packages print it."""
    found = share_interval(81 / 263, 263, INDEPENDENT)

    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (7, 2.365), (30, 2.042)])
def test_student(freedom: int, quantile: float) -> None:
    """Quantiles of the table, within 1 %."""
    assert student(freedom) == pytest.approx(quantile, rel=0.01)


@given(st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.99]))
def test_so_many_tell_and_one_less_does_not(share: float, target: float) -> None:
    """`count_needed` is the least number whose interval leaves the target out."""
    needed = count_needed(share, target, INDEPENDENT)
    if needed is None:
        assert share == pytest.approx(target, abs=1e-5)
        return
    told = share_interval(share, needed, INDEPENDENT)
    assert told.high is not None
    assert not told.low < target <= told.high


def test_long_independent_runs_weigh_what_they_count() -> None:
    """Independent values in sufficient number have no design effect; fewer keep a reserve."""
    rng = np.random.default_rng(0)

    assert weigh(rng.exponential(size=20_000)).design_effect == 1.0
    assert weigh(rng.exponential(size=1000)).design_effect >= 4.0
    assert samples_needed(0.99) > 1000


def test_repeated_values_weigh_as_one() -> None:
    """Every value 50 times in a row: 50 of them are worth one."""
    values = np.repeat(np.random.default_rng(1).exponential(size=4000), 50)

    assert weigh(values).design_effect == pytest.approx(50, rel=0.9)


def test_percentile_interval_is_open_where_nothing_lies_above() -> None:
    """The p99 of 50 values has no upper end; that of 50,000 has both, around the truth."""
    rng = np.random.default_rng(2)
    few = percentile_interval(rng.exponential(size=50), 0.99)
    many = percentile_interval(rng.exponential(size=50_000), 0.99)

    assert few.high is None
    assert many.high is not None
    assert many.low <= -np.log(0.01) <= many.high


def test_means_of_correlated_values() -> None:
    """Batch means see that neighbours are alike: the interval is wider than of a shuffle."""
    rng = np.random.default_rng(3)
    noise = rng.normal(size=20_000)
    alike = np.convolve(noise, np.ones(50) / 50, mode="valid")
    shuffled = rng.permutation(alike)
    wide, narrow = mean_interval(alike), mean_interval(shuffled)

    assert wide.high is not None
    assert narrow.high is not None
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_pairs_cancel_what_they_share() -> None:
    """A difference of 1 % shows in pairs, and drowns in two runs of their own."""
    rng = np.random.default_rng(4)
    first = rng.exponential(size=2000)
    second = first * 1.01
    other = rng.exponential(size=2000) * 1.01

    assert difference(first, second, "mean", paired=True).significant
    assert not difference(first, other, "mean", paired=False).significant
    assert difference(first, 2 * other, "p90", paired=False).significant


def test_warmup_is_cut() -> None:
    """MSER-5 finds where a transient ends, cuts little where there is none, and owns to failure."""
    rng = np.random.default_rng(5)
    steady = rng.exponential(size=2000)
    transient = np.concatenate([10 + rng.exponential(size=300), steady])

    assert settled_from(transient)[0] == pytest.approx(300, abs=20)
    assert settled_from(steady)[0] < 200
    assert not settled_from(np.arange(2000.0))[1]
    assert settled_from(np.array([np.inf] * 200))[0] == 0


@pytest.mark.parametrize(("utilisation", "minutes"), [(0.5, 5), (0.75, 5), (0.88, 5)])
def test_intervals_hold_the_truth(utilisation: float, minutes: float) -> None:
    """On queues whose truth is known, intervals behind a verdict hold it 95 % of the time."""
    cell = measure(utilisation, minutes, 60)

    # The four verdicts of a run go together: of 60 runs three standard deviations are 8 %.
    assert cell.judged
    assert cell.coverage >= 0.87
    assert cell.wrong <= 1
