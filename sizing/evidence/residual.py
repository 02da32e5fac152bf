"""Residuals: logarithms of measured over predicted latencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.checks import STRICT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sizing.evidence.prediction import RowPrediction
    from sizing.evidence.row import MeasuredRow

QUANTITIES = ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResidual:
    """
    One latency of one row.

    Attributes:
        predicted_s: what was predicted.
        log_ratio: ln(measured / predicted).
        configuration: all loads of one configuration are fitted on, or held out, together.
        path: labels from coarse to fine; intervals back off along it.
        stand_in: predicted with the constants of another version of the engine.
    """

    quantity: str
    predicted_s: float
    log_ratio: float
    source: str
    configuration: str
    path: tuple[str, ...]
    stand_in: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """
    Errors of one quantity over a group of rows, relative to what was measured.

    Attributes:
        bias: median of predicted / measured - 1.
    """

    __pydantic_config__ = STRICT

    rows: int
    mean: float
    median: float
    bias: float


def residuals_of(row: MeasuredRow, found: RowPrediction) -> Iterator[RowResidual]:
    """Yield a residual per latency that is both predicted and measured."""
    for quantity in QUANTITIES:
        measured = getattr(row, f"{quantity}_s")
        predicted = getattr(found, f"{quantity}_s")
        if measured and predicted:
            yield RowResidual(
                quantity=quantity,
                predicted_s=predicted,
                log_ratio=math.log(measured / predicted),
                source=row.source,
                configuration=row.configuration,
                path=found.path,
                stand_in=found.stand_in,
            )


def summarise(log_ratios: Iterable[float]) -> ErrorSummary | None:
    """Return mean and median error and bias of ln(measured / predicted); `None` without rows."""
    logs = np.array(list(log_ratios))
    if not logs.size:
        return None
    errors = np.exp(-logs) - 1
    return ErrorSummary(
        rows=logs.size,
        mean=float(np.abs(errors).mean()),
        median=float(np.median(np.abs(errors))),
        bias=float(np.median(errors)),
    )
