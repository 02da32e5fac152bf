"""`sizing calibrate`: fit the constants of this machine's engine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from minicluster.errors import InputError
from minicluster.files import write_atomically
from minicluster.machine import this_machine
from minicluster.shell import talk
from minicluster.specs.calibration import read_measurements
from sizing.cli.inputs import read_inputs
from sizing.cli.refit import recalibrate
from sizing.cli.timing import timed_engine
from sizing.latency.calibration import fit_calibration, read_calibration

if TYPE_CHECKING:
    from minicluster.specs.calibration import CalibrationSpec
    from minicluster.specs.model import ModelSpec


def calibrate(  # noqa: PLR0913  (a command's options)
    scenario: Annotated[
        Path | None, typer.Argument(help="whose model and engine to calibrate for")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="calibration file to write")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the scenario, as in `plan`")
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="time this machine's engine first (minutes)")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="with --engine: leave it up, for `serving up PLAN`")
    ] = False,
    steps: Annotated[
        Path | None, typer.Option(help="steps.csv: written with --engine, read without")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="measure even if -o holds this machine's constants")
    ] = False,
    samples: Annotated[
        list[Path] | None, typer.Option("--from", help="samples.jsonl of a `loadtest run`")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="with --from: that was deployed; else beside the samples")
    ] = None,
    hold_out: Annotated[
        list[Path] | None, typer.Option("--hold-out", help="samples.jsonl to compare with only")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the calibration")] = False,
) -> None:
    """Fit step times, path and interference to timed steps, or to load tests with --from."""
    if keep and not engine:
        raise InputError("--keep", True, "--engine, which deploys what is kept")
    if samples:
        if scenario is not None or engine or steps or overrides:
            expected = "no SCENARIO, --set, --engine or --steps besides"
            raise InputError("--from", str(samples[0]), expected)
        recalibrate(samples, held_out=hold_out or (), plan=plan, out=out, as_json=as_json)
    elif plan or hold_out:
        raise InputError("--plan" if plan else "--hold-out", None, "--from samples.jsonl with it")
    elif scenario is None:
        raise InputError("SCENARIO", None, "a scenario, or load tests with --from samples.jsonl")
    else:
        inputs = read_inputs(scenario, overrides or [], None)
        steps = steps or out.with_suffix(".steps.csv")
        if engine and not again and not keep and _holds(out, inputs.model, inputs.engine.name):
            talk.print(f"{out} holds this machine's constants; measure again with --again")
            fitted = read_calibration(out)
        else:
            fitted = (
                timed_engine(inputs, steps, name=out.stem, keep=keep)
                if engine
                else _from_steps(scenario, inputs.model, steps, name=out.stem)
            )
            write_atomically(out, json.dumps(asdict(fitted), indent=2, sort_keys=True) + "\n")
            _print(fitted, out)
        if as_json:
            sys.stdout.write(out.read_text(encoding="utf-8"))


def _from_steps(scenario: Path, model: ModelSpec, steps: Path, *, name: str) -> CalibrationSpec:
    """Fit the constants to steps that were timed before."""
    rows = read_measurements(steps)
    if rows[0].key.model_config_hash != model.config_hash:
        raise InputError(
            f"{steps}: model_config_hash",
            rows[0].key.model_config_hash,
            f"{model.config_hash}, the model of {scenario}",
            "measure again with --engine",
        )
    return fit_calibration(rows, name=name)


def _holds(out: Path, model: ModelSpec, engine: str) -> bool:
    """Whether *out* was fitted on this machine, engine version and model."""
    if not out.exists():
        return False
    key = this_machine(engine, model_config_hash=model.config_hash, dtype=model.weight_dtype)
    try:
        return read_calibration(out).key == key
    except InputError:
        return False


def _print(fitted: CalibrationSpec, out: Path) -> None:
    """Show the constants and how far the fit is from the rows."""
    table = Table(title=f"{fitted.name}: {fitted.key.processor}, {fitted.num_rows} rows")
    for heading in ("term", "value", "error of the fit"):
        table.add_column(heading)
    prefill, decode, path = fitted.prefill, fitted.decode, fitted.path
    between = fitted.interference
    table.add_row(
        "prefill",
        f"{prefill.base_s * 1e3:.1f} ms + {prefill.per_prefill_token_s * 1e6:.0f} µs/token",
        f"{prefill.error_fraction:.1%}",
    )
    table.add_row(
        "decode step",
        f"{(decode.base_s + decode.stream_s) * 1e3:.1f} ms"
        f" + {decode.per_sequence_s * 1e3:.2f} ms/sequence",
        f"{decode.error_fraction:.1%}",
    )
    table.add_row(
        "path",
        f"{path.request_s * 1e3:.1f} ms + KV pull {path.transfer_base_s * 1e3:.1f} ms"
        f" + {path.transfer_per_token_s * 1e6:.0f} µs/token",
        f"{path.error_fraction:.1%}",
    )
    table.add_row(
        "interference",
        f"prefill +{between.prefill_fraction:.0%} in service,"
        f" +{between.prefill_per_sequence_fraction:.0%} per sequence in decode,"
        f" +{between.prefill_per_request_s * 1e3:.0f} ms per request;"
        f" decode step +{between.decode_fraction:.0%} while prefill is busy,"
        f" +{between.decode_per_request_s * 1e3:.0f} ms per request that joins",
        "",
    )
    talk.print(table)
    talk.print(f"written: {out}")
