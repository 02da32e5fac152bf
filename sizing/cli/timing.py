"""What `sizing calibrate --engine` measures: engines deployed once, their steps, then a burst."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.command import find_command, run_child
from minicluster.errors import Exit, TargetFailed
from minicluster.files import write_atomically
from minicluster.plan import StepModel, step_time, to_json
from minicluster.shell import talk
from minicluster.specs.calibration import read_measurements
from minicluster.workload.arrivals import length_quantiles
from minicluster.workload.run_verdict import read_run_verdict
from minicluster.workload.schedule import ScheduledRequest, write_schedule
from minicluster.workload.sources import RequestSource, drawn
from sizing.evidence.refit.evidence import SOUND
from sizing.evidence.refit.fit import fit_scales, recalibrated
from sizing.evidence.refit.observed import FEWEST, observed
from sizing.latency.calibration import fit_calibration
from sizing.planner.draft import draft_deployment

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.plan import Deployment, Inputs
    from minicluster.specs.calibration import CalibrationSpec
    from minicluster.specs.workload import WorkloadSpec

BURST_UTILISATION = 0.45
"""Of prefill, as timed in service: enough to queue, not so much that the tail is all noise."""

BURST_SEQUENCES = 4.0
"""In decode, mean: a quarter of the largest batch that was timed."""

BURST_REQUESTS = 270
BURST_LIMIT_S = 35.0
WARM_UP_S = 5.0
"""Length of the burst: so many requests after its warm-up, but no longer than the limit."""

RUN_ENDINGS = (Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE)
"""Exit codes of a load test that has samples, whatever it proves of an SLO."""

QUANTILES = 128


def timed_engine(inputs: Inputs, steps: Path, *, name: str, keep: bool) -> CalibrationSpec:
    """
    Deploy one replica a pool, time its steps alone and together, load it shortly, fit.

    A burst of open-loop requests at the scenario's lengths shows what steps timed one by one do
    not: what the engines, the endpoint and the load client take from one another's cores.

    Args:
        inputs: the scenario's.
        steps: steps.csv to write; deployment and burst are written beside it.
        name: of the calibration.
        keep: leave the engines up.

    Raises:
        TargetFailed: the engines did not start, or did not answer.
    """
    deployment = draft_deployment(inputs)
    draft = steps.with_suffix(".deployment.json")
    write_atomically(draft, to_json(deployment))
    kept = _status() is not None  # what was up before us is not ours to take down
    try:
        _command("serving", "up", draft, "--port", 0)
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
    """Return the constants refitted to a short load; as they are if that load proves nothing."""
    model = StepModel(
        prefill=fitted.prefill,
        decode=fitted.decode,
        path=fitted.path,
        interference=fitted.interference,
    )
    load, slo = inputs.scenario.workload, inputs.scenario.slo
    rate = burst_rate(model, load)
    if rate * (BURST_LIMIT_S - WARM_UP_S) < FEWEST:
        talk.print(
            f"no burst: {rate:.2g} requests/s are too few to learn from in {BURST_LIMIT_S:.0f} s"
        )
        return fitted
    schedule = folder.with_suffix(".schedule.jsonl")
    write_burst(schedule, load, rate)
    _command(
        *("loadtest", "run", "--trace", schedule, "--warmup", WARM_UP_S, "-o", folder),
        *("--host", _endpoint(), "--model", deployment.model.id),
        *("--vocab-size", inputs.model.vocab_size),
        *("--slo", f"ttft={slo.ttft_s},tpot={slo.per_token_s},percentile=p90"),
        endings=RUN_ENDINGS,
        silent=True,
    )
    found = read_run_verdict(folder / "verdict.json")
    if found is not None and found.verdict not in SOUND:
        talk.print(f"burst left out: {'; '.join(found.reasons)}", soft_wrap=True)
        return fitted
    run = observed(folder / "samples.jsonl", deployment, model, fitted)
    return recalibrated(fitted, fit_scales(model, [run]), [run], name=fitted.name)


def burst_rate(model: StepModel, load: WorkloadSpec) -> float:
    """
    Return the rate of the burst, requests/s, from steps timed in service.

    Ignores:
        What a prompt in service costs more at other batches than one.
    """
    prompts = length_quantiles(load.input_tokens, QUANTILES)
    answers = length_quantiles(load.output_tokens, QUANTILES)
    between = model.interference
    prefill_s = float(np.mean(step_time.prefill_s(model.prefill, prompts)))
    prefill_s = prefill_s * (1 + between.prefill_fraction) + between.prefill_per_request_s
    step_s = float(step_time.decode_s(model.decode, BURST_SEQUENCES, prompts.mean()))
    step_s *= 1 + between.decode_fraction
    return min(BURST_UTILISATION / prefill_s, BURST_SEQUENCES / (step_s * float(answers.mean())))


def write_burst(path: Path, load: WorkloadSpec, rate: float) -> None:
    """Write Poisson arrivals of the scenario's lengths as a trace that `loadtest run` sends."""
    length_s = min(BURST_LIMIT_S, WARM_UP_S + BURST_REQUESTS / rate)
    arrivals = drawn(load, RequestSource(), count=round(length_s * rate), seed=0)
    due_s = arrivals.due_s * load.requests_per_s / rate
    rows = zip(due_s, arrivals.input_tokens, arrivals.output_tokens, strict=True)
    write_schedule(
        (
            ScheduledRequest(
                index=index,
                due_s=float(at),
                input_tokens=int(prompt),
                output_tokens=int(answer),
                in_window=True,
            )
            for index, (at, prompt, answer) in enumerate(rows)
        ),
        path,
    )


def _endpoint() -> str:
    """Return the address of what `serving up` deployed."""
    status = _status()
    if status is None:
        raise TargetFailed("`serving status` knows of no deployment that `serving up` made")
    return str(status["base_url"])


def _status() -> dict[str, Any] | None:
    """Return what `serving status` says of this directory; `None`: nothing is deployed from it."""
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
    Run one of our commands; rooms meet in files and subprocesses only.

    Raises:
        TargetFailed: it ended otherwise than it may.
        KeyboardInterrupt: it was interrupted.
    """
    options = {"stdout": subprocess.DEVNULL} if silent else {"stdout": sys.stderr}
    code = run_child([find_command(name), *map(str, arguments)], **options)
    if code in (-signal.SIGINT, Exit.INTERRUPTED):
        raise KeyboardInterrupt
    if code not in endings:
        line = " ".join([name, *map(str, arguments[:2])])
        raise TargetFailed(f"`{line}` ended with exit code {code}")
