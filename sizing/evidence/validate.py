"""Every line of a file predicted, compared and counted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.specs.checks import STRICT
from sizing.evidence.prediction import RowPrediction, predict_row
from sizing.evidence.residual import QUANTITIES, ErrorSummary, RowResidual, residuals_of, summarise
from sizing.evidence.row import MeasuredRow, kind_of
from sizing.evidence.verdict import RowVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sizing.evidence.interval import Intervals, PredictionInterval
    from sizing.evidence.table import RefusedRow

SLICES: dict[str, Callable[[MeasuredRow], str]] = {
    "source": lambda row: row.source or "unknown",
    "engine": lambda row: f"{row.engine} {row.engine_version}".strip(),
    "model": lambda row: row.model,
    "GPU": lambda row: row.gpu,
    "load": kind_of,
}
"""What errors are told apart by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceErrors:
    """
    Errors of one group of rows.

    Attributes:
        rows: lines of the group that are rows.
        answered: of them predicted, or called infeasible and measured as overloaded.
        infeasible: of them called infeasible.
    """

    __pydantic_config__ = STRICT

    by: str
    name: str
    rows: int
    answered: int
    infeasible: int
    ttft: ErrorSummary | None
    tpot: ErrorSummary | None
    ttft_p99: ErrorSummary | None = None


def judge(line: MeasuredRow | RefusedRow, intervals: Intervals) -> RowVerdict:
    """Predict one line of the file, with the interval around the prediction."""
    if not isinstance(line, MeasuredRow):
        found = RowPrediction(status="unsupported", reason=line.reason)
        return RowVerdict(id=line.id, source=line.source, row=None, found=found)
    found = predict_row(line)
    around: dict[str, PredictionInterval] = {}
    for quantity in QUANTITIES:
        value = getattr(found, f"{quantity}_s")
        interval = (
            None
            if value is None
            else intervals.around(value, quantity, found.path, stand_in=found.stand_in)
        )
        if interval is not None:
            around[quantity] = interval
    if found.status == "predicted" and len(around) < len(QUANTITIES):
        found = replace(found, reason="; ".join(filter(None, (found.reason, _unmeasured(around)))))
    return RowVerdict(id=line.id, source=line.source, row=line, found=found, **around)


def _unmeasured(around: dict[str, PredictionInterval]) -> str:
    """Say for what there is no interval."""
    missing = [each.upper() for each in QUANTITIES if each not in around]
    return f"no measurement like this: no interval for {' and '.join(missing)}"


def residuals(verdicts: Iterable[RowVerdict]) -> list[RowResidual]:
    """Return every residual of rows that were predicted."""
    return [
        each
        for verdict in verdicts
        if verdict.row is not None and verdict.found.status == "predicted"
        for each in residuals_of(verdict.row, verdict.found)
    ]


def slices(verdicts: Sequence[RowVerdict]) -> tuple[SliceErrors, ...]:
    """Return the errors of all rows together, then by each of `SLICES`."""
    found = [_slice("all", "all", verdicts)]
    for by, name_of in SLICES.items():
        groups: dict[str, list[RowVerdict]] = {}
        for verdict in verdicts:
            name = verdict.source if by == "source" else ""
            name = name_of(verdict.row) if verdict.row is not None else name or "unreadable"
            groups.setdefault(name, []).append(verdict)
        found += [_slice(by, name, groups[name]) for name in sorted(groups)]
    return tuple(found)


def _slice(by: str, name: str, verdicts: Sequence[RowVerdict]) -> SliceErrors:
    """Return the errors of one group."""
    known = residuals(verdicts)
    errors = {
        quantity: summarise(each.log_ratio for each in known if each.quantity == quantity)
        for quantity in QUANTITIES
    }
    tail = summarise(
        math.log(verdict.row.ttft_p99_s / verdict.found.ttft_p99_s)
        for verdict in verdicts
        if verdict.row is not None and verdict.row.ttft_p99_s and verdict.found.ttft_p99_s
    )
    return SliceErrors(
        by=by,
        name=name,
        rows=len(verdicts),
        answered=sum(verdict.answered is not False for verdict in verdicts),
        infeasible=sum(verdict.found.status == "infeasible" for verdict in verdicts),
        ttft_p99=tail,
        **errors,
    )


def refusals(verdicts: Iterable[RowVerdict]) -> list[tuple[str, int]]:
    """Return the reasons of unsupported lines without their places, the commonest first."""
    reasons = Counter(
        verdict.found.reason.partition(": ")[2] or verdict.found.reason
        for verdict in verdicts
        if verdict.found.status == "unsupported"
    )
    return reasons.most_common()
