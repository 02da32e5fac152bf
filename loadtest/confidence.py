"""How sure a share is that was measured on requests which queue together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

BATCHES = 8
"""Stretches of a run that vary like independent ones: few, so that each outlasts the queues."""

FEW_BATCHES, FEW_EFFECTIVE = 4, 200
"""Runs worth fewer independent values than this are cut into fewer, still longer stretches."""

OWN_LEVELS = (0.5, 0.75, 0.9, 0.95)
"""Where a run's own latencies are cut to see how they vary together; misses alone are too few."""

NEIGHBOUR_LEVELS = (0.5, 0.9, 0.95, 0.98, 0.99)
NEIGHBOUR_SIGMAS = 3.0

INDEPENDENT_FROM = 3000
"""Values in which neighbours must show nothing in common before they count as independent."""

STAMP_DIGITS = 6
"""Below a microsecond there is no latency, only rounding, which has patterns of its own."""

UNSEEN_EFFECT = 4.0
"""Design effect of shorter runs in which nothing shows: what rare queues may hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """
    What the values of a run weigh.

    Attributes:
        design_effect: how many of them say as much as one independent value, at least 1.
        quantile: of the normal or Student's distribution, two-sided at `CONFIDENCE`.
    """

    design_effect: float
    quantile: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The interval that holds what was measured with `CONFIDENCE`; `None`: open above."""

    low: float
    high: float | None


def weigh(values: NDArray[np.float64], limit: float | None = None) -> Weight:
    """
    Estimate how much the values of one run depend on one another.

        deff = n Var(means of batches of 1{x > l}) / (B p (1 - p)), largest over the levels l

    Args:
        values: in the order of time, misses infinite, shape (n,).
        limit: one more level to look at.

    Returns:
        Independent, if neighbours have nothing in common in a run that is long enough to say so;
        the design effect of `BATCHES` batches else, at least `UNSEEN_EFFECT` where nothing shows.

    Source:
        Batch means: Asmussen and Glynn, *Stochastic Simulation*, chapter IV. Design effect: Kish.
        `benchmarks/verdict_coverage.py` shows how often intervals hold the truth.

    Ignores:
        What the run was too short to meet even once.
    """
    if len(values) < BATCHES:
        return Weight(design_effect=float(max(1, len(values))), quantile=student(BATCHES - 1))
    values = np.round(values, STAMP_DIGITS)
    ordered = np.sort(values)
    levels = [float(ordered[int(level * len(values))]) for level in OWN_LEVELS]
    if limit is not None:
        levels.append(limit)
    alike = _neighbours_alike(values, ordered)
    if not alike and len(values) >= INDEPENDENT_FROM:
        return Weight(design_effect=1.0, quantile=Z)
    effect = _effect(values, levels, BATCHES)
    if not alike:
        effect = max(effect, UNSEEN_EFFECT)
    elif len(values) < FEW_EFFECTIVE * effect:
        effect = _effect(values, levels, FEW_BATCHES)
        return Weight(design_effect=effect, quantile=student(FEW_BATCHES - 1))
    return Weight(design_effect=effect, quantile=student(BATCHES - 1))


def share_interval(share: float, count: int, weight: Weight) -> Interval:
    """
    Wilson's interval of a share, with the number of values that are worth an independent one.

    Source:
        Wilson (1927), JASA 22; effective number as in Korn and Graubard (1998), *Survey
        Methodology* 24.
    """
    n, z2 = count / weight.design_effect, weight.quantile**2
    middle = share + z2 / (2 * n)
    half = weight.quantile * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(
        low=min(share, max(0.0, (middle - half) / (1 + z2 / n))),
        high=max(share, min(1.0, (middle + half) / (1 + z2 / n))),
    )


def percentile_interval(values: NDArray[np.float64], level: float) -> Interval:
    """
    Interval of a percentile: the values at both ends of the interval of its share.

    The upper end is `None` where it lies beyond the largest value, or at a request without answer.
    """
    ordered = np.sort(values)
    share = share_interval(level, len(values), weigh(values))
    low = float(ordered[max(0, math.ceil(share.low * len(values)) - 1)])
    top = math.ceil((share.high or 1.0) * len(values))
    high = float(ordered[top - 1]) if top < len(values) else math.inf
    return Interval(
        low=low if math.isfinite(low) else float(ordered[0]),
        high=high if math.isfinite(high) else None,
    )


def mean_interval(values: NDArray[np.float64]) -> Interval:
    """Interval of a mean by batch means; as wide as the values if they are too few."""
    if len(values) < 2 * BATCHES:
        return Interval(low=float(values.min()), high=float(values.max()))
    means = batch_means(values)
    half = student(BATCHES - 1) * float(means.std(ddof=1)) / BATCHES**0.5
    middle = float(values.mean())
    return Interval(low=middle - half, high=middle + half)


def batch_means(values: NDArray[np.float64], batches: int = BATCHES) -> NDArray[np.float64]:
    """Means of stretches of equal length, shape (batches,)."""
    starts = np.arange(batches) * len(values) // batches
    return np.asarray(np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values))))


def count_needed(share: float, target: float, weight: Weight) -> int | None:
    """
    How many values it takes until the interval of *share* leaves *target* out.

    Returns:
        `None` if the share is the target itself.
    """
    if share == target:
        return None
    count = BATCHES
    while _holds(share_interval(share, count, weight), target):
        count *= 2
        if count > 1 << 40:
            return None
    low = count // 2
    while count - low > 1:
        middle = (low + count) // 2
        if _holds(share_interval(share, middle, weight), target):
            low = middle
        else:
            count = middle
    return count


def samples_needed(level: float) -> int:
    """Fewest values of which, if none misses, a share *level* is proven to keep its limit."""
    weight = Weight(design_effect=UNSEEN_EFFECT, quantile=student(BATCHES - 1))
    return count_needed(1.0, level, weight) or 0


def student(freedom: int) -> float:
    """
    Two-sided quantile of Student's t at `CONFIDENCE`; error below 0.5 % from 4 degrees on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z = Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _holds(interval: Interval, share: float) -> bool:
    return interval.low < share <= (1.0 if interval.high is None else interval.high)


def _effect(values: NDArray[np.float64], levels: Sequence[float], batches: int) -> float:
    """Largest design effect of being above one of *levels*; 1 where nothing varies."""
    found = [1.0]
    for level in levels:
        above = (values > level).astype(np.float64)
        share = float(above.mean())
        if 0 < share < 1:
            spread = float(batch_means(above, batches).var(ddof=1)) / batches
            found.append(spread * len(above) / (share * (1 - share)))
    return max(found)


def _neighbours_alike(values: NDArray[np.float64], ordered: NDArray[np.float64]) -> bool:
    """Whether a value above a level is followed by another more often than chance has it."""
    count = len(values)
    found: Sequence[float] = [
        _lag_one((values > ordered[int(level * count)]).astype(np.float64))
        for level in NEIGHBOUR_LEVELS
    ]
    return bool(max(found) * count**0.5 >= NEIGHBOUR_SIGMAS)


def _lag_one(indicator: NDArray[np.float64]) -> float:
    """Correlation of neighbours; 0 where nothing varies."""
    centred = indicator - indicator.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total else 0.0
