"""`sizing validate`: predictions of measured rows, and their errors."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from minicluster.files import write_atomically
from minicluster.shell import say
from sizing.cli.common import AsJson, out_file, show, tracked
from sizing.evidence.evidence import evidence_of, read_evidence, to_json, tried
from sizing.evidence.row import read_rows
from sizing.evidence.scalar import calibrated
from sizing.evidence.validate import judge, record, refusals, residuals, slices, to_csv
from sizing.report.validation import calibration_tables, validation_tables

if TYPE_CHECKING:
    from sizing.evidence.validate import RowVerdict

FAR = 300.0
"""If measured and predicted times differ by more than this factor, the unit is in doubt."""


def validate(
    rows: Annotated[Path, Argument(help="Measured rows (CSV)")],
    out: Annotated[Path | None, out_file("Predictions to write (CSV)")] = None,
    as_json: AsJson = False,
    calibrate: Annotated[
        bool,
        Option(
            "--calibrate", help="Scalars fitted to half the configurations, tested on the others"
        ),
    ] = False,
    evidence: Annotated[
        Path | None,
        Option(help="Evidence file to write: errors and residual quantiles, used by plans"),
    ] = None,
) -> None:
    """
    Predict every row; print errors by source, engine, model, GPU and load.

    With --calibrate, -o and the rows of --json are corrected by the scalars.
    """
    lines = read_rows(rows)
    known = read_evidence().intervals
    verdicts = [judge(line, known) for line in tracked(lines, "predicting")]
    fit, answers = calibrated(verdicts) if calibrate else (None, verdicts)
    if out is not None:
        write_atomically(out, to_csv(answers))
    found = tried(residuals(verdicts))
    if evidence is not None:
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        write_atomically(evidence, to_json(evidence_of(verdicts, found, date=today)))
    _print_unit_doubt(verdicts)
    data: dict[str, Any] = {
        "errors": [asdict(each) for each in slices(verdicts)],
        "coverage": [asdict(each) for each in found.coverages],
        "claims": [asdict(each) for each in found.claims],
        "unsupported": [{"reason": r, "rows": n} for r, n in refusals(verdicts)],
        "rows": [record(answer) for answer in answers],
    }
    tables = [*validation_tables(verdicts, found)]
    if fit is not None:
        data["calibration"] = fit.data()
        tables += calibration_tables(fit)
    show(data, *tables, as_json=as_json)


def _print_unit_doubt(verdicts: list[RowVerdict]) -> None:
    logs = [each.log_ratio for each in residuals(verdicts)]
    if logs and abs(median(logs)) > log(FAR):
        say(
            f"sizing: measured times are about {exp(median(logs)):,.3g} times the predicted ones:"
            " are they in seconds?"
        )
