"""Whether a difference is more than chance, where requests depend on one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.confidence import CONFIDENCE
from minicluster.stats.quantiles import LEVELS, quantiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BLOCKS = 20
"""Stretches that are drawn again as a whole, so that what depends on another stays with it."""

RESAMPLES = 400
"""Enough for a 95 % interval."""

MANY_RESAMPLES = 2000
"""Enough for p-values that are told apart where several tests share the 5 %."""

SEED = 0
MOST_VALUES = 20_000
"""Longer series are thinned: their percentiles are known well enough from so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapDifference:
    """
    A difference and its 95 % interval, in the unit of what was compared; significant if 0 is out.

    Attributes:
        p_value: two-sided; an interval of this level just reaches 0.
    """

    value: float
    low: float
    high: float
    p_value: float

    @property
    def significant(self) -> bool:
        """Whether it is more than chance, as the only one that was looked at."""
        return not self.low <= 0 <= self.high


def differences(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    statistics: Sequence[str],
    *,
    paired: bool,
    resamples: int = RESAMPLES,
) -> tuple[BootstrapDifference, ...]:
    """
    Compare means or percentiles of two series: second less first.

    Args:
        first: in the order of time, shape (n,).
        second: shape (m,); n if *paired*.
        statistics: as `Spread.at`.
        paired: the k-th values of both are of the same request, and are drawn together.
        resamples: how often both are drawn again.

    Returns:
        One for each of *statistics*.

    Source:
        Block bootstrap, basic percentile intervals: Kuensch (1989), Annals of Statistics 17.
        p-value: these intervals turned round, with 1 added to each count: Davison and Hinkley
        (1997), *Bootstrap Methods and their Application*.

    Ignores:
        What depends on one another over more than 1/20 of the series.
    """
    rng = np.random.default_rng(SEED)
    first, second = (_thinned(each) for each in (first, second))
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
    Say which of several differences are more than chance, looked at together.

    That chance marks any of them is as rare as for a single one (5 %), however they depend on
    one another.

    Source:
        Holm (1979), Scandinavian Journal of Statistics 6.
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
    """Places of the values of blocks drawn with replacement."""
    length = max(1, count // BLOCKS)
    starts = rng.integers(0, count - length + 1, size=-(-count // length))
    return np.asarray((starts[:, None] + np.arange(length)).ravel()[:count])


def _values(values: NDArray[np.float64], statistics: Sequence[str]) -> NDArray[np.float64]:
    """Return *statistics* of *values*, in their order."""
    at = dict(zip(LEVELS, quantiles(values, list(LEVELS.values())), strict=True)) | {
        "mean": values.mean()
    }
    return np.array([at[statistic] for statistic in statistics])
