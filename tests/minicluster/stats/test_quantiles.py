"""Percentiles of values, alone, together and weighted; quantiles of Student's t."""

from __future__ import annotations

from math import inf, pi, sqrt, tan
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.stats.quantiles import quantile, summarise, weighted_quantile
from minicluster.stats.shares import LEVELS
from minicluster.stats.student_t import student

SECONDS = st.lists(st.floats(0, 1e3), min_size=1, max_size=300)
LEVEL = st.integers(1, 100).map(lambda percent: percent / 100)


@given(SECONDS, st.sampled_from(sorted(LEVELS)), st.floats(0, 1e3))
def test_percentile_and_share_say_the_same(values: list[float], name: str, limit: float) -> None:
    within = sum(value <= limit for value in values)
    needed = round(LEVELS[name] * 100) * len(values)

    assert (quantile(values, LEVELS[name]) <= limit) == (100 * within >= needed)


def test_closed_form() -> None:
    """Of 1 to 100 the k-th percentile is k and the mean 50.5; of nothing there is none."""
    found = summarise(list(range(100, 0, -1)))

    assert (found.p50_s, found.p90_s, found.p95_s, found.p99_s) == (50, 90, 95, 99)
    assert (found.count, found.mean_s, found.max_s) == (100, 50.5, 100)
    assert summarise([]) is None


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 9)), min_size=1, max_size=60), LEVEL)
def test_weights_count_as_repetitions(pairs: list[tuple[float, int]], level: float) -> None:
    values, weights = np.array(sorted(pairs)).T
    repeated = np.repeat(values, weights.astype(int))
    assert weighted_quantile(values, level, weights) == quantile(repeated, level)


CONFIDENCES = (0.01, 0.5, 0.8, 0.95, 0.999)


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_closed_forms(confidence: float) -> None:
    """One degree of freedom is Cauchy's distribution; two have an algebraic quantile."""
    assert student(1, confidence) == pytest.approx(tan(pi * confidence / 2), rel=1e-9)
    two = confidence * sqrt(2 / (1 - confidence**2))
    assert student(2, confidence) == pytest.approx(two, rel=1e-9)


@pytest.mark.parametrize(
    ("freedom", "t"), [(3, 3.182446), (5, 2.570582), (10, 2.228139), (120, 1.979930)]
)
def test_table(freedom: float, t: float) -> None:
    """The two-sided 95 % column of the table in Abramowitz and Stegun, 26.10."""
    assert student(freedom, 0.95) == pytest.approx(t, abs=1e-6)


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_limit(confidence: float) -> None:
    """The quantile falls with the degrees of freedom, to the normal distribution's."""
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    found = [student(freedom, confidence) for freedom in (0.3, 1, 1.7, 2, 9, 80, 4e3, 9e5, inf)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    assert found[-2] == pytest.approx(normal, rel=1e-5)
    assert found[-1] == normal
