from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minicluster.stats.bootstrap import BootstrapDifference, differences, holm
from minicluster.stats.confidence import (
    INDEPENDENT,
    RESERVE,
    DesignEffect,
    count_needed,
    design_effect,
    percentile_interval,
    samples_needed,
    share_interval,
)

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from verdict_coverage import cell_of, measure


def persistent(rng: np.random.Generator, count: int, stays: float) -> np.ndarray:
    """Return 1 for 30 % of the time, correlated by stays ** k over k values."""
    fresh = rng.random(count) >= stays
    fresh[0] = True
    drawn = (rng.random(count) < 0.3).astype(np.float64)
    return np.asarray(drawn[np.maximum.accumulate(np.where(fresh, np.arange(count), 0))])


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_intervals_hold_what_was_seen(count: int, good: int) -> None:
    """A share lies in its own interval, and the interval in [0, 1]."""
    share = min(good, count) / count
    found = share_interval(share, count, 1.0)

    assert found.high is not None
    assert 0 <= found.low <= share + 1e-12
    assert share - 1e-12 <= found.high <= 1


def test_wilson_closed_form() -> None:
    """81 of 263: the interval of Wilson's score as statistics packages print it."""
    found = share_interval(81 / 263, 263, 1.0)

    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@given(st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.99]))
def test_so_many_tell_and_one_less_does_not(share: float, target: float) -> None:
    """`count_needed` is the least number whose interval leaves the target out."""
    needed = count_needed(share, target, 1.0)
    if needed is None:
        assert share == pytest.approx(target, abs=1e-5)
        return
    told = share_interval(share, needed, 1.0)
    assert told.high is not None
    assert not told.low < target <= told.high


def test_independent_values_weigh_what_they_count() -> None:
    """Neighbours that have nothing in common have no design effect."""
    rng = np.random.default_rng(0)

    assert design_effect(rng.exponential(size=20_000)) == INDEPENDENT
    assert design_effect(np.full(1000, np.inf)) == INDEPENDENT
    assert design_effect(np.array([])) == INDEPENDENT


def test_repeated_values_weigh_as_one() -> None:
    """Every value 50 times in a row: 50 of them are worth one, and the largest estimate counts."""
    found = [
        design_effect(np.repeat(np.random.default_rng(seed).exponential(size=4000), 50)).estimate
        for seed in range(10)
    ]

    assert 50 <= np.mean(found) <= 80


@pytest.mark.parametrize(("count", "stays"), [(3000, 0.9), (30_000, 0.98), (30_000, 0.99)])
def test_design_effect_closed_form(count: int, stays: float) -> None:
    """Correlation r ** k has the effect (1 + r) / (1 - r), on average in longer runs."""
    rng = np.random.default_rng(2)
    found = [design_effect(persistent(rng, count, stays)).estimate for _ in range(60)]

    assert np.mean(found) == pytest.approx((1 + stays) / (1 - stays), rel=0.2)


def mean_in_service(rng: np.random.Generator, count: int, load: float) -> np.ndarray:
    """Return how many requests are in service while each one is, where none waits; shape (n,)."""
    due = np.cumsum(rng.exponential(size=count)) / load
    service = rng.lognormal(-(0.3**2) / 2, 0.3, count)
    times = np.concatenate([due, due + service])
    order = np.argsort(times, kind="stable")
    serving = np.cumsum(np.repeat([1.0, -1.0], count)[order])
    at = np.empty(2 * count)
    at[order] = np.concatenate([[0.0], np.cumsum(serving[:-1] * np.diff(times[order]))])
    return np.asarray((at[count:] - at[:count]) / service)


def test_what_lasts_as_long_as_a_request() -> None:
    """30 in service, each as slow as the number beside it: 40, where order one would see 87."""
    found = [
        design_effect(mean_in_service(np.random.default_rng(seed), 2600, 30)[600:]).estimate
        for seed in range(40)
    ]

    assert 40 <= np.mean(found) <= 70


