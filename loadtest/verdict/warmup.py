"""Where a run settles: what comes before it is warm-up, whatever its length was thought to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 5
"""The 5 of MSER-5."""

FEWEST_GROUPS = 32
"""In shorter series the least of a noisy curve means nothing."""

STRETCHES = 8
"""At least so many stretches of the rest show how much it varies by itself."""

BEGINNING = 8
"""The first eighth of a warm-up: where it is a warm-up, it is most unlike the rest there."""


def settled_from(values: NDArray[np.float64]) -> tuple[int, bool]:
    """
    Cut the warm-up by MSER-5, as the simulation does (docs/model.md, eq. Q7).

    Args:
        values: one latency of all requests in the order of their arrival; infinite ones count
            as the largest finite one.

    What does not begin more unlike the rest than any stretch of the rest is not cut: a burst is
    no warm-up, and a run without its bursts looks better than it is.

    Returns:
        The first that counts, and whether the run settled: the best cut is not the last one tried.

    Source:
        White, Cobb and Spratt, "A comparison of five steady-state truncation heuristics for
        simulation", WSC 2000.
    """
    groups = len(values) // GROUP
    finite = values[np.isfinite(values)]
    if groups < FEWEST_GROUPS or not len(finite):
        return 0, True
    bounded = np.minimum(values, finite.max())
    means = bounded[: groups * GROUP].reshape(groups, GROUP).mean(axis=1)
    rest = np.arange(groups, 0, -1, dtype=np.float64)
    centred = means - means.mean()
    totals = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1]
    spread = (squares - totals**2 / rest) / rest**2
    tried = groups // 2
    cut = int(np.argmin(spread[: tried + 1]))
    if not _unlike(means, cut):
        return 0, True
    return cut * GROUP, cut < tried


def _unlike(means: NDArray[np.float64], cut: int) -> bool:
    """Whether the beginning of the first *cut* is more unlike the rest than each of its parts."""
    if not cut:
        return False
    rest = means[cut:]
    length = max(1, min(cut // BEGINNING, len(rest) // STRETCHES))
    stretches = rest[: len(rest) // length * length].reshape(-1, length).mean(axis=1)
    largest = float(np.abs(stretches - rest.mean()).max())
    return abs(float(means[:length].mean() - rest.mean())) > largest
