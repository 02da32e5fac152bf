"""How a latency is spread: its mean and percentiles, from the raw samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


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


def quantile(values: Sequence[float], level: float) -> float:
    """
    Return the smallest value that at least a share *level* of the values does not exceed.

    With this definition "p99 <= limit" and "99 % are within the limit" are the same statement;
    an interpolated percentile is not.
    """
    if not len(values):
        return 0.0
    # Rounding as 0.95 * 20 = 19.000000000000004 must not take the next value.
    place = math.ceil(round(level * len(values), 9)) - 1
    return float(np.partition(np.asarray(values, dtype=np.float64), place)[place])


def spread(values: Sequence[float]) -> LatencySummary | None:
    """Summarise *values*; `None` if there are none."""
    if not len(values):
        return None
    return LatencySummary(
        count=len(values),
        mean_s=float(np.mean(values)),
        max_s=float(np.max(values)),
        **{f"{name}_s": quantile(values, level) for name, level in LEVELS.items()},
    )
