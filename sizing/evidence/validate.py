"""Predictions of every measured row of a file, compared with the measurements and counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.checks import Spec
from sizing.catalog import find_gpu, find_model, gpu_generation
from sizing.evidence.interval import (
    DISTANCES,
    NEAR,
    QUANTITIES,
    Intervals,
    PredictionInterval,
    RowResidual,
)
from sizing.evidence.prediction import OVERLOAD_RATIO, OVERLOAD_S, RowPrediction, predict_row
from sizing.evidence.row import MeasuredRow, RefusedRow, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """
    One line of the file, predicted.

    Attributes:
        row: `None`: the line could not be read.
        ttft: interval around the prediction; `None`: no prediction, or no row stands behind one.
        excluded: why the row is left out of errors and intervals; empty: it is not.
    """

    id: str
    source: str
    row: MeasuredRow | None
    found: RowPrediction
    ttft: PredictionInterval | None = None
    tpot: PredictionInterval | None = None
    excluded: str = ""

    @property
    def answered(self) -> bool | None:
        """True where the row counts as answered; `None` where nothing was measured."""
        if self.row is None or self.found.status == "unsupported":
            return False
        if self.found.status == "infeasible":  # it claims a TTFT above both limits
            if self.row.ttft_s is None:
                return None
            unloaded_s = self.found.unloaded_s or math.inf
            return self.row.ttft_s > min(OVERLOAD_S, OVERLOAD_RATIO * unloaded_s)
        return all(
            getattr(self.found, name) is not None
            for name in ("ttft_s", "tpot_s")
            if getattr(self.row, name) is not None
        )


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
        moe, gpu = find_model(row.model).moe is not None, find_gpu(row.gpu).name
    except InputError:
        return "unknown"
    return f"MoE, serving, {gpu_generation(gpu)}" if moe else "dense, serving"


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
        infeasible: of them called infeasible.
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


def judge(line: MeasuredRow | RefusedRow, intervals: Intervals) -> RowVerdict:
    """Predict one line of the file, with the interval around the prediction."""
    if not isinstance(line, MeasuredRow):
        found = RowPrediction(status="unsupported", reason=line.reason)
        return RowVerdict(id=line.id, source=line.source, row=None, found=found)
    found = predict_row(line)
    around: dict[str, PredictionInterval] = {}
    for quantity in QUANTITIES:
        value_s = getattr(found, f"{quantity}_s")
        if value_s is not None:
            interval = intervals.around(value_s, quantity, found.path, stand_in=found.stand_in)
            around |= {} if interval is None else {quantity: interval}
    missing = " and ".join(each.upper() for each in QUANTITIES if each not in around)
    distance = max((each.distance for each in around.values()), default=NEAR)
    reason = f"nearest measurement: {DISTANCES[distance]}" if distance > NEAR else ""
    if missing:
        reason = f"no measurement like this: no interval for {missing}"
    if found.status == "predicted" and reason:
        found = replace(found, reason="; ".join(filter(None, (found.reason, reason))))
    excluded = line.excluded or _suspicion(line, found)
    return RowVerdict(
        id=line.id, source=line.source, row=line, found=found, excluded=excluded, **around
    )


def _suspicion(row: MeasuredRow, found: RowPrediction) -> str:
    """Say which measurement is below its physical bound; empty: none is."""
    for quantity, bound_s in found.bounds_s.items():
        measured_s = getattr(row, f"{quantity}_s")
        if measured_s is not None and measured_s < bound_s:
            times = f"{1e3 * measured_s:.4g} ms is below the bound of {1e3 * bound_s:.4g} ms"
            return f"suspicious: the measured {quantity.upper()} of {times} (docs/model.md, V7)"
    return ""


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
                        path=answer.path,
                        stand_in=answer.stand_in,
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


def without_errors(verdicts: Iterable[RowVerdict]) -> dict[tuple[str, str], list[str]]:
    """
    Return the ids of rows that have no errors, the commonest reason first.

    Returns:
        By status and reason: `not scored` with its kind, `unsupported` without its place in the
        file, `infeasible` with what the measurement says of it.
    """
    measured = {True: "measured as overloaded", False: "measured as not", None: "not measured"}
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        status, reason = verdict.found.status, verdict.found.reason
        if verdict.excluded:
            key = "not scored", verdict.excluded.partition(": ")[0]
        elif status == "unsupported":
            key = status, reason.partition(": ")[2] or reason
        elif status == "infeasible":
            key = status, measured[verdict.answered]
        else:
            continue
        found.setdefault(key, []).append(verdict.id)
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


COLUMNS = (
    "id", "status", "reason", "ttft_s", "tpot_s", "ttft_p99_s", "tpot_p99_s",
    "ttft_low_s", "ttft_high_s", "tpot_low_s", "tpot_high_s",
)  # fmt: skip


def record(verdict: RowVerdict) -> dict[str, object]:
    """Return what is written of one row; `None`: an empty cell."""
    found = verdict.found
    ends: list[float | None] = []
    for around in (verdict.ttft, verdict.tpot):
        ends += [None, None] if around is None else [around.low_s, around.high_s]
    unscored = f"not scored: {verdict.excluded}" if verdict.excluded else ""
    reason = "; ".join(filter(None, (found.reason, unscored)))
    times = (found.ttft_s, found.tpot_s, found.ttft_p99_s, found.tpot_p99_s)
    return dict(zip(COLUMNS, (verdict.id, found.status, reason, *times, *ends), strict=True))
