"""A load test as a refit reads it: `samples.jsonl` beside its plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError
from minicluster.phases import HANDOFF, QUEUED_PREFILL, phase_s
from minicluster.plan import Deployment, StepModel, read_plan
from minicluster.specs.calibration import CalibrationSpec
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.run_verdict import read_run_verdict
from minicluster.workload.samples import read_samples, turned_away
from minicluster.workload.schedule import read_schedule
from minicluster.workload.traces import TraceRow, arrivals_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.workload.samples import Sample


FEWEST = 50
"""Answered requests below which a run says nothing about constants."""

PHASES = (QUEUED_PREFILL, HANDOFF)
"""Phases that are compared: as fine as the endpoint reports them of every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """
    One run.

    Attributes:
        name: of its file.
        deployment: what ran.
        step_model: that it was planned with.
        calibration: behind that; `None`: it came from the datasheet.
        arrivals: every request that came as far as an engine, shape (n,).
        counts: those that were measured and answered, less the warm-up that the verdict cut,
            shape (n,).
        ttft_s, tpot_s: of each, nan where it has none, shape (n,).
        phases_s: `PHASES` of TTFT as the server reported them; nan: not reported; shape (n,).
        verdict: of the run; `None`: the run was not judged.
        turned_away: requests sent besides, which no engine saw.
    """

    name: str
    deployment: Deployment
    step_model: StepModel
    calibration: CalibrationSpec | None
    arrivals: Arrivals
    counts: NDArray[np.bool_]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    phases_s: dict[str, NDArray[np.float64]]
    verdict: str | None = None
    turned_away: int = 0


def read_observed(samples: Path, plan: Path | None) -> Observed:
    """
    Read a run.

    Args:
        samples: `samples.jsonl` of `loadtest run`; `verdict.json` beside it says from when on
            they count, without it the window of the run does; `schedule.jsonl` what they share.
        plan: that was deployed; `None`: `plan.json` beside the samples.

    Raises:
        InputError: no such file, a line that is no sample, no verdict where one should be, too few
            answers, or a plan that another model was served from.
    """
    deployed = read_plan(plan or samples.parent / "plan.json")
    return observed(samples, deployed.deployment, deployed.step_model, deployed.inputs.calibration)


def observed(
    samples: Path,
    deployment: Deployment,
    step_model: StepModel,
    calibration: CalibrationSpec | None,
) -> Observed:
    """Read a run of *deployment*, whose step times are *step_model*; raises as `read_observed`."""
    _check_model(samples, deployment)
    sent = read_samples(samples)
    if not sent:
        raise InputError(str(samples), "an empty file", "samples written by `loadtest run`")
    kept = [sample for sample in sent if not turned_away(sample.outcome, sample.detail)]
    kept.sort(key=lambda sample: (sample.due_s, sample.index))
    found = read_run_verdict(samples.parent / "verdict.json")
    start_s = -np.inf if found is None else found.start_s
    answered = [sample.ok and bool(sample.chunk_s) for sample in kept]
    counts = np.array(
        [
            ok and sample.in_window and sample.due_s >= start_s
            for ok, sample in zip(answered, kept, strict=True)
        ]
    )
    if counts.sum() < FEWEST:
        raise InputError(
            str(samples),
            f"{int(counts.sum())} answered requests that count",
            f"at least {FEWEST}",
            "a longer `loadtest run`",
        )
    return Observed(
        name=str(samples),
        deployment=deployment,
        step_model=step_model,
        calibration=calibration,
        arrivals=_arrivals(kept, samples.parent / "schedule.jsonl"),
        counts=counts,
        ttft_s=np.array([s.ttft_s if ok else np.nan for ok, s in zip(answered, kept, strict=True)]),
        tpot_s=np.array(
            [_number(s.tpot_s) if ok else np.nan for ok, s in zip(answered, kept, strict=True)]
        ),
        phases_s={
            name: np.array([_number(phase_s(sample.phases_s, name)) for sample in kept])
            for name in PHASES
        },
        verdict=None if found is None else found.verdict,
        turned_away=len(sent) - len(kept),
    )


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def _arrivals(samples: Sequence[Sample], schedule: Path) -> Arrivals:
    """Return when requests came, how long they were, and what their prompts share."""
    asked = {each.index: each for each in read_schedule(schedule)} if schedule.exists() else {}
    rows = []
    for s in samples:
        row = TraceRow(s.due_s, s.asked_input_tokens, s.asked_output_tokens)
        if (request := asked.get(s.index)) is not None:
            row = row._replace(
                content=request.content,
                prefix_tokens=request.prefix_tokens,
                session=-1 if request.session is None else request.session,
            )
        rows.append(row)
    return arrivals_of(rows)


def _check_model(samples: Path, deployment: Deployment) -> None:
    """Refuse another model than the run asked for, where the run's order is there."""
    order = samples.parent / "run.json"
    try:
        served = json.loads(order.read_text(encoding="utf-8"))["model"]
    except (OSError, KeyError, TypeError, ValueError):
        return
    if served != deployment.model.id:
        raise InputError(
            f"{order}: model",
            served,
            f"{deployment.model.id}, the plan's",
            "the plan that was deployed",
        )