@pytest.mark.parametrize(("freedom", "t"), [(5, 2.571), (10, 2.228), (30, 2.042)])
def test_an_unsure_effect_widens_an_interval_as_student_says(freedom: float, t: float) -> None:
    effect = DesignEffect(estimate=4.0, freedom=freedom)
    sure, unsure = (share_interval(0.5, 10**6, each) for each in (4.0, effect.adjusted))

    assert unsure.high is not None
    assert sure.high is not None
    assert (unsure.high - unsure.low) / (sure.high - sure.low) == pytest.approx(t / 1.96, rel=0.003)


def test_what_stretches_have_in_common_is_seen_without_bias() -> None:
    """
    The mean over many runs of 100 stretches is the 0.6 that there is; order one would see 0.57.

    It is read from the degrees of freedom: B / (1 + 2 (1 + s) / (1 - s)).
    """
    rng = np.random.default_rng(3)
    found = [design_effect(persistent(rng, 100, 0.6)).freedom for _ in range(2000)]
    ratios = (100 / np.array([freedom for freedom in found if np.isfinite(freedom)]) - 1) / 2
    seen = (ratios - 1) / (ratios + 1)

    assert len(seen) > 1900
    assert np.mean(seen) == pytest.approx(0.6, abs=0.01)


@given(st.floats(1, 1000), st.floats(2, 1e6))
def test_what_is_unsure_counts_more(seen: float, freedom: float) -> None:
    effect = DesignEffect(estimate=seen, freedom=freedom)

    assert effect.adjusted >= DesignEffect(estimate=seen, freedom=2 * freedom).adjusted >= seen
    assert DesignEffect(estimate=seen, freedom=math.inf).adjusted == pytest.approx(seen)


@given(st.integers(1, 5000), st.floats(0, 1), st.floats(1, 100))
def test_more_values_never_widen(count: int, share: float, effect: float) -> None:
    few, many = share_interval(share, count, effect), share_interval(share, 2 * count, effect)

    assert few.high is not None
    assert many.high is not None
    assert few.low - 1e-12 <= many.low
    assert many.high <= few.high + 1e-12


def test_long_runs_are_surer_of_their_effect() -> None:
    """Degrees of freedom follow the number of bursts met, not that of the values."""
    rng = np.random.default_rng(9)
    few = [design_effect(persistent(rng, 2000, 0.99)).freedom for _ in range(20)]
    many = [design_effect(persistent(rng, 60_000, 0.99)).freedom for _ in range(20)]

    assert np.median(few) < 15
    assert np.median(many) > 25


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_enough_is_what_proves_a_percentile_with_reserve(level: float) -> None:
    """Without any miss, so many prove it at the reserve's design effect, and one less does not."""
    needed = samples_needed(level)

    assert share_interval(1.0, needed, RESERVE).low >= level
    assert share_interval(1.0, needed - 1, RESERVE).low < level


def test_percentile_interval_is_open_where_nothing_lies_above() -> None:
    """The p99 of 50 values has no upper end; that of 50,000 has both, around the truth."""
    rng = np.random.default_rng(2)
    few = percentile_interval(rng.exponential(size=50), 0.99, 1.0)
    many = percentile_interval(rng.exponential(size=50_000), 0.99, 1.0)

    assert few.high is None
    assert many.high is not None
    assert many.low <= -np.log(0.01) <= many.high


@given(
    st.integers(1, 400),
    st.floats(1, 40),
    st.sampled_from([0.5, 0.9, 0.99]),
    st.integers(0, 2**32 - 1),
)
def test_the_interval_of_a_percentile_says_what_the_verdict_says(
    count: int, effect: float, level: float, seed: int
) -> None:
    """A limit is kept just from the upper end on, and missed just below the lower one."""
    values = np.random.default_rng(seed).integers(0, 30, count).astype(np.float64)
    around = percentile_interval(values, level, effect)

    for limit in range(-1, 31):
        share = float((values <= limit).mean())
        kept = share_interval(share, count, effect)
        edge = min(abs(kept.low - level), abs(1.0 if kept.high is None else kept.high - level))
        if edge > 1e-9:
            assert (kept.low >= level) == (around.high is not None and limit >= around.high)
            if around.low > values.min():
                assert (kept.high is not None and kept.high < level) == (limit < around.low)


