"""Least squares with coefficients that cannot be negative, and lines with one bend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.step import StepCoefficients

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BentLine:
    """
    t = base + slope max(bend, load) + sum of rate x column.

    Attributes:
        rates: of the other columns, in their order.
        error_fraction: mean absolute relative error over the rows.
    """

    base: float
    slope: float
    bend: float
    rates: tuple[float, ...]
    error_fraction: float

    def step(self, most: tuple[int, int, int], **rates: float) -> StepCoefficients:
        """
        Return the line as the coefficients of a step (eq. S1).

        Args:
            most: tokens, batch and context up to which it was fitted.
            rates: coefficients of the step other than those that bend; one left out is 0.
        """
        none = dict.fromkeys(
            ("per_prefill_token_s", "per_sequence_s", "per_pair_s", "per_context_token_s"), 0.0
        )
        return StepCoefficients(
            base_s=self.base,
            stream_s=self.slope * self.bend,
            max_tokens=most[0],
            max_batch=most[1],
            max_context_tokens=most[2],
            error_fraction=self.error_fraction,
            **{**none, **rates},
        )


def fit_bent_line(
    load: NDArray[np.float64],
    columns: Sequence[NDArray[np.float64]],
    seconds: NDArray[np.float64],
    *,
    bend_earns: float = 1.0,
    weights: NDArray[np.float64] | None = None,
) -> BentLine:
    """
    Fit by least relative squares, no coefficient negative; the bend is tried at every load.

    Args:
        load: what the line bends over, shape (rows,).
        columns: what else the time is linear in, each of shape (rows,).
        seconds: positive, shape (rows,).
        bend_earns: a bend is kept if it leaves less than this share of the squared residual;
            below 1 for measured rows, whose noise some bend always fits a little better.
        weights: of the rows, shape (rows,); without them all count alike.
    """
    least = np.inf
    roots = np.ones_like(seconds) if weights is None else np.sqrt(weights / weights.mean())
    best = BentLine(base=0.0, slope=0.0, bend=0.0, rates=(), error_fraction=0.0)
    for bend in (0.0, *np.unique(load)[:-1]):
        design = np.column_stack([np.ones_like(load), np.maximum(bend, load), *columns])
        weighted = design / seconds[:, None]
        found = nonnegative_least_squares(weighted * roots[:, None], roots)
        residual = weighted @ found - 1
        left = float((residual * roots) @ (residual * roots))
        if left < bend_earns * least:
            least = left
            base, slope, *rates = (float(value) for value in found)
            best = BentLine(
                base=base,
                slope=slope,
                bend=float(bend),
                rates=tuple(rates),
                error_fraction=float(np.abs(residual).mean()),
            )
    return best
