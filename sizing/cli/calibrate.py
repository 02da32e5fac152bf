"""What `sizing calibrate` does: fit constants of an engine, to timed steps or load tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.command import find_command, run_child
from minicluster.errors import Exit, InputError, TargetFailed
from minicluster.files import write_atomically
from minicluster.machine import this_machine
from minicluster.plan import Deployment, Inputs, StepModel, step_time, to_json
from minicluster.shell import say, talk
from minicluster.specs.calibration import CalibrationSpec, read_measurements
from minicluster.workload.arrivals import equally_likely
from minicluster.workload.schedule import write_schedule
from minicluster.workload.sources import RequestSource, drawn
from sizing.evidence.refit.engine_steps import fit_interference_to_steps
from sizing.evidence.refit.fit import (
    RunResidual,
    Scales,
    fit_scales,
    recalibrated,
    residuals,
    scaled,
    with_ingress_of,
)
from sizing.evidence.refit.observed import (
    FEWEST,
    SOUND,
    Observed,
    check_runs,
    observed,
    read_observed,
)
from sizing.latency.calibration import fit_calibration, read_calibration
from sizing.planner.deployment import measurement_deployment
from sizing.report.tables import table
from sizing.report.terminal import print_sections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.pages.page import Section
    from minicluster.specs.model import ModelSpec
    from minicluster.specs.step import StepCoefficients
    from minicluster.specs.workload import WorkloadSpec

BURST_UTILISATION = 0.45
"""Largest prefill utilisation of the burst: it queues, and has a tail of some samples."""

BURST_SEQUENCES = 4.0
"""Largest mean decode batch of the burst: a quarter of the largest that was timed on a CPU."""

BURST_S = 27.0
WARM_UP_S = 4.0
"""Measured seconds of the burst, and those before them."""

FEWEST_OF_BURST = 100
"""Requests that have to be left of a burst without its hiccups, or half of it if it has fewer."""

BURSTS = 2
"""Bursts at most: a second one where hiccups leave too little of the first."""

RUN_ENDINGS = (Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE)
"""Exit codes of a load test that has samples, whatever it proves of an SLO."""

QUANTILES = 128
"""Quantiles that stand for a distribution of lengths."""


def from_steps(scenario: Path, model: ModelSpec, steps: Path, *, name: str) -> CalibrationSpec:
    """Fit constants to timed steps of the scenario's model."""
    rows = read_measurements(steps)
    if rows[0].key.model_config_hash != model.config_hash:
        raise InputError(
            f"{steps}: model_config_hash",
            rows[0].key.model_config_hash,
            f"{model.config_hash}, the model of {scenario}",
            "measure again with --engine",
        )
    return fit_calibration(rows, name=name)


def holds(out: Path, model: ModelSpec, engine: str) -> bool:
    """Return whether *out* was fitted on this machine, to this engine version and model."""
    if not out.exists():
        return False
    key = this_machine(engine, model_config_hash=model.config_hash, dtype=model.weight_dtype)
    try:
        return read_calibration(out).key == key
    except InputError:
        return False


def print_calibration(fitted: CalibrationSpec, out: Path) -> None:
    """Print the constants and the errors of their fit, and where they were written."""
    prefill, decode, path = fitted.prefill, fitted.decode, fitted.path
    between = fitted.interference
    steps = {
        "prefill": _prefill_text(prefill),
        "decode step": f"{(decode.base_s + decode.stream_s) * 1e3:.1f} ms"
        f" + {decode.per_sequence_s * 1e3:.2f} ms/sequence",
        "path": f"{path.request_s * 1e3:.1f} ms + KV pull {path.transfer_base_s * 1e3:.1f} ms"
        f" + {path.transfer_per_token_s * 1e6:.0f} µs/token",
        "interference": f"prefill +{between.prefill_fraction:.0%} in service,"
        f" +{between.prefill_per_sequence_fraction:.0%} per sequence in decode,"
        f" +{between.prefill_per_request_s * 1e3:.0f} ms per request;"
        f" decode step +{between.decode_fraction:.0%} while prefill is busy,"
        f" +{between.decode_per_request_s * 1e3:.0f} ms per request that joins",
    }
    errors = [f"{fit.error_fraction:.1%}" for fit in (prefill, decode, path)]
    rows = zip(steps, steps.values(), [*errors, ""], strict=True)
    heads = ("term", "value", "error of the fit")
    title = f"{fitted.name}: {fitted.key.processor}, {fitted.num_rows} rows"
    print_sections([table(title, heads, rows, words=heads)], talk)
    say(f"written: {out}")


