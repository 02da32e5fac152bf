"""How sure a share is that was measured on requests which queue together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.batch_means import batch_means
from minicluster.stats.student_t import student

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

BATCHES = 100
"""Stretches of a run: many, so that how one resembles the next shows how long queues last."""

LEVELS = (0.5, 0.9, 0.95, 0.98, 0.99)
"""Where a run's own latencies are cut to see how they vary together; misses alone are too few."""

NEIGHBOUR_SIGMAS = 3.0
"""Neighbours that have less in common than this, in standard errors, are independent."""

STAMP_DIGITS = 6
"""Below a microsecond there is no latency, only rounding, which has patterns of its own."""

MOST_ALIKE = 0.9
"""Stretches that resemble the next more than this are a trend, of which there is no end to see."""

RESERVE = 10.0
"""Design effect that a run must have room for; a shorter one may have met no burst to show its."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareInterval:
    """The interval that holds what was measured with `CONFIDENCE`; `None`: open above."""

    low: float
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignEffect:
    """
    How many values of one run say as much as one independent value.

    Attributes:
        seen: as estimated, at least 1.
        freedom: degrees of freedom of the estimate; infinite where it is known.
    """

    seen: float
    freedom: float

    @property
    def reckoned(self) -> float:
        """
        The one to reckon with: (t / z)^2 times the one seen, t Student's with `freedom`.

        Source:
            Degrees of freedom in effective numbers: Korn and Graubard (1998), *Survey
            Methodology* 24. It fades where a run is long against the queues that it met.
        """
        return self.seen * (student(self.freedom, CONFIDENCE) / Z) ** 2


INDEPENDENT = DesignEffect(seen=1.0, freedom=math.inf)


def design_effect(values: NDArray[np.float64]) -> DesignEffect:
    """
    Estimate how many values of one run say as much as one independent value.

        deff = n Var(means of batches of 1{x > l}) / (B p (1 - p))
               * (1 + s - 2 q) (1 + q) / ((1 - s) (1 - q))
        degrees of freedom: B / (1 + 4 (1 + q) / (1 - s)), or B / (1 + 2 (1 + s) / (1 - s)) if q = 0

    The means count as an autoregression of order two. s is the sum of its coefficients, less the
    bias that order one would have, q the second: what a batch has in common with the next but one
    beyond the one between, 0 if chance could be all of it. A wait clears exponentially, q = 0;
    what lasts as long as a request does and then ends, like a TPOT, has q < 0, and order one
    would see twice the effect. The largest over the levels l counts, low ones as well for a limit
    that nearly all keep: a run between two bursts shows them nowhere else.

    Args:
        values: in the order of time, misses infinite, shape (n,).

    Returns:
        1 where neighbours have nothing in common.

    Source:
        Batch means as an autoregression: Fishman (1971), *Management Science* 18. Both
        coefficients from two correlations: Yule and Walker; their variance, and by the delta
        method that of deff: Box and Jenkins, *Time Series Analysis*, chapter 7. Chance in q:
        Quenouille (1949), *JRSS B* 11. Bias of s: Marriott and Pope (1954), *Biometrika* 41.
        Design effect: Kish. `benchmarks/verdict_coverage.py` shows how often intervals hold
        the truth.

    Ignores:
        What the run was too short to meet even once: see `samples_needed`. That runs with few
        misses are those that see too little of it: intervals that err lie too high.
    """
    values = np.round(values, STAMP_DIGITS)
    ordered = np.sort(values)
    cuts = [ordered[int(level * len(values))] for level in LEVELS] if len(values) else []
    varying = [above.astype(np.float64) for cut in cuts if (above := values > cut).any()]
    if all(_alike(above, 1) * len(above) ** 0.5 < NEIGHBOUR_SIGMAS for above in varying):
        return INDEPENDENT
    return max(INDEPENDENT, *map(_effect, varying), key=lambda effect: effect.reckoned)


def share_interval(share: float, count: int, effect: float) -> ShareInterval:
    """
    Wilson's interval of a share, with the number of values that are worth an independent one.

    Source:
        Wilson (1927), JASA 22; effective number as in Korn and Graubard (1998), *Survey
        Methodology* 24.
    """
    n, z2 = count / effect, Z**2
    middle = share + z2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return ShareInterval(
        low=min(share, max(0.0, (middle - half) / (1 + z2 / n))),
        high=max(share, min(1.0, (middle + half) / (1 + z2 / n))),
    )


def percentile_interval(values: NDArray[np.float64], level: float, effect: float) -> ShareInterval:
    """
    Interval of a percentile: the limits of which `share_interval` leaves open if *level* keep them.

    So it says what a verdict says: kept is a limit from the upper end on, missed one below the
    lower end. Wilson's interval of a share holds *level* where the share lies within
    Z * (level * (1 - level) / n)^0.5 of it (the score test), n being the effective number.

    Args:
        values: infinite where there is no answer, shape (n,), n > 0.
        level: of the percentile.
        effect: design effect to reckon with.

    Returns:
        Without upper end where it lies beyond the largest value, or at a request without answer.
    """
    ordered, count = np.sort(values), len(values)
    half = Z * math.sqrt(level * (1 - level) * effect / count)
    low = float(ordered[max(0, math.ceil((level - half) * count) - 1)])
    top = math.ceil((level + half) * count)
    high = float(ordered[top - 1]) if top <= count else math.inf
    return ShareInterval(
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


def _holds(interval: ShareInterval, share: float) -> bool:
    return interval.low < share <= (1.0 if interval.high is None else interval.high)


def _effect(above: NDArray[np.float64]) -> DesignEffect:
    """Design effect of being above a level, where that varies."""
    batches, share = min(BATCHES, len(above)), float(above.mean())
    means = batch_means(above, batches)
    next_one = _alike(means, 1)
    beyond = (_alike(means, 2) - next_one**2) / (1 - next_one**2)
    if abs(beyond) * batches**0.5 < NEIGHBOUR_SIGMAS:
        beyond = 0.0
    beyond = max(-MOST_ALIKE, min(MOST_ALIKE, beyond))
    total = next_one * (1 - beyond) + beyond
    total = min(MOST_ALIKE, max(0.0, total + (1 + 3 * total) / batches))
    grown = (1 + total - 2 * beyond) * (1 + beyond) / ((1 - total) * (1 - beyond))
    unsure = 2 * (1 + beyond) if beyond else 1 + total
    spread = float(means.var(ddof=1)) / batches * grown
    return DesignEffect(
        seen=max(1.0, spread * len(above) / (share * (1 - share))),
        freedom=batches / (1 + 2 * unsure / (1 - total)),
    )


def _alike(series: NDArray[np.float64], lag: int) -> float:
    """Correlation of values that lie *lag* apart; 0 where nothing varies."""
    centred = series - series.mean()
    total = float(centred @ centred)
    return float(centred[lag:] @ centred[:-lag]) / total if total else 0.0
