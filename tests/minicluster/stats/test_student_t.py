"""Quantiles of Student's t against closed forms, a table and the normal distribution."""

from __future__ import annotations

from math import inf, pi, sqrt, tan
from statistics import NormalDist

import pytest

from minicluster.stats.student_t import student

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
