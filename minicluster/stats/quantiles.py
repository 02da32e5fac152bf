"""Quantiles of raw samples, and the summary of a latency: mean, percentiles, maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.shares import LEVELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Mean, percentiles and maximum of *count* values."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float

    def at(self, statistic: str) -> float:
        """Return one statistic, named as in `minicluster.specs.slo.PERCENTILES`."""
        value: float = getattr(self, f"{statistic}_s")
        return value


def quantile(values: ArrayLike, level: float) -> float:
    """
    Return the smallest value that at least a share *level* of the values does not exceed.

    With this definition "p99 <= limit" and "99 % are within the limit" are the same statement;
    an interpolated percentile is not.

    *level* is above 0. Without values it is 0.
    """
    array = np.asarray(values, dtype=np.float64)
    return float(quantiles(array, [level])[0]) if len(array) else 0.0


def quantiles(values: NDArray[np.float64], levels: Sequence[float]) -> NDArray[np.float64]:
    """Return `quantile` at each of *levels*, shape (len(levels),); *values* are not empty."""
    # Rounding as 0.95 * 20 = 19.000000000000004 must not take the next value.
    places = [math.ceil(round(level * len(values), 9)) - 1 for level in levels]
    return np.asarray(np.partition(values, places)[places])


def weighted_quantile(
    ascending: NDArray[np.float64], level: float, weights: NDArray[np.float64]
) -> float:
    """
    Return the smallest value that at least a share *level* of the weight does not exceed.

    *ascending* are at least one value; *weights* say how often each counts, shape (n,).
    """
    cumulative = np.cumsum(weights)
    at = int(np.searchsorted(cumulative, level * cumulative[-1] * (1 - 1e-12)))
    return float(ascending[min(at, len(ascending) - 1)])


def summarise(values: Sequence[float]) -> LatencySummary | None:
    """Summarise *values*; `None` if there are none."""
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    percentiles = quantiles(array, list(LEVELS.values())).tolist()
    return LatencySummary(
        count=len(array),
        mean_s=float(array.mean()),
        max_s=float(array.max()),
        **{f"{name}_s": value for name, value in zip(LEVELS, percentiles, strict=True)},
    )
