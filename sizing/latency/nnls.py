"""Least squares with coefficients that cannot be negative, for fits of a few terms."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def nonnegative_least_squares(
    design: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """
    Return x >= 0 that minimises |design x - target|.

    Solves every subset of columns and keeps the best that has no negative coefficient: exact,
    and cheap for the handful of terms of a step model (2^k solves).

    Args:
        design: shape (rows, k), k at most 10.
        target: shape (rows,).

    Returns:
        Coefficients, shape (k,).

    Source:
        Lawson and Hanson, Solving Least Squares Problems, chapter 23: the optimum is the
        unconstrained solution on the columns where it is positive.

    """
    columns = design.shape[1]
    best = np.zeros(columns)
    least = float(target @ target)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = design[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(np.sum((part @ solution - target) ** 2))
            if error < least:
                least = error
                best = np.zeros(columns)
                best[list(chosen)] = solution
    return best
