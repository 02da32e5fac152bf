"""Measured rows of files against their predictions: what `sizing validate` answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING, Any

from minicluster.pages.shown import Shown
from sizing.evidence.errors import SliceErrors, residuals, scored, slices
from sizing.evidence.evidence import HeldOutCoverage, Tried, leave_out, read_evidence, tried
from sizing.evidence.labels import read_labels
from sizing.evidence.row import read_rows
from sizing.evidence.validate import RowVerdict, judge, record, without_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


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
        if not logs or abs(median(logs)) <= log(FAR):
            return ""
        factor = f"{exp(median(logs)):,.3g}"
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
        left_out: `family`, `engine`, `gpu` or `source`: intervals are learned without each of
            these in turn, and tried on it.
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
