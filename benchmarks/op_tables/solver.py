"""Least squares of logarithms: constants that make predicted times as near as can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

ROBUST = 0.3
"""Error of the logarithm above which a row's weight no longer grows (robust fit)."""
STEPS = 80


def solved(
    predict: Callable[[dict[str, float]], NDArray[np.float64]],
    bounds: Mapping[str, tuple[float, float, float]],
    seconds: NDArray[np.float64],
) -> dict[str, float]:
    """
    Fit positive constants by Levenberg and Marquardt's steps on logarithms.

    Args:
        predict: constants -> seconds of every row.
        bounds: constant -> lowest, first guess, highest.
        seconds: measured.

    Returns:
        The constants.
    """
    names = list(bounds)
    low, guess, high = (np.log([bounds[name][i] for name in names]) for i in range(3))
    least, most = ([bounds[name][i] for name in names] for i in (0, 2))
    target = np.log(seconds)

    def errors(at: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = np.clip(np.exp(at), least, most)
        found = predict(dict(zip(names, inside.tolist(), strict=True)))
        return np.log(found) - target

    at, damping = guess, 1e-2
    here = errors(at)
    for _ in range(STEPS):
        weight = np.minimum(1.0, ROBUST / np.maximum(np.abs(here), 1e-9))
        inwards = np.where(at > (low + high) / 2, -1e-4, 1e-4)
        slopes = np.stack(
            [(errors(at + step) - here) / step.sum() for step in np.diag(inwards)], axis=1
        )
        square = slopes.T @ (slopes * weight[:, None])
        down = slopes.T @ (weight * here)
        for _ in range(8):
            scaled = square + damping * np.diag(np.diag(square) + 1e-9)
            tried = np.clip(at - np.linalg.solve(scaled, down), low, high)
            there = errors(tried)
            if _cost(there) < _cost(here):
                break
            damping *= 4
        else:
            break
        gain = _cost(here) - _cost(there)
        at, here, damping = tried, there, max(damping / 5, 1e-7)
        if gain < 1e-7 * _cost(here):
            break
    inside = np.clip(np.exp(at), least, most)
    return dict(zip(names, inside.tolist(), strict=True))


def _cost(errors: NDArray[np.float64]) -> float:
    """Huber's: squares for small errors, straight lines for large ones."""
    size = np.abs(errors)
    return float(np.sum(np.where(size < ROBUST, size**2 / 2, ROBUST * (size - ROBUST / 2))))
