"""`sizing validate` and `calibrate`: errors of predictions, and constants of this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

from typer import Argument, Option

from minicluster.errors import SET, InputError
from minicluster.files import write_atomically, write_table
from minicluster.shell import say
from sizing.cli.common import AsJson, Overrides, out_file, show, tracked
from sizing.evidence.splits import SPLITS

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
            metavar="KIND",
            help="Intervals learned without each of these in turn, and tried on it (repeatable): "
            + ", ".join(SPLITS),
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
    from sizing.evidence.evidence import evidence_of, to_json
    from sizing.evidence.validate import COLUMNS, record
    from sizing.evidence.validate import validate as validate_rows
    from sizing.report.validation import validation_sections

    checked = validate_rows(*rows, labels=labels, left_out=left_out or (), progress=tracked)
    if out is not None:
        write_table(out, COLUMNS, (record(verdict).values() for verdict in checked.verdicts))
    if evidence is not None:
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        made = evidence_of(checked.scored, checked.tried, date=today, left_out=checked.left_out)
        write_atomically(evidence, to_json(made))
    if checked.unit_doubt:
        say(f"sizing: {checked.unit_doubt}")
    show(checked.as_dict(), *validation_sections(checked), as_json=as_json)


def calibrate(  # noqa: PLR0913  (a command's options)
    scenario: Annotated[
        Path | None, Argument(help="Scenario file (TOML), or a shipped scenario; not with --from")
    ] = None,
    *,
    out: Annotated[Path, out_file("Calibration file to write")],
    overrides: Overrides = None,
    engine: Annotated[
        bool, Option("--engine", help="Deployment and timing of this machine's engine first")
    ] = False,
    keep: Annotated[
        bool, Option("--keep", help="With --engine: engines left running, for `serving up PLAN`")
    ] = False,
    steps: Annotated[
        Path | None, Option(help="Timed steps (CSV): written with --engine, else read")
    ] = None,
    step_times: Annotated[
        Path | None,
        Option(
            help="As --engine, with simulated engines of these step times in this machine's place"
        ),
    ] = None,
    again: Annotated[
        bool, Option("--again", help="Measurement even if -o holds this machine's constants")
    ] = False,
    samples: Annotated[
        list[Path] | None,
        Option("--from", help="Samples of a `loadtest run` to fit to; repeatable"),
    ] = None,
    plan: Annotated[
        Path | None, Option(help="With --from: plan of the runs, if it is not beside their samples")
    ] = None,
    hold_out: Annotated[
        list[Path] | None,
        Option("--hold-out", help="With --from: samples to compare with, but not to fit to"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit step times, path and interference to timed steps, or to load tests with --from."""
    from sizing.cli.calibrate import from_steps, holds, print_calibration, recalibrate, timed_engine
    from sizing.latency.calibration import read_calibration
    from sizing.scenario import Scenario

    engine |= step_times is not None
    if keep and not engine:
        expected = "no such option without --engine, which deploys what is kept"
        raise InputError("--keep", SET, expected)
    if samples:
        if scenario is not None or engine or steps or overrides:
            expected = "no SCENARIO, --set, --engine or --steps besides"
            raise InputError("--from", str(samples[0]), expected)
        recalibrate(samples, held_out=hold_out or (), plan=plan, out=out, as_json=as_json)
    elif plan or hold_out:
        expected = "no such option without --from samples.jsonl"
        raise InputError("--plan" if plan else "--hold-out", SET, expected)
    elif scenario is None:
        raise InputError("SCENARIO", None, "a scenario, or load tests with --from samples.jsonl")
    else:
        inputs = Scenario.load(scenario, overrides or [], None)
        steps = steps or out.with_suffix(".steps.csv")
        # No file says whose step times its constants are, where the engines were simulated.
        again |= keep or step_times is not None
        if engine and not again and holds(out, inputs.model, inputs.engine.name):
            say(f"{out} holds this machine's constants; measure again with --again")
            fitted = read_calibration(out)
        else:
            fitted = (
                timed_engine(inputs, steps, name=out.stem, keep=keep, step_times=step_times)
                if engine
                else from_steps(scenario, inputs.model, steps, name=out.stem)
            )
            write_atomically(out, json.dumps(asdict(fitted), indent=2, sort_keys=True) + "\n")
            print_calibration(fitted, out)
        if as_json:
            sys.stdout.write(out.read_text(encoding="utf-8"))