def mean_apart(
    first: NDArray[np.float64], second: NDArray[np.float64], *, paired: bool
) -> BootstrapDifference:
    """Compare the means."""
    return differences(first, second, ("mean",), paired=paired)[0]


def test_pairs_cancel_what_they_share() -> None:
    """A difference of 1 % shows in pairs, and drowns in two runs of their own."""
    rng = np.random.default_rng(4)
    first = rng.exponential(size=2000)
    second = first * 1.01
    other = rng.exponential(size=2000) * 1.01

    assert mean_apart(first, second, paired=True).significant
    assert not mean_apart(first, other, paired=False).significant
    assert differences(first, 2 * other, ("p90",), paired=False)[0].significant


def test_p_values_are_intervals_turned_round() -> None:
    """Above 5 % where the interval holds 0, below where it does not; 1 where nothing differs."""
    rng = np.random.default_rng(7)
    first = rng.exponential(size=1000)
    found = [
        mean_apart(first, rng.exponential(size=1000) * scale, paired=False)
        for scale in np.linspace(0.8, 1.2, 21)
    ]

    assert {each.significant for each in found} == {True, False}
    near = 2 / 400  # a draw more or less
    assert all((each.p_value < 0.05 + near) >= each.significant for each in found)
    assert all((each.p_value > 0.05 - near) or each.significant for each in found)
    same = differences(first, first, ("mean", "p99"), paired=True)
    assert [(each.value, each.low, each.high, each.p_value) for each in same] == [(0, 0, 0, 1)] * 2


def test_holm_marks_fewer_the_more_there_are() -> None:
    """The smallest against 5 % / 4, the next against 5 % / 3: the first above ends it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == (True, False, False, True)
    assert holm([0.04]) == (True,)
    assert holm([0.04] * 16) == (False,) * 16
    assert holm([0.03, 0.026, 0.02]) == (False, False, False)
    assert holm([]) == ()


def test_holm_marks_nothing_where_nothing_differs() -> None:
    rng = np.random.default_rng(8)
    shared, own = rng.normal(size=(4000, 1)), rng.normal(size=(4000, 15))
    for alike in (0.0, 0.5, 0.9):
        scores = alike**0.5 * shared + (1 - alike) ** 0.5 * own
        p_values = [[math.erfc(abs(z) / 2**0.5) for z in row] for row in scores.tolist()]
        marked = np.mean([any(holm(row)) for row in p_values])

        # Three standard errors of a share of 5 % among 4,000 are 1 %.
        assert marked < 0.06
    assert np.mean([min(row) < 0.05 for row in p_values]) > 0.1


@pytest.mark.parametrize(("utilisation", "minutes"), [(0.5, 5), (0.75, 5), (0.88, 5)])
def test_intervals_hold_the_truth(utilisation: float, minutes: float) -> None:
    cell = measure(utilisation, minutes, 60)

    # The four verdicts of a run go together: of 60 runs three standard deviations are 8 %.
    assert cell.judged
    assert cell.coverage >= 0.87
    assert cell.wrong <= 1


def test_coverage_counts_what_led_to_a_verdict() -> None:
    """Intervals without a verdict do not; a PASS of what fewer keep than promised is wrong."""
    found = [
        [(100, 0.95, 1, True), (100, 0.5, 0, False), (100, 0.9, 0, True)],
        [(100, 0.99, 1, False), (100, 0, -1, True), (100, 1.0, 1, False)],
    ]
    cell = cell_of(found, (0.8, 0.5), 0.9)

    assert cell.own.tolist() == [True, False]
    assert (cell.judged, cell.held, cell.wrong) == (3, 2, 2)
    assert cell.coverage == pytest.approx(2 / 3)


def test_too_short_a_run_gets_no_verdict() -> None:
    """Two minutes are too few requests for a p99, whatever they happen to show."""
    assert measure(0.75, 2, 20).judged == 0
