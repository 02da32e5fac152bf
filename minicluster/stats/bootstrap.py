"""Block bootstrap of differences between two runs, whose requests depend on one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.quantiles import quantiles
from minicluster.stats.shares import CONFIDENCE, LEVELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BLOCKS = 20
"""Number of blocks of a run; a block is resampled as a whole, with the dependence inside."""

RESAMPLES = 400  # resamples for a 95 % interval
MANY_RESAMPLES = 2000  # resamples for p-values of several tests that share the 5 %

SEED = 0
MOST_VALUES = 20_000
"""Largest length of a series; a longer one is thinned, as its percentiles are precise enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapDifference:
    """A difference, its 95 % interval in the unit of the values, and its two-sided p-value."""

    value: float
    low: float
    high: float
    p_value: float


def differences(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    statistics: Sequence[str],
    *,
    paired: bool,
    resamples: int = RESAMPLES,
) -> tuple[BootstrapDifference, ...]:
    """
    Return differences of means or percentiles of two series, second minus first.

    Args:
        first, second: in the order of time, shapes (n,) and (m,).
        statistics: names as in `LatencySummary.at`.
        paired: the k-th values belong to the same request, and are resampled together; n = m.

    Source: block bootstrap, basic percentile intervals: Kuensch (1989), Annals of Statistics 17.
    p-value, of the interval that just reaches 0: Davison and Hinkley (1997), *Bootstrap Methods and
    their Application*.

    Ignores: Dependence over more than 1/20 of the series.
    """
    rng = np.random.default_rng(SEED)
    first, second = (_thinned(values) for values in (first, second))
    values = _values(second, statistics) - _values(first, statistics)
    drawn = np.empty((resamples, len(statistics)))
    for k in range(resamples):
        chosen = _drawn(rng, len(first))
        other = chosen if paired else _drawn(rng, len(second))
        drawn[k] = _values(second[other], statistics) - _values(first[chosen], statistics)
    tail = (1 - CONFIDENCE) / 2
    lows, highs = np.quantile(drawn, [tail, 1 - tail], axis=0)
    beyond = np.minimum((drawn <= 0).sum(axis=0), (drawn >= 0).sum(axis=0))
    p_values = np.minimum(1.0, 2 * (1 + beyond) / (1 + resamples))
    return tuple(
        BootstrapDifference(value=value, low=low, high=high, p_value=p_value)
        for value, low, high, p_value in np.stack([values, lows, highs, p_values], axis=1).tolist()
    )


def holm(p_values: Sequence[float]) -> tuple[bool, ...]:
    """
    Return which of several differences are significant when tested together.

    The probability of any false mark is that of a single test (5 %), however they are dependent.

    Source: Holm (1979), Scandinavian Journal of Statistics 6.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    marks = [False] * len(p_values)
    for rank, place in enumerate(order):
        if p_values[place] > (1 - CONFIDENCE) / (len(p_values) - rank):
            break
        marks[place] = True
    return tuple(marks)


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[:: -(-len(values) // MOST_VALUES)]


def _drawn(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    length = max(1, count // BLOCKS)
    starts = rng.integers(0, count - length + 1, size=-(-count // length))
    return np.asarray((starts[:, None] + np.arange(length)).ravel()[:count])


def _values(values: NDArray[np.float64], statistics: Sequence[str]) -> NDArray[np.float64]:
    at = dict(zip(LEVELS, quantiles(values, list(LEVELS.values())), strict=True)) | {
        "mean": values.mean()
    }
    return np.array([at[statistic] for statistic in statistics])
