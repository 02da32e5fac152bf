"""`sizing validate`: predictions of measured rows, and their errors."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

from typer import Argument, Option

from minicluster.files import write_atomically, write_table
from minicluster.shell import say
from sizing.cli.common import AsJson, out_file, show, tracked
from sizing.evidence.evidence import evidence_of, to_json
from sizing.evidence.splits import SPLITS
from sizing.evidence.validate import COLUMNS, record
from sizing.evidence.validate import validate as validate_rows
from sizing.report.validation import left_out_tables, validation_tables

SplitName = StrEnum("SplitName", list(SPLITS))  # type: ignore[misc]
"""What `--leave-out` takes."""


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
    found = validate_rows(*rows, labels=labels, left_out=left_out or (), progress=tracked)
    if out is not None:
        write_table(out, COLUMNS, (record(each).values() for each in found.verdicts))
    if evidence is not None:
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        made = evidence_of(found.scored, found.tried, date=today, left_out=found.left_out)
        write_atomically(evidence, to_json(made))
    if found.unit_doubt:
        say(f"sizing: {found.unit_doubt}")
    tables = [*validation_tables(found.verdicts, found.tried), *left_out_tables(found.left_out)]
    show(found.as_dict(), *tables, as_json=as_json)
