"""Statistics of a run: warm-up, percentiles, and their intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.student_t import student

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
CONFIDENCE = 0.90
"""Confidence of every interval, both sides together."""

BATCHES = 32
"""Stretches of a run whose means vary like independent ones; fewer where it is short."""

FEWEST = 40
"""With fewer values there is no interval."""

GROUP = 5
"""The 5 of MSER-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMeansInterval:
    """A statistic, and the interval that holds it with `CONFIDENCE`; `None`: too few values."""

    value_s: float
    low_s: float | None
    high_s: float | None


def settled_from(values: NDArray[np.float64]) -> tuple[int, bool]:
    """
    Cut the warm-up: MSER-5.

        least s2(d) / (m - d) over d <= m/2, s2(d): variance of the means of 5 from the d-th on
        (docs/model.md, eq. Q7)

    Args:
        values: one latency of all requests, in their order, shape (n,).

    Returns:
        First request that counts, and whether the run settled: the best cut is not the last one
        that was tried.

    Source:
        White, Cobb and Spratt, "A comparison of five steady-state truncation heuristics for
        simulation", WSC 2000.
    """
    groups = len(values) // GROUP
    if groups < BATCHES:
        return 0, True
    means = values[: groups * GROUP].reshape(groups, GROUP).mean(axis=1)
    rest = np.arange(groups, 0, -1)
    centred = means - means.mean()
    total = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1]
    spread = (squares - total**2 / rest) / rest.astype(np.float64) ** 2
    tried = groups // 2
    cut = int(np.argmin(spread[: tried + 1]))
    return cut * GROUP, cut < tried


def quantile(values: NDArray[np.float64], share: float, weights: NDArray[np.float64]) -> float:
    """Smallest value that at least *share* of the weight does not exceed; values ascending."""
    cumulative = np.cumsum(weights)
    at = int(np.searchsorted(cumulative, share * cumulative[-1] * (1 - 1e-12)))
    return float(values[min(at, len(values) - 1)])


def quantile_interval(
    values: NDArray[np.float64], share: float, weights: NDArray[np.float64] | None = None
) -> BatchMeansInterval:
    """
    Percentile and interval of a series whose values depend on one another.

        p +- t s, s2 = variance of the means over stretches of 1{x <= q} / stretches, read off as
        percentiles (docs/model.md, eq. Q8)

    Args:
        values: in the order of time, shape (n,).
        share: which percentile.
        weights: how often each value counts, shape (n,); absent: once.

    Returns:
        The upper end is `None` where it lies beyond the largest value.

    Source:
        Batch means of the indicator, inverted: Asmussen and Glynn, *Stochastic Simulation*,
        chapter IV. Never narrower than for independent values.

    Ignores:
        Correlation over more than a stretch, 1/32 of the run.
    """
    weight = np.ones(len(values)) if weights is None else weights
    order = np.argsort(values, kind="stable")
    ascending, mass = values[order], weight[order]
    found = quantile(ascending, share, mass)
    if len(values) < FEWEST:
        return BatchMeansInterval(value_s=found, low_s=None, high_s=None)
    count = min(BATCHES, len(values) // (FEWEST // 4))
    means = _batch_means((values <= found).astype(np.float64), weight, count)
    independent = share * (1 - share) / len(values)
    error = max(float(means.var(ddof=1)) / count, independent) ** 0.5
    half = student(count - 1, CONFIDENCE) * error
    high = share + half
    return BatchMeansInterval(
        value_s=found,
        low_s=quantile(ascending, max(0.0, share - half), mass),
        high_s=quantile(ascending, high, mass) if high < 1 else None,
    )


def surely_below(
    values: NDArray[np.float64],
    limit_s: float,
    share: float,
    weights: NDArray[np.float64] | None = None,
) -> bool:
    """Say whether more than *share* stay below a limit, with what chance leaves of it (eq. Q8)."""
    if len(values) < FEWEST:
        return False
    weight = np.ones(len(values)) if weights is None else weights
    below = (values <= limit_s).astype(np.float64)
    count = min(BATCHES, len(values) // (FEWEST // 4))
    means = _batch_means(below, weight, count)
    independent = share * (1 - share) / len(values)
    error = max(float(means.var(ddof=1)) / count, independent) ** 0.5
    half = student(count - 1, CONFIDENCE) * error
    return bool(np.average(below, weights=weight) - half >= share)


def mean_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> BatchMeansInterval:
    """Mean and interval by batch means (eq. Q8)."""
    weight = np.ones(len(values)) if weights is None else weights
    found = float(np.average(values, weights=weight))
    if len(values) < FEWEST:
        return BatchMeansInterval(value_s=found, low_s=None, high_s=None)
    count = min(BATCHES, len(values) // (FEWEST // 4))
    means = _batch_means(values, weight, count)
    half = student(count - 1, CONFIDENCE) * float(means.std(ddof=1)) / count**0.5
    return BatchMeansInterval(value_s=found, low_s=max(0.0, found - half), high_s=found + half)


def _batch_means(
    values: NDArray[np.float64], weights: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """Weighted means of *count* stretches of equal length, shape (count,)."""
    starts = np.arange(count) * len(values) // count
    totals = np.add.reduceat(values * weights, starts)
    return np.asarray(totals / np.add.reduceat(weights, starts))
