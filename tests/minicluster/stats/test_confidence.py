from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.stats.bootstrap import BootstrapDifference, differences, holm
from minicluster.stats.confidence import (
    INDEPENDENT,
    DesignEffect,
    design_effect,
    percentile_interval,
)
from minicluster.stats.shares import RESERVE, samples_needed, share_interval

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from verdict_coverage import measure


def persistent(rng: np.random.Generator, count: int, stays: float) -> np.ndarray:
    """Return 1 for 30 % of the time, correlated by stays ** k over k values."""
    fresh = rng.random(count) >= stays
    fresh[0] = True
    drawn = (rng.random(count) < 0.3).astype(np.float64)
    return np.asarray(drawn[np.maximum.accumulate(np.where(fresh, np.arange(count), 0))])


def test_wilson_closed_form() -> None:
    """81 of 263: the interval of Wilson's score as statistics packages print it."""
    found = share_interval(81 / 263, 263, 1.0)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_independent_values_weigh_what_they_count() -> None:
    """Neighbours that have nothing in common have no design effect."""
    rng = np.random.default_rng(0)

    assert design_effect(rng.exponential(size=20_000)) == INDEPENDENT
    assert design_effect(np.full(1000, np.inf)) == INDEPENDENT
    assert design_effect(np.array([])) == INDEPENDENT


@pytest.mark.parametrize(("count", "stays"), [(3000, 0.9), (30_000, 0.98)])
def test_design_effect_closed_form(count: int, stays: float) -> None:
    """Correlation r ** k has the effect (1 + r) / (1 - r), on average in longer runs."""
    rng = np.random.default_rng(2)
    found = [design_effect(persistent(rng, count, stays)).estimate for _ in range(60)]

    assert np.mean(found) == pytest.approx((1 + stays) / (1 - stays), rel=0.2)


def test_an_unsure_effect_counts_more_as_student_says() -> None:
    effect = DesignEffect(estimate=4.0, freedom=5)
    assert effect.adjusted == pytest.approx(4.0 * (2.571 / 1.95996) ** 2, rel=1e-3)
    assert replace(effect, freedom=math.inf).adjusted == pytest.approx(4.0)


@given(st.integers(1, 5000), st.floats(0, 1), st.floats(1, 100))
def test_more_values_never_widen(count: int, share: float, effect: float) -> None:
    """The share lies in its own interval, which lies in [0, 1] and in that of fewer values."""
    few, many = share_interval(share, count, effect), share_interval(share, 2 * count, effect)

    assert 0 <= few.low <= many.low + 1e-12 <= share + 2e-12
    assert share - 2e-12 <= many.high - 1e-12 <= few.high <= 1


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_enough_is_what_proves_a_percentile_with_reserve(level: float) -> None:
    """Without any miss, so many prove it at the reserve's design effect, and one less does not."""
    needed = samples_needed(level)

    assert share_interval(1.0, needed, RESERVE).low >= level
    assert share_interval(1.0, needed - 1, RESERVE).low < level


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
    drawn = np.random.default_rng(seed).integers(0, 30, count).astype(np.float64)
    values = np.where(drawn < 28, drawn, np.inf)  # requests without an answer
    around = percentile_interval(values, level, effect)
    assert around.low <= around.high

    for limit in range(-1, 31):
        share = float((values <= limit).mean())
        kept = share_interval(share, count, effect)
        edge = min(abs(kept.low - level), abs(kept.high - level))
        if edge > 1e-9:
            assert (kept.low >= level) == (limit >= around.high)
            if around.low > values.min():
                assert (kept.high < level) == (limit < around.low)


def excludes_zero(found: BootstrapDifference) -> bool:
    return not found.low <= 0 <= found.high


def test_pairs_cancel_what_they_share() -> None:
    """A difference of 1 % shows in pairs, and drowns in two runs of their own."""
    rng = np.random.default_rng(4)
    first = rng.exponential(size=2000)
    second = first * 1.01
    other = rng.exponential(size=2000) * 1.01

    for compared, paired, statistic, found in (
        (second, True, "mean", True),
        (other, False, "mean", False),
        (2 * other, False, "p90", True),
    ):
        [each] = differences(first, compared, (statistic,), paired=paired)
        assert excludes_zero(each) == found


def test_holm_marks_fewer_the_more_there_are() -> None:
    """The smallest against 5 % / 4, the next against 5 % / 3: the first above ends it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == (True, False, False, True)
    assert holm([0.04]) == (True,)
    assert holm([0.04] * 16) == (False,) * 16
    assert holm([0.03, 0.026, 0.02]) == (False, False, False)
    assert holm([]) == ()


@pytest.mark.parametrize("utilisation", [0.5, 0.88])
def test_intervals_hold_the_truth(utilisation: float) -> None:
    cell = measure(utilisation, 5, 60)

    # The four verdicts of a run go together: of 60 runs three standard deviations are 8 %.
    assert cell.judged
    assert cell.coverage >= 0.87
    assert cell.wrong <= 1
