"""`sizing validate`: predictions of measured rows, and their errors."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from math import exp, log
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from minicluster.files import write_atomically
from minicluster.shell import talk
from sizing.cli.common import AsJson, out_file, print_json, tracked
from sizing.evidence.coverage import tried
from sizing.evidence.evidence import evidence_of, read_evidence, to_json
from sizing.evidence.row import read_rows
from sizing.evidence.scalar import calibrated
from sizing.evidence.validate import judge, record, refusals, residuals, slices, to_csv
from sizing.report.validation import (
    claims_table,
    coverage_table,
    errors_table,
    infeasible_table,
    refusals_table,
    scalars_table,
    tails_table,
)

if TYPE_CHECKING:
    from sizing.evidence.coverage import Tried
    from sizing.evidence.scalar import Calibrated
    from sizing.evidence.validate import RowVerdict

FAR = 300.0
"""Ratio of measured to predicted times above which the unit of the rows is doubted."""


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
    if as_json:
        document = _document(verdicts, answers, found)
        if fit is not None:
            document["calibration"] = fit.data()
        print_json(document)
        return
    _print(verdicts, found)
    if fit is not None:
        _print_fit(fit)


def _print_unit_doubt(verdicts: list[RowVerdict]) -> None:
    logs = [each.log_ratio for each in residuals(verdicts)]
    if logs and abs(median(logs)) > log(FAR):
        talk.print(
            f"sizing: measured times are about {exp(median(logs)):,.3g} times the predicted ones:"
            " are they in seconds?"
        )


def _document(
    verdicts: list[RowVerdict], answers: list[RowVerdict], found: Tried
) -> dict[str, Any]:
    """Return all that is printed as data; *answers* are the predictions that `-o` writes."""
    return {
        "errors": [asdict(each) for each in slices(verdicts)],
        "coverage": [asdict(each) for each in found.coverages],
        "claims": [asdict(each) for each in found.claims],
        "unsupported": [{"reason": r, "rows": n} for r, n in refusals(verdicts)],
        "rows": [record(answer) for answer in answers],
    }


def _print(verdicts: list[RowVerdict], found: Tried) -> None:
    console = Console()
    errors = slices(verdicts)
    for by, group in groupby(errors, key=lambda each: each.by):
        console.print(errors_table(by, group))
    if errors[0].ttft_p99 is not None:
        console.print(tails_table(errors))
    console.print(coverage_table(found.coverages))
    console.print(claims_table(found.claims))
    refused = refusals(verdicts)
    if refused:
        console.print(refusals_table(refused))
    impossible = [verdict for verdict in verdicts if verdict.found.status == "infeasible"]
    if impossible:
        console.print(infeasible_table(impossible))


def _print_fit(fit: Calibrated) -> None:
    console = Console()
    console.print(scalars_table(fit.scalars.values()))
    for title, found in fit.errors.items():
        console.print(errors_table(f"source and load: {title}", found))
