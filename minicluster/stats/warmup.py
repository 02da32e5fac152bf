"""Where a run settles: what comes before it is warm-up, whatever its length was thought to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 5
"""Values that are averaged before the rule looks at them: the 5 of MSER-5."""

FEWEST_GROUPS = 32
"""Groups below which nothing is cut: in shorter series the least of a noisy curve means nothing."""

STRETCHES = 8
"""Least number of stretches of the rest: they show how much it varies by itself."""

BEGINNING = 8
"""Part of a warm-up, the first eighth, that is compared: a warm-up is least like the rest there."""


def mser5(values: NDArray[np.float64]) -> tuple[int, bool]:
    """
    Find the end of the warm-up by MSER-5.

        least s2(d) / (m - d) over d <= m/2, s2(d): variance of the means of 5 from the d-th on
        (docs/model.md, eq. Q7)

    *values* are one latency of all requests, in their order, finite, shape (n,).

    Returns:
        First request that counts, and whether the run settled: the best cut is not the last one
        that was tried.

    Source: White, Cobb and Spratt, "A comparison of five steady-state truncation heuristics for
    simulation", WSC 2000.
    """
    groups = len(values) // GROUP
    if groups < FEWEST_GROUPS:
        return 0, True
    means = _group_means(values)
    rest = np.arange(groups, 0, -1, dtype=np.float64)
    centred = means - means.mean()
    totals = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1]
    errors = (squares - totals**2 / rest) / rest**2
    tried = groups // 2
    cut = int(np.argmin(errors[: tried + 1]))
    return cut * GROUP, cut < tried


def mser5_of_measured(values: NDArray[np.float64]) -> tuple[int, bool]:
    """
    Find the end of the warm-up of a measured run, in which a burst may come first.

    The cut of `mser5` counts only if the beginning is more unlike the rest than any stretch of the
    rest: a burst is no warm-up, and a run without its bursts looks better than it is. A simulation
    needs no such check: it starts empty, so that it always has a warm-up.

    Infinite values count as the largest finite one.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0, True
    bounded = np.minimum(values, finite.max())
    first, settled = mser5(bounded)
    if not first or not _begins_unlike_the_rest(_group_means(bounded), first // GROUP):
        return 0, True
    return first, settled


def _group_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    groups = len(values) // GROUP
    return np.asarray(values[: groups * GROUP].reshape(groups, GROUP).mean(axis=1))


def _begins_unlike_the_rest(means: NDArray[np.float64], cut: int) -> bool:
    rest = means[cut:]
    length = max(1, min(cut // BEGINNING, len(rest) // STRETCHES))
    stretches = rest[: len(rest) // length * length].reshape(-1, length).mean(axis=1)
    largest = float(np.abs(stretches - rest.mean()).max())
    return abs(float(means[:length].mean() - rest.mean())) > largest
