"""Errors of predicted rows, by groups of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.checks import Spec
from sizing.catalog import find_gpu, find_model, gpu_generation
from sizing.evidence.interval_fit import QUANTITIES, RowResidual
from sizing.evidence.measured_row import MeasuredRow, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sizing.evidence.prediction import RowVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary(Spec):
    """Errors of predicted / measured - 1; `bias` is their median, the others of their sizes."""

    rows: int
    mean: float
    median: float
    bias: float


def class_of(row: MeasuredRow) -> str:
    """Name a row's class, in which errors are reported together."""
    kind = "split" if len(row.groups) > 1 else row.load
    if kind in CLASSES:
        return CLASSES[kind]
    try:
        model, gpu = find_model(row.model), find_gpu(row.gpu)
    except InputError:
        return "unknown"
    return f"{'MoE' if model.moe else 'dense'}, serving, {gpu_generation(gpu.name)}"


CLASSES = {"static": "static", "open": "open loop", "split": "split"}
"""Classes of rows that the load alone decides; other rows are served in a closed loop."""


SLICES: dict[str, Callable[[MeasuredRow], str]] = {
    "source": lambda row: row.source or "unknown",
    "engine": lambda row: f"{row.engine} {row.engine_version}".strip(),
    "model": lambda row: row.model,
    "GPU": lambda row: row.gpu,
    "load": kind_of,
    "class": class_of,
}
"""Functions of a row by which errors are grouped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceErrors(Spec):
    """
    Errors of one group of rows.

    Attributes:
        rows: lines of the group that are rows.
        answered: of them predicted, or called infeasible and measured as overloaded.
    """

    by: str
    name: str
    rows: int
    answered: int
    infeasible: int
    ttft: ErrorSummary | None
    tpot: ErrorSummary | None
    ttft_p99: ErrorSummary | None = None
    tpot_p99: ErrorSummary | None = None


def scored(verdicts: Iterable[RowVerdict]) -> list[RowVerdict]:
    """Return the rows that count in errors and intervals."""
    return [verdict for verdict in verdicts if not verdict.excluded]


def residuals(verdicts: Iterable[RowVerdict]) -> list[RowResidual]:
    """Return a residual for each latency of a row that is both predicted and measured."""
    found = []
    for verdict in verdicts:
        row, answer = verdict.row, verdict.found
        for quantity in QUANTITIES:
            measured_s, predicted_s = (getattr(on, f"{quantity}_s", None) for on in (row, answer))
            if row is not None and answer.status == "predicted" and measured_s and predicted_s:
                found.append(
                    RowResidual(
                        quantity=quantity,
                        predicted_s=predicted_s,
                        log_ratio=math.log(measured_s / predicted_s),
                        source=row.source,
                        labels=answer.labels,
                        row_class=class_of(row),
                    )
                )
    return found


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


def slices(verdicts: Sequence[RowVerdict]) -> tuple[SliceErrors, ...]:
    """Return the errors of all rows together, then by each of `SLICES`."""
    found = [_slice("all", "all", verdicts)]
    for by, name_of in SLICES.items():
        groups: dict[str, list[RowVerdict]] = {}
        for verdict in verdicts:
            unreadable = (by == "source" and verdict.source) or "unreadable"
            name = unreadable if verdict.row is None else name_of(verdict.row)
            groups.setdefault(name, []).append(verdict)
        found += [_slice(by, name, groups[name]) for name in sorted(groups)]
    return tuple(found)


def _slice(by: str, name: str, verdicts: Sequence[RowVerdict]) -> SliceErrors:
    known, errors = residuals(verdicts), {}
    for quantity in QUANTITIES:
        errors[quantity] = summarise(each.log_ratio for each in known if each.quantity == quantity)
        tail = f"{quantity}_p99"
        times = (
            (getattr(each.row, f"{tail}_s", None), getattr(each.found, f"{tail}_s"))
            for each in verdicts
        )
        errors[tail] = summarise(math.log(measured / found) for measured, found in times
                                 if measured and found)  # fmt: skip
    return SliceErrors(
        by=by,
        name=name,
        rows=len(verdicts),
        answered=sum(verdict.answered is not False for verdict in verdicts),
        infeasible=sum(verdict.found.status == "infeasible" for verdict in verdicts),
        **errors,
    )
