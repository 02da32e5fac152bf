"""How sure a share is that was measured on requests which queue together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

BATCHES = 100
"""Stretches of a run: many, so that how one resembles the next shows how long queues last."""

LEVELS = (0.5, 0.9, 0.95, 0.98, 0.99)
"""Where a run's own latencies are cut to see how they vary together; misses alone are too few."""

NEIGHBOUR_SIGMAS = 3.0
"""Neighbours that have less in common than this are independent."""

STAMP_DIGITS = 6
"""Below a microsecond there is no latency, only rounding, which has patterns of its own."""

MOST_ALIKE = 0.9
"""Stretches that resemble the next more than this are a trend, of which there is no end to see."""

UNSURE = 1.25
"""
By how much what a design effect has over 1 is taken larger in intervals: runs that met few bursts
see too little of it. Without, 92 to 93 % of the intervals of runs of 5 minutes at 75 and 88 % load
held the truth, with it 94 % (`benchmarks/verdict_coverage.py`'s queues, 700 runs each).
"""

RESERVE = 10.0
"""Design effect that a run must have room for; a shorter one may have met no burst to show its."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The interval that holds what was measured with `CONFIDENCE`; `None`: open above."""

    low: float
    high: float | None


def design_effect(values: NDArray[np.float64]) -> float:
    """
    Estimate how many values of one run say as much as one independent value, at least 1.

        deff = n Var(means of batches of 1{x > l}) / (B p (1 - p)) * (1 + r) / (1 - r)

    r is how much a batch resembles the next, less the bias of its estimate. The largest over the
    levels l counts, which makes up for what is unsure of each.

    Args:
        values: in the order of time, misses infinite, shape (n,).

    Returns:
        1 where neighbours have nothing in common.

    Source:
        Batch means, the means as an autoregression of order one: Fishman (1971), *Management
        Science* 18. Bias of r: Marriott and Pope (1954), *Biometrika* 41. Design effect: Kish.
        `benchmarks/verdict_coverage.py` shows how often intervals hold the truth.

    Ignores:
        What the run was too short to meet even once: see `samples_needed`.
    """
    values = np.round(values, STAMP_DIGITS)
    ordered = np.sort(values)
    cuts = [ordered[int(level * len(values))] for level in LEVELS] if len(values) else []
    varying = [above.astype(np.float64) for cut in cuts if (above := values > cut).any()]
    if all(_lag_one(above) * len(above) ** 0.5 < NEIGHBOUR_SIGMAS for above in varying):
        return 1.0
    return max(1.0, *map(_effect, varying))


def cautious(effect: float) -> float:
    """Return the design effect to reckon with where one of *effect* was estimated."""
    return 1.0 + UNSURE * (effect - 1.0)


def share_interval(share: float, count: int, effect: float) -> Interval:
    """
    Wilson's interval of a share, with the number of values that are worth an independent one.

    Source:
        Wilson (1927), JASA 22; effective number as in Korn and Graubard (1998), *Survey
        Methodology* 24.
    """
    n, z2 = count / effect, Z**2
    middle = share + z2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(
        low=min(share, max(0.0, (middle - half) / (1 + z2 / n))),
        high=max(share, min(1.0, (middle + half) / (1 + z2 / n))),
    )


def percentile_interval(values: NDArray[np.float64], level: float, effect: float) -> Interval:
    """
    Interval of a percentile: the values at both ends of the interval of its share.

    The upper end is `None` where it lies beyond the largest value, or at a request without answer.
    """
    ordered = np.sort(values)
    share = share_interval(level, len(values), effect)
    low = float(ordered[max(0, math.ceil(share.low * len(values)) - 1)])
    top = math.ceil((share.high or 1.0) * len(values))
    high = float(ordered[top - 1]) if top < len(values) else math.inf
    return Interval(
        low=low if math.isfinite(low) else float(ordered[0]),
        high=high if math.isfinite(high) else None,
    )


def count_needed(share: float, target: float, effect: float) -> int | None:
    """
    How many values it takes until the interval of *share* leaves *target* out.

    Returns:
        `None` if the share is the target itself.
    """
    if share == target:
        return None
    count = 1
    while _holds(share_interval(share, count, effect), target):
        count *= 2
        if count > 1 << 40:
            return None
    low = count // 2
    while count - low > 1:
        middle = (low + count) // 2
        if _holds(share_interval(share, middle, effect), target):
            low = middle
        else:
            count = middle
    return count


def samples_needed(level: float) -> int:
    """
    Fewest values that tell whether a share *level* keeps its limit.

    Of so many, none missing, it is proven even at a design effect of `RESERVE`. Of fewer, a run
    may be one without its bursts: the interval is then too short, whichever side it lies on.
    """
    return count_needed(1.0, level, RESERVE) or 0


def _holds(interval: Interval, share: float) -> bool:
    return interval.low < share <= (1.0 if interval.high is None else interval.high)


def _effect(above: NDArray[np.float64]) -> float:
    """Design effect of being above a level, where that varies."""
    batches, share = min(BATCHES, len(above)), float(above.mean())
    starts = np.arange(batches) * len(above) // batches
    means = np.add.reduceat(above, starts) / np.diff(np.append(starts, len(above)))
    alike = _lag_one(means)
    alike = min(MOST_ALIKE, max(0.0, alike + (1 + 3 * alike) / batches))
    spread = float(means.var(ddof=1)) / batches * (1 + alike) / (1 - alike)
    return spread * len(above) / (share * (1 - share))


def _lag_one(series: NDArray[np.float64]) -> float:
    """Correlation of neighbours; 0 where nothing varies."""
    centred = series - series.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total else 0.0
