"""A distribution of seconds as its quantiles on one fixed grid, dense in the upper tail."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

EDGES = np.concatenate([np.linspace(0, 0.96, 97), 1 - 0.04 * np.geomspace(1, 2.5e-4, 40)[1:], [1]])
"""Levels between the bins: hundredths, then ever finer up to 1 in 100,000."""

WEIGHTS = np.diff(EDGES)
PAIRS = np.multiply.outer(WEIGHTS, WEIGHTS)
"""Of bins of two independent distributions."""

CENTRES = (EDGES[1:] + EDGES[:-1]) / 2
STANDARD_NORMAL = np.array([NormalDist().inv_cdf(float(level)) for level in CENTRES])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuantiles:
    """
    A distribution.

    Attributes:
        values: mean of each bin of `EDGES`, ascending, shape of `WEIGHTS`.
    """

    values: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Expectation."""
        return float(self.values @ WEIGHTS)

    def quantile(self, level: float) -> float:
        """Value that a share *level* stays below; linear between the middles of the bins."""
        return float(np.interp(level, CENTRES, self.values))

    def plus(self, other: LatencyQuantiles) -> LatencyQuantiles:
        """Sum with an independent one."""
        if np.ptp(other.values) == 0:
            return LatencyQuantiles(values=self.values + other.values[0])
        if np.ptp(self.values) == 0:
            return LatencyQuantiles(values=other.values + self.values[0])
        values = np.add.outer(self.values, other.values)
        return spread(values, PAIRS)

    def scaled(self, factor: float) -> LatencyQuantiles:
        """Stretch by *factor*, zero or more."""
        return LatencyQuantiles(values=self.values * factor)


def spread(values: ArrayLike, weights: ArrayLike | None = None) -> LatencyQuantiles:
    """Gather samples, equally likely or weighted, of any shape."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    mass = np.ones_like(flat) if weights is None else np.asarray(weights, np.float64).ravel()
    order = np.argsort(flat, kind="stable")
    flat, mass = flat[order], mass[order]
    levels = np.concatenate([[0.0], np.cumsum(mass)])
    sums = np.concatenate([[0.0], np.cumsum(mass * flat)])
    # The integral of the quantile function is piecewise linear: its differences give exact means.
    integral = np.interp(EDGES * levels[-1], levels, sums)
    return LatencyQuantiles(values=np.maximum.accumulate(np.diff(integral) / WEIGHTS / levels[-1]))


def constant(value: float) -> LatencyQuantiles:
    """Return the distribution that is always *value*."""
    return LatencyQuantiles(values=np.full_like(WEIGHTS, value))


def poisson(mean: float, each: float) -> LatencyQuantiles:
    """Return *each* times a Poisson number, *mean* on average."""
    count = mean / each
    numbers = np.arange(int(count + 10 * np.sqrt(count) + 10))
    logs = numbers * np.log(count) - np.cumsum(np.log(np.maximum(numbers, 1)))
    return spread(numbers * each, np.exp(logs - logs.max()))


def normal(mean: float, deviation: float) -> LatencyQuantiles:
    """Return the normal distribution."""
    return LatencyQuantiles(values=mean + deviation * STANDARD_NORMAL)
