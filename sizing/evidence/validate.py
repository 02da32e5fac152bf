"""Predictions of every measured row of a file, compared with the measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizing.evidence.interval import (
    DISTANCES,
    NEAR,
    QUANTITIES,
    Intervals,
    PredictionInterval,
)
from sizing.evidence.prediction import OVERLOAD_RATIO, OVERLOAD_S, RowPrediction, predict_row
from sizing.evidence.row import MeasuredRow, RefusedRow

if TYPE_CHECKING:
    from collections.abc import Iterable


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
