"""Whether a difference is more than chance, where requests depend on one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadtest.confidence import CONFIDENCE
from loadtest.spread import LEVELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS = 20
"""Stretches that are drawn again as a whole, so that what depends on another stays with it."""

RESAMPLES = 400
SEED = 0
MOST_VALUES = 20_000
"""Longer series are thinned: their percentiles are known well enough from so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference and its 95 % interval; significant if 0 lies outside."""

    value_s: float
    low_s: float
    high_s: float

    @property
    def significant(self) -> bool:
        """Whether it is more than chance."""
        return not self.low_s <= 0 <= self.high_s


def difference(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    statistic: str,
    *,
    paired: bool,
) -> Difference:
    """
    Compare a mean or percentile of two series: second less first.

    Args:
        first: in the order of time, shape (n,).
        second: shape (m,); n if *paired*.
        statistic: as `Spread.at`.
        paired: the k-th values of both are of the same request, and are drawn together.

    Source:
        Block bootstrap, basic percentile intervals: Kuensch (1989), Annals of Statistics 17.

    Ignores:
        What depends on one another over more than 1/20 of the series.
    """
    rng = np.random.default_rng(SEED)
    first, second = (_thinned(each) for each in (first, second))
    value_s = _statistic(second, statistic) - _statistic(first, statistic)
    drawn = np.empty(RESAMPLES)
    for k in range(RESAMPLES):
        chosen = _drawn(rng, len(first))
        other = chosen if paired else _drawn(rng, len(second))
        drawn[k] = _statistic(second[other], statistic) - _statistic(first[chosen], statistic)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Difference(value_s=value_s, low_s=float(low), high_s=float(high))


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[:: -(-len(values) // MOST_VALUES)]


def _drawn(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Places of the values of blocks drawn with replacement."""
    length = max(1, count // BLOCKS)
    starts = rng.integers(0, count - length + 1, size=-(-count // length))
    return np.asarray((starts[:, None] + np.arange(length)).ravel()[:count])


def _statistic(values: NDArray[np.float64], statistic: str) -> float:
    if statistic == "mean":
        return float(values.mean())
    return float(np.quantile(values, LEVELS[statistic], method="inverted_cdf"))