def _prefill_text(prefill: StepCoefficients) -> str:
    """Write what a step takes by its prompt tokens, eq. S1: the pairs of attention are left out."""
    token_us = f"{prefill.per_prefill_token_s * 1e6:.0f} µs/token"
    knees = "".join(
        f" + {more_s * 1e6:.0f} µs/token beyond {tokens:,}"
        for tokens, more_s in zip(prefill.knee_tokens, prefill.knee_per_token_s, strict=True)
    )
    stream = f"the larger of {prefill.stream_s * 1e3:.1f} ms and {token_us}"
    return f"{prefill.base_s * 1e3:.1f} ms + {stream if prefill.stream_s else token_us}{knees}"


# --- from load tests


def recalibrate(
    samples: Sequence[Path],
    *,
    held_out: Sequence[Path],
    plan: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    """
    Fit the constants behind a plan to runs of it, and print the errors before and after.

    Args:
        plan: the plan of all runs; `None` where each has its own beside its samples.
        out: calibration file; the residuals are written beside it.

    Raises:
        InputError: runs that cannot be read, or that are unfit to be fitted to.
    """
    runs = [read_observed(path, plan) for path in samples]
    others = [read_observed(path, plan) for path in held_out]
    before = check_runs(runs, others)
    for run in (*runs, *others):
        _print_doubts(run)
    model = runs[0].step_model
    scales = fit_scales(model, runs)
    compared = {
        "fitted": residuals(model, scaled(model, scales), runs),
        "held_out": residuals(model, scaled(model, scales), others) or _left_out(model, runs),
    }
    fitted = recalibrated(before, scales, runs, name=out.stem)
    write_atomically(out, json.dumps(asdict(fitted), indent=2, sort_keys=True) + "\n")
    kept = {"scales": asdict(scales)} | {k: [asdict(r) for r in v] for k, v in compared.items()}
    text = json.dumps(kept, indent=2) + "\n"
    write_atomically(out.with_suffix(".residuals.json"), text)
    if as_json:
        sys.stdout.write(text)
    else:
        _print_refit(scales, compared, out)


def _print_doubts(run: Observed) -> None:
    if run.turned_away:
        share = f"{run.turned_away:,} of {run.turned_away + len(run.arrivals):,} requests"
        say(f"{run.name}: left out {share}, rejected before they reached an engine")
    for hiccup in run.hiccups:
        say(f"{run.name}: cut out, {hiccup.text}")
    if run.verdict is not None and run.verdict not in SOUND:
        say(f"{run.name}: its verdict is {run.verdict}, so that errors on it prove little")


def _left_out(model: StepModel, runs: Sequence[Observed]) -> tuple[RunResidual, ...]:
    """Compare each run with a fit to the others; empty if there is only one."""
    if len(runs) == 1:
        return ()
    rows: list[RunResidual] = []
    for run in runs:
        scales = fit_scales(model, [other for other in runs if other is not run])
        rows += residuals(model, scaled(model, scales), [run])
    return tuple(rows)


def _print_refit(scales: Scales, compared: dict[str, tuple[RunResidual, ...]], out: Path) -> None:
    factors = ", ".join(f"{name} x {value:.2f}" for name, value in asdict(scales).items())
    say(f"constants: {factors}")
    for kind, rows in compared.items():
        if rows:
            print_sections([_errors_table(kind.replace("_", " "), rows)], talk)
    if not compared["held_out"]:
        say("no run was held out: use --hold-out, or --from several times")
    say(f"written: {out}, residuals beside it")


def _errors_table(title: str, rows: Sequence[RunResidual]) -> Section:
    """Return the relative errors of a group of runs by statistic, before and after the fit."""
    shown = []
    for metric, statistic in dict.fromkeys((row.metric, row.statistic) for row in rows):
        those = [row for row in rows if (row.metric, row.statistic) == (metric, statistic)]
        before = np.array([row.before_fraction for row in those])
        after = np.array([row.after_fraction for row in those])
        name = metric.upper() if len(metric) == 4 else metric  # noqa: PLR2004  (an abbreviation)
        signed = (f"{before.mean():+.0%}", f"{after.mean():+.0%}")
        sizes = (f"{np.abs(before).mean():.0%}", f"{np.abs(after).mean():.0%}")
        shown.append((f"{name} {statistic}", *signed, *sizes))
    names = sorted({row.run for row in rows})
    heads = ("", "before", "after", "mean size before", "after")
    return table(f"predicted / measured - 1, {title}: {len(names)} runs", heads, shown)


# --- from the engine


def timed_engine(
    inputs: Inputs, steps: Path, *, name: str, keep: bool, step_times: Path | None = None
) -> CalibrationSpec:
    """
    Deploy one replica per pool, time its steps alone and together, send a short load, and fit.

    A burst of open-loop requests at the scenario's lengths shows what steps timed one by one do
    not: what the engines, the endpoint and the load client take from one another's cores.

    Args:
        steps: steps.csv to write; deployment and burst are written beside it.
        step_times: of simulated engines, in place of those of this machine.

    Raises:
        TargetFailed: the engines did not start, or did not answer.
    """
    deployment = measurement_deployment(inputs)
    planned = steps.with_suffix(".deployment.json")
    write_atomically(planned, to_json(deployment))
    kept = _status() is not None  # an earlier deployment is not taken down
    try:
        simulated = ("--engine", "simulated", "--step-times", step_times) if step_times else ()
        _command("serving", "up", planned, "--port", 0, *simulated)
        kept = False
        _command("serving", "measure", "-o", steps)
        fitted = fit_calibration(read_measurements(steps), name=name)
        fitted = _with_burst(inputs, deployment, fitted, steps.with_suffix(".burst"))
        kept = keep
    finally:
        if not kept:
            _command("serving", "down")
    return fitted


def _with_burst(
    inputs: Inputs, deployment: Deployment, fitted: CalibrationSpec, folder: Path
) -> CalibrationSpec:
    """
    Return the constants refitted to a short load at the planned rate, both pools busy.

    Hiccups are cut out of it, and it is repeated where they leave too little.

    Raises:
        TargetFailed: no burst left enough.
    """
    model = StepModel.calibrated(fitted)
    load = inputs.scenario.workload
    rate = burst_rate(model, load)
    if rate * BURST_S < FEWEST:
        say(f"no burst: {rate:.2g} requests/s are too few to learn from in {BURST_S:.0f} s")
        return fitted
    enough = min(FEWEST_OF_BURST, round(rate * BURST_S / 2))
    lacking = ""
    for seed in range(BURSTS):
        _send_burst(inputs, deployment, folder, rate, seed=seed)
        try:
            run = observed(folder / "samples.jsonl", deployment, model, fitted)
        except InputError as error:
            lacking = str(error)
        else:
            for hiccup in run.hiccups:
                say(f"burst: cut out, {hiccup.text}")
            if (left := int(run.counts.sum())) >= enough:
                return refitted(fitted, run)
            lacking = f"{left} requests are left without hiccups; expected {enough} or more"
        say(f"burst {seed + 1} of {BURSTS} gives too little: {lacking}")
    raise TargetFailed(
        f"{BURSTS} short loads in a row were disturbed ({lacking}); what else runs on this machine?"
        " Try again when it is quiet"
    )


def refitted(fitted: CalibrationSpec, run: Observed) -> CalibrationSpec:
    """Return the constants refitted to a load: interference, ingress, then all (eq. C5, C7, C4)."""
    under_load = with_ingress_of(fit_interference_to_steps(fitted, run.steps), run)
    scales = fit_scales(StepModel.calibrated(under_load), [run])
    return recalibrated(under_load, scales, [run], name=fitted.name)


def _send_burst(
    inputs: Inputs, deployment: Deployment, folder: Path, rate: float, *, seed: int
) -> None:
    """Send the burst to what is deployed; its samples and the engines' steps are in *folder*."""
    schedule, slo = folder.with_suffix(".schedule.jsonl"), inputs.scenario.slo
    write_burst(schedule, inputs.scenario.workload, rate, seed=seed)
    status = _status()
    if status is None:
        raise TargetFailed("`serving status` finds no deployment of `serving up`")
    _command(
        *("loadtest", "run", "--trace", schedule, "--warmup", WARM_UP_S, "-o", folder),
        *("--host", status["base_url"], "--model", deployment.model.id),
        *("--vocab-size", inputs.model.vocab_size),
        *("--slo", f"ttft={slo.ttft_s},tpot={slo.per_token_s},percentile=p90"),
        endings=RUN_ENDINGS,
        silent=True,
    )


def burst_rate(model: StepModel, load: WorkloadSpec) -> float:
    """
    Return the rate of the burst, requests/s: the planned one, or the most that the pools carry.

    Ignores:
        The extra cost of prompts in service at prefill batches above one.
    """
    prompts, answers, _ = equally_likely(load, QUANTILES)
    between = model.interference
    prefill_s = float(np.mean(step_time.prefill_s(model.prefill, prompts)))
    prefill_s = prefill_s * (1 + between.prefill_fraction) + between.prefill_per_request_s
    step_s = float(step_time.decode_s(model.decode, BURST_SEQUENCES, prompts.mean()))
    step_s *= 1 + between.decode_fraction
    carried = (BURST_UTILISATION / prefill_s, BURST_SEQUENCES / (step_s * float(answers.mean())))
    return min(load.requests_per_s, *carried)


def write_burst(path: Path, load: WorkloadSpec, rate: float, *, seed: int = 0) -> None:
    """Write Poisson arrivals of the scenario's lengths as a trace that `loadtest run` sends."""
    count = round((WARM_UP_S + BURST_S) * rate)
    arrivals = drawn(load, RequestSource(), count=count, seed=seed)
    due_s = arrivals.due_s * load.requests_per_s / rate
    write_schedule(replace(arrivals, due_s=due_s).requests(), path)


def _status() -> dict[str, Any] | None:
    """Return the output of `serving status`; `None` where nothing is deployed."""
    line = [find_command("serving"), "status", "--json"]
    done = subprocess.run(line, check=False, capture_output=True)  # noqa: S603  (ours)
    if done.returncode:
        return None
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def _command(
    name: str, *arguments: object, endings: tuple[int, ...] = (0,), silent: bool = False
) -> None:
    """
    Run `serving` or `loadtest`: the packages meet in files and subprocesses only.

    Raises:
        TargetFailed: its exit code is not one of *endings*. Bad input of it, or a full disk that it
            met, remains bad input: the last lines that were printed say which.
        KeyboardInterrupt: it was interrupted.
    """
    options = {"stdout": subprocess.DEVNULL} if silent else {"stdout": sys.stderr}
    code = run_child([find_command(name), *map(str, arguments)], **options)
    if code in (-signal.SIGINT, Exit.INTERRUPTED):
        raise KeyboardInterrupt
    if code not in endings:
        line = " ".join([name, *map(str, arguments[:2])])
        failed = TargetFailed(f"`{line}` ended with exit code {code}")
        if code == Exit.BAD_INPUT:
            failed.exit_code = Exit.BAD_INPUT
        raise failed
