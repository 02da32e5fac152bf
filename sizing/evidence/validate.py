"""What `sizing validate` answers: predictions of measured rows against the measurements."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from minicluster.pages.shown import Shown
from sizing.evidence.errors import SliceErrors, residuals, scored, slices
from sizing.evidence.evidence import HeldOutCoverage, Tried, leave_out, read_evidence, tried
from sizing.evidence.interval_fit import QUANTITIES
from sizing.evidence.labels import read_labels
from sizing.evidence.measured_row import MeasuredRow
from sizing.evidence.prediction import RowPrediction, RowVerdict, predict_row
from sizing.evidence.row import RefusedRow, read_rows
from sizing.planner.intervals import DISTANCES, Intervals, PredictionInterval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


NEAR = 1
"""Distance beyond which a prediction's reason says what the nearest measurement is of."""


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
            interval = intervals.around(value_s, quantity, found.labels)
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


FAR = 300.0
"""If measured and predicted times differ by more than this factor, the unit is in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated(Shown):
    """
    Measured rows with their predictions, and the errors.

    Attributes:
        verdicts: one per row, in the order of the files.
        errors: of all rows, then by source, engine, model, GPU, load and class; fractions of
            predicted / measured - 1.
        tried: how often rows lie within intervals that were learned without them.
        left_out: the same of intervals learned without each group of a split.
    """

    verdicts: tuple[RowVerdict, ...]
    errors: tuple[SliceErrors, ...]
    tried: Tried
    left_out: tuple[HeldOutCoverage, ...]

    @property
    def scored(self) -> list[RowVerdict]:
        """Rows that count in errors and intervals."""
        return scored(self.verdicts)

    @property
    def unit_doubt(self) -> str:
        """Why measured times may not be in seconds; empty: they look so."""
        logs = [each.log_ratio for each in residuals(self.scored)]
        if not logs or abs(median(logs)) <= math.log(FAR):
            return ""
        factor = f"{math.exp(median(logs)):,.3g}"
        return f"measured times are about {factor} times the predicted ones: are they in seconds?"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as `sizing validate --json` prints it."""
        rows = without_errors(self.scored).items()
        unscored = [each for each in self.verdicts if each.excluded]
        return {
            "errors": [asdict(each) for each in self.errors],
            "coverage": [asdict(each) for each in self.tried.coverages],
            "claims": [asdict(each) for each in self.tried.claims],
            "left_out": [asdict(each) for each in self.left_out],
            "unsupported": [
                {"reason": reason, "rows": len(ids)}
                for (status, reason), ids in rows
                if status == "unsupported"
            ],
            "not_scored": [{"id": each.id, "reason": each.excluded} for each in unscored],
            "rows": [record(each) for each in self.verdicts],
        }


def validate(
    *rows: Path,
    labels: Path | None = None,
    left_out: Sequence[str] = (),
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items,
) -> Validated:
    """
    Predict every measured row, and compare.

    Args:
        rows: CSV files with the columns of docs/validation.md; times in seconds.
        labels: CSV of rows to mend or leave out of errors (id, kind, evidence).
        left_out: of `SPLITS`: intervals are learned without each of these in turn, and tried on
            it.
        progress: wraps what is gone through, with a word for it: `tqdm`, for example.

    Raises:
        InputError: a file that cannot be read, or is none of measured rows.
    """
    known_labels = {} if labels is None else read_labels(labels)
    lines = [line for path in rows for line in read_rows(path, known_labels)]
    known = read_evidence().intervals
    verdicts = tuple(judge(line, known) for line in progress(lines, "predicting"))
    judged = scored(verdicts)
    left = residuals(judged)
    return Validated(
        verdicts=verdicts,
        errors=slices(judged),
        tried=tried(left),
        left_out=tuple(
            each
            for split in progress(list(dict.fromkeys(left_out)), "leaving out")
            for each in leave_out(left, split)
        ),
    )
