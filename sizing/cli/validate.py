"""`sizing validate`: predictions of measured rows, and their errors."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from math import exp, log
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from minicluster.files import write_atomically
from minicluster.shell import say
from sizing.cli.common import AsJson, out_file, show, tracked
from sizing.evidence.evidence import evidence_of, read_evidence, to_json, tried
from sizing.evidence.labels import read_labels
from sizing.evidence.leave_out import SPLITS, leave_out
from sizing.evidence.row import read_rows
from sizing.evidence.validate import (
    judge,
    record,
    residuals,
    scored,
    slices,
    to_csv,
    without_errors,
)
from sizing.report.validation import (
    left_out_tables,
    validation_tables,
)

if TYPE_CHECKING:
    from sizing.evidence.validate import RowVerdict

SplitName = StrEnum("SplitName", list(SPLITS))  # type: ignore[misc]
"""What `--leave-out` takes."""
FAR = 300.0
"""If measured and predicted times differ by more than this factor, the unit is in doubt."""


def validate(
    rows: Annotated[list[Path], Argument(help="Measured rows (CSV), of one file or several")],
    out: Annotated[Path | None, out_file("Predictions to write (CSV)")] = None,
    as_json: AsJson = False,
    labels: Annotated[
        Path | None,
        Option(help="Rows to mend or leave out of errors (CSV: id, kind, evidence)"),
    ] = None,
    left_out: Annotated[
        list[SplitName] | None,
        Option(
            "--leave-out",
            help="Intervals learned without each of these in turn, and tried on it (repeatable)",
        ),
    ] = None,
    evidence: Annotated[
        Path | None,
        Option(help="Evidence file to write: errors and intervals, used by plans"),
    ] = None,
) -> None:
    """
    Predict every row; print errors by source, engine, model, GPU and load.

    Rows below a physical bound, and those that --labels leave out, are predicted but not scored.
    """
    known_labels = read_labels(labels) if labels is not None else {}
    lines = [line for path in rows for line in read_rows(path, known_labels)]
    known = read_evidence().intervals
    verdicts = [judge(line, known) for line in tracked(lines, "predicting")]
    if out is not None:
        write_atomically(out, to_csv(verdicts))
    judged = scored(verdicts)
    found = tried(residuals(judged))
    splits = [
        each
        for split in tracked(dict.fromkeys(left_out or ()), "leaving out")
        for each in leave_out(residuals(judged), split)
    ]
    if evidence is not None:
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        write_atomically(evidence, to_json(evidence_of(judged, found, date=today, left_out=splits)))
    unscored = [verdict for verdict in verdicts if verdict.excluded]
    _print_unit_doubt(judged)
    data: dict[str, Any] = {
        "errors": [asdict(each) for each in slices(judged)],
        "coverage": [asdict(each) for each in found.coverages],
        "claims": [asdict(each) for each in found.claims],
        "left_out": [asdict(each) for each in splits],
        "unsupported": [
            {"reason": reason, "rows": len(ids)}
            for (status, reason), ids in without_errors(judged).items()
            if status == "unsupported"
        ],
        "not_scored": [{"id": each.id, "reason": each.excluded} for each in unscored],
        "rows": [record(verdict) for verdict in verdicts],
    }
    tables = [*validation_tables(verdicts, found), *left_out_tables(splits)]
    show(data, *tables, as_json=as_json)


def _print_unit_doubt(verdicts: list[RowVerdict]) -> None:
    logs = [each.log_ratio for each in residuals(verdicts)]
    if logs and abs(median(logs)) > log(FAR):
        say(
            f"sizing: measured times are about {exp(median(logs)):,.3g} times the predicted ones:"
            " are they in seconds?"
        )
