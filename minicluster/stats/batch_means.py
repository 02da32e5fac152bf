"""Intervals of means and percentiles of one run, whose values depend on one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.quantiles import weighted_quantile
from minicluster.stats.student_t import student

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIDENCE = 0.90  # confidence of every interval, both sides together
BATCHES = 32  # stretches of a run whose means vary like independent ones; a short run has fewer
FEWEST = 40  # values below which there is no interval


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMeansInterval:
    """A statistic, and the interval that holds it with `CONFIDENCE`; `None`: too few values."""

    value_s: float
    low_s: float | None
    high_s: float | None


def quantile_interval(
    values: NDArray[np.float64], share: float, weights: NDArray[np.float64] | None = None
) -> BatchMeansInterval:
    """
    Percentile and interval of a series whose values depend on one another.

        p +- t s, s2 = variance of the means over stretches of 1{x <= q} / stretches, read off as
        percentiles (docs/model.md, eq. Q8)

    Args:
        values: in the order of time, shape (n,).
        weights: how often each value counts, shape (n,); absent: once.

    Returns: The upper end is `None` where it lies beyond the largest value.

    Source: batch means of the indicator, inverted: Asmussen and Glynn, *Stochastic Simulation*,
    chapter IV. Never narrower than for independent values.

    Ignores correlation over more than a stretch, 1/32 of the run.
    """
    weight = np.ones(len(values)) if weights is None else weights
    order = np.argsort(values, kind="stable")
    ascending, mass = values[order], weight[order]
    percentile = weighted_quantile(ascending, share, mass)
    if len(values) < FEWEST:
        return BatchMeansInterval(value_s=percentile, low_s=None, high_s=None)
    half = _half_width_of_share((values <= percentile).astype(np.float64), share, weight)
    high = share + half
    return BatchMeansInterval(
        value_s=percentile,
        low_s=weighted_quantile(ascending, max(0.0, share - half), mass),
        high_s=weighted_quantile(ascending, high, mass) if high < 1 else None,
    )


def surely_below(
    values: NDArray[np.float64],
    limit_s: float,
    share: float,
    weights: NDArray[np.float64] | None = None,
    *,
    claims: int = 1,
) -> bool:
    """
    Say whether more than *share* stay below a limit, with what chance leaves of it (eq. Q8).

    Of several *claims* each is made with a part of the chance to err (Bonferroni), so that all of
    them hold together with the confidence of one.
    """
    if len(values) < FEWEST:
        return False
    weight = np.ones(len(values)) if weights is None else weights
    below = (values <= limit_s).astype(np.float64)
    half = _half_width_of_share(below, share, weight, 1 - (1 - CONFIDENCE) / claims)
    return bool(np.average(below, weights=weight) - half >= share)


def mean_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> BatchMeansInterval:
    """Mean and interval by batch means (eq. Q8)."""
    weight = np.ones(len(values)) if weights is None else weights
    mean = float(np.average(values, weights=weight))
    if len(values) < FEWEST:
        return BatchMeansInterval(value_s=mean, low_s=None, high_s=None)
    count = _batches(values)
    means = batch_means(values, count, weight)
    half = student(count - 1, CONFIDENCE) * float(means.std(ddof=1)) / count**0.5
    return BatchMeansInterval(value_s=mean, low_s=max(0.0, mean - half), high_s=mean + half)


def batch_means(
    values: NDArray[np.float64], count: int, weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Weighted means of *count* <= n stretches of a series, as nearly equally long as can be."""
    weight = np.ones(len(values)) if weights is None else weights
    starts = np.arange(count) * len(values) // count
    totals = np.add.reduceat(values * weight, starts)
    return np.asarray(totals / np.add.reduceat(weight, starts))


def _half_width_of_share(
    indicator: NDArray[np.float64],
    share: float,
    weights: NDArray[np.float64],
    confidence: float = CONFIDENCE,
) -> float:
    """Half the interval around the mean of an indicator, never narrower than if independent."""
    count = _batches(indicator)
    means = batch_means(indicator, count, weights)
    independent = share * (1 - share) / len(indicator)
    error = max(float(means.var(ddof=1)) / count, independent) ** 0.5
    return float(student(count - 1, confidence) * error)


def _batches(values: NDArray[np.float64]) -> int:
    return min(BATCHES, len(values) // (FEWEST // 4))
