"""Intervals of fractions and percentiles of one run, whose requests depend on one another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.batch_means import batch_means
from minicluster.stats.shares import CONFIDENCE, ShareInterval, Z
from minicluster.stats.student_t import student

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCHES = 100
"""Number of batches of a run: many, so that their correlation shows how long queues last."""

LEVELS = (0.5, 0.9, 0.95, 0.98, 0.99)
"""Levels at which a run's latencies are cut to see their correlation; misses alone are too few."""

NEIGHBOUR_SIGMAS = 3.0
"""Correlation of neighbours, in standard errors, below which they count as independent."""

ROUNDING_DIGITS = 6
"""Decimals of a latency in seconds: below a microsecond is only rounding, with its own patterns."""

MAX_CORRELATION = 0.9
"""Largest correlation of batches that is believed: a higher one is an endless trend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignEffect:
    """The number of values that are worth one independent value, and its degrees of freedom."""

    estimate: float
    freedom: float

    @property
    def adjusted(self) -> float:
        """
        The estimate times (t / z)^2, with the quantile t of Student's distribution for `freedom`.

        The factor approaches 1 for runs that are long against their queues. Source: degrees of
        freedom in effective numbers: Korn and Graubard (1998), *Survey Methodology* 24.
        """
        return self.estimate * (student(self.freedom, CONFIDENCE) / Z) ** 2


INDEPENDENT = DesignEffect(estimate=1.0, freedom=math.inf)


def design_effect(values: NDArray[np.float64]) -> DesignEffect:
    """
    Estimate the number of values of one run that are worth one independent value.

        deff = n Var(means of batches of 1{x > l}) / (B p (1 - p))
               * (1 + s - 2 q) (1 + q) / ((1 - s) (1 - q))
        degrees of freedom: B / (1 + 4 (1 + q) / (1 - s)), or B / (1 + 2 (1 + s) / (1 - s)) if q = 0

    The means are treated as an autoregression of order two. s is the sum of its coefficients,
    corrected for the bias of order one; q is the second coefficient, the partial correlation of
    a batch with the next but one, and 0 if it is not significant. A wait clears exponentially,
    q = 0; an effect that lasts as long as a request, like a TPOT, has q < 0, and order one would
    estimate twice the effect. The largest over the levels l counts, including low levels for a
    limit that nearly all values meet: a run between two bursts shows them nowhere else.

    *values* are in the order of time, misses infinite, shape (n,). The effect is 1 if neighbours
    are not correlated.

    Source: Batch means as an autoregression: Fishman (1971), *Management Science* 18. Both
    coefficients from two correlations: Yule and Walker; their variance, and by the delta method
    that of deff: Box and Jenkins, *Time Series Analysis*, chapter 7. Chance in q: Quenouille
    (1949), *JRSS B* 11. Bias of s: Marriott and Pope (1954), *Biometrika* 41. Design effect: Kish.
    `benchmarks/verdict_coverage.py` shows how often intervals hold the truth.

    Ignores: Events that a short run does not contain even once: see `samples_needed`. Runs with few
    misses also underestimate the effect, so that intervals that err lie too high.
    """
    values = np.round(values, ROUNDING_DIGITS)
    ordered = np.sort(values)
    cuts = [ordered[int(level * len(values))] for level in LEVELS] if len(values) else []
    varying = [above.astype(np.float64) for cut in cuts if (above := values > cut).any()]
    if all(_correlation(above, 1) * len(above) ** 0.5 < NEIGHBOUR_SIGMAS for above in varying):
        return INDEPENDENT
    return max(INDEPENDENT, *map(_effect, varying), key=lambda effect: effect.adjusted)


def percentile_interval(values: NDArray[np.float64], level: float, effect: float) -> ShareInterval:
    """
    Return the interval of a percentile: the limits that `share_interval` leaves undecided.

    It agrees with the verdict: a limit above the upper end is met, one below the lower end is
    missed. Wilson's interval of a fraction contains *level* where the fraction lies within
    Z * (level * (1 - level) / n)^0.5 of it (the score test), n being the effective number. *values*
    are infinite where there is no answer, shape (n,), n > 0; the interval is unbounded above where
    it ends beyond the largest value, or at such a request.
    """
    ordered, count = np.sort(values), len(values)
    half = Z * math.sqrt(level * (1 - level) * effect / count)
    low = float(ordered[max(0, math.ceil((level - half) * count) - 1)])
    top = math.ceil((level + half) * count)
    return ShareInterval(
        low=low if math.isfinite(low) else float(ordered[0]),
        high=float(ordered[top - 1]) if top <= count else math.inf,
    )


def _effect(above: NDArray[np.float64]) -> DesignEffect:
    """Return the design effect of the indicator *above*, which has to vary."""
    batches, share = min(BATCHES, len(above)), float(above.mean())
    means = batch_means(above, batches)
    next_one = _correlation(means, 1)
    beyond = (_correlation(means, 2) - next_one**2) / (1 - next_one**2)
    if abs(beyond) * batches**0.5 < NEIGHBOUR_SIGMAS:
        beyond = 0.0
    beyond = max(-MAX_CORRELATION, min(MAX_CORRELATION, beyond))
    total = next_one * (1 - beyond) + beyond
    total = min(MAX_CORRELATION, max(0.0, total + (1 + 3 * total) / batches))
    grown = (1 + total - 2 * beyond) * (1 + beyond) / ((1 - total) * (1 - beyond))
    unsure = 2 * (1 + beyond) if beyond else 1 + total
    spread = float(means.var(ddof=1)) / batches * grown
    return DesignEffect(
        estimate=max(1.0, spread * len(above) / (share * (1 - share))),
        freedom=batches / (1 + 2 * unsure / (1 - total)),
    )


def _correlation(series: NDArray[np.float64], lag: int) -> float:
    """Return the autocorrelation at *lag*; 0 without any variation."""
    centred = series - series.mean()
    total = float(centred @ centred)
    return float(centred[lag:] @ centred[:-lag]) / total if total else 0.0
