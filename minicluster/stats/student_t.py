"""Quantiles of Student's t distribution."""

from __future__ import annotations

from functools import lru_cache
from math import exp, expm1, lgamma, log, log1p, sqrt
from statistics import NormalDist

NORMAL_FROM = 1e6
"""Degrees of freedom from which the normal quantile is returned: it differs by less than 2e-6."""

EPSILON = 1e-15
MOST_TERMS = 10_000
"""The continued fraction ends at a term that changes it by less, or after so many terms."""

HALVINGS = 60  # bisection steps: the probability is then known to the last bit of a double


@lru_cache(maxsize=4096)
def student(freedom: float, confidence: float) -> float:
    """
    Return the two-sided quantile t of Student's distribution: P(|T| < t) = *confidence*.

    Args:
        freedom: degrees of freedom, above 0, not necessarily whole; infinite: the normal's.
        confidence: probability between both ends, above 0 and below 1.

    Source: P(|T| > t) = I_x(freedom / 2, 1 / 2) with x = freedom / (freedom + t^2), where I is the
    regularised incomplete beta function (Abramowitz and Stegun, 26.7.1).
    """
    if freedom >= NORMAL_FROM:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = -1.0, 0.0  # of log x: for few degrees of freedom x lies far below 1e-300
    while _incomplete_beta(freedom / 2, 0.5, low) > 1 - confidence:
        low, high = 2 * low, low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _incomplete_beta(freedom / 2, 0.5, middle) > 1 - confidence:
            high = middle
        else:
            low = middle
    log_x = (low + high) / 2
    return sqrt(freedom) * sqrt(-expm1(log_x)) * exp(-log_x / 2)


def _incomplete_beta(a: float, b: float, log_x: float) -> float:
    """Return I_x(a, b), regularised; source: Abramowitz and Stegun, 26.5.8 and 26.5.2."""
    x = exp(log_x)
    log_rest = log(-expm1(log_x)) if log_x > -1 else log1p(-x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log_x + b * log_rest)
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1 - front * _continued_fraction(b, a, exp(log_rest)) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Evaluate 26.5.8 by Lentz's method; it converges in about sqrt(max(a, b)) terms."""
    tiny = 1e-300
    numerator, denominator = 1.0, 1 - (a + b) * x / (a + 1)
    denominator = 1 / (denominator or tiny)
    value, m = denominator, 1
    while True:
        change = 1.0
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            denominator = 1 / (1 + term * denominator or tiny)
            numerator = 1 + term / numerator or tiny
            change = numerator * denominator
            value *= change
        if abs(change - 1) < EPSILON or m > MOST_TERMS:
            return value
        m += 1
