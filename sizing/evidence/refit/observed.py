"""A load test as a refit reads it, `samples.jsonl` beside its plan, and which ones it takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import Fault, InputError
from minicluster.phases import HANDOFF, INGRESS, QUEUED_PREFILL, phase_s
from minicluster.plan import Deployment, StepModel, read_plan
from minicluster.specs.calibration import CalibrationSpec
from minicluster.workload.arrivals import Arrivals, arrivals_of
from minicluster.workload.engine_steps import ENGINE_STEPS, read_engine_steps
from minicluster.workload.samples import Sample, read_run_verdict, read_samples
from minicluster.workload.schedule import ScheduledRequest, read_schedule
from sizing.evidence.refit.engine_steps import TimedSteps, timed_steps
from sizing.evidence.refit.hiccups import Hiccup, find_hiccups, outside

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

FEWEST = 50
"""Answered requests below which a run says nothing about constants."""

PHASES = (INGRESS, QUEUED_PREFILL, HANDOFF)
"""Phases that are compared: as fine as the endpoint reports them of every request."""

SOUND = ("met", "missed", "inconclusive")
"""Verdicts of runs whose latencies are what they seem; the others prove nothing."""

MOST_TURNED_AWAY = 0.2
"""
Share of the requests that may have been rejected. Admission control rejects when queues are long:
the more it rejects, the more it shapes what is measured, which no constant explains. The worst run
of docs/evidence/demo.md (5) was predicted within 12 % with 14 % rejected.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """
    One run.

    Attributes:
        step_model: that it was planned with.
        calibration: behind that; `None`: it came from the datasheet.
        arrivals: every request that came as far as an engine, shape (n,).
        counts: those that were measured and answered, less the warm-up that the verdict cut,
            shape (n,).
        ttft_s, tpot_s: of each, nan where it has none, shape (n,).
        phases_s: `PHASES` of TTFT as the server reported them; nan: not reported; shape (n,).
        verdict: of the run; `None`: the run was not judged.
        turned_away: requests sent besides, which no engine saw.
        steps: the engines' own steps meanwhile, of one engine of each role; empty: not known.
        hiccups: parts of the run in which neither requests nor steps count.
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
    steps: dict[str, TimedSteps] = field(default_factory=dict)
    hiccups: tuple[Hiccup, ...] = ()


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
        raise InputError(
            str(samples), Fault("is an empty file"), "samples written by `loadtest run`"
        )
    kept = [sample for sample in sent if not sample.turned_away]
    kept.sort(key=lambda sample: (sample.due_s, sample.index))
    found = read_run_verdict(samples.parent / "verdict.json")
    start_s = -np.inf if found is None else found.start_s
    kept_steps = read_engine_steps(samples.parent / ENGINE_STEPS)
    steps = {} if kept_steps is None else timed_steps(kept_steps)
    start_unix_s = 0.0 if kept_steps is None else kept_steps.start_unix_s
    hiccups = find_hiccups(kept, step_model, steps, start_unix_s=start_unix_s)
    clear = outside(hiccups, _column(s.due_s for s in kept), _column(s.end_s for s in kept))
    counts = clear & [_answered(s) and s.in_window and s.due_s >= start_s for s in kept]
    if counts.sum() < FEWEST:
        few = f"has only {int(counts.sum())} answered requests that count"
        few += "".join(f"; cut out: {hiccup.text}" for hiccup in hiccups)
        raise InputError(
            str(samples), Fault(few), f"a run with at least {FEWEST}", "a longer `loadtest run`"
        )
    return Observed(
        name=str(samples),
        deployment=deployment,
        step_model=step_model,
        calibration=calibration,
        arrivals=_arrivals(kept, samples.parent / "schedule.jsonl"),
        counts=counts,
        ttft_s=_column(s.ttft_s if _answered(s) else None for s in kept),
        tpot_s=_column(s.tpot_s if _answered(s) else None for s in kept),
        phases_s={name: _column(_phase_s(s, name) for s in kept) for name in PHASES},
        verdict=None if found is None else found.verdict,
        turned_away=len(sent) - len(kept),
        steps={
            role: timed.among(
                outside(hiccups, timed.begin_s - start_unix_s, timed.end_s - start_unix_s)
            )
            for role, timed in steps.items()
        },
        hiccups=hiccups,
    )


def _phase_s(sample: Sample, name: str) -> float | None:
    """Return a phase of a sample; what no engine accounts for is the ingress."""
    if name != INGRESS:
        return phase_s(sample.phases_s, name)
    engines_s = [phase_s(sample.phases_s, of_engine) for of_engine in (QUEUED_PREFILL, HANDOFF)]
    known_s = [seconds for seconds in engines_s if seconds is not None]
    return sample.ttft_s - sum(known_s) if known_s and sample.chunk_s else None


def _answered(sample: Sample) -> bool:
    return sample.ok and bool(sample.chunk_s)


def _column(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values])


def _arrivals(samples: Sequence[Sample], schedule: Path) -> Arrivals:
    """Return when requests came, how long they were, and what their prompts share."""
    asked = {each.index: each for each in read_schedule(schedule)} if schedule.exists() else {}
    rows = []
    for s in samples:
        row = ScheduledRequest(
            index=s.index,
            due_s=s.due_s,
            input_tokens=s.asked_input_tokens,
            output_tokens=s.asked_output_tokens,
        )
        if (request := asked.get(s.index)) is not None:
            shared = ("content", "prefix_tokens", "session")
            row = replace(row, **{name: getattr(request, name) for name in shared})
        rows.append(row)
    return arrivals_of(rows)


def _check_model(samples: Path, deployment: Deployment) -> None:
    """Refuse another model than the run asked for, where the run's order is there."""
    order = samples.parent / "run.json"
    try:
        job = json.loads(order.read_text(encoding="utf-8"))
        served, slowdown = job["model"], job.get("slowdown")
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return
    # Simulated engines with step times of their own report them, others repeat the plan's.
    if slowdown is not None and not (samples.parent / ENGINE_STEPS).exists():
        raise InputError(
            str(order),
            Fault("is a run of simulated engines"),
            "one of measured engines",
            "they repeat the plan's model",
        )
    if served != deployment.model.id:
        expected = f"{deployment.model.id}, the plan's"
        raise InputError(f"{order}: model", served, expected, "the plan that was deployed")


def check_runs(fitted: Sequence[Observed], held_out: Sequence[Observed]) -> CalibrationSpec:
    """
    Return the calibration whose constants a fit to *fitted* multiplies.

    Step times of all runs, also of those held out, are simulated with its constants, which hold
    for one processor, engine, model and dtype alone: its key. Runs that are fitted to were also
    planned with it. The plan of a run held out may come from other constants, say those of an
    earlier refit: they are not used.

    Raises:
        InputError: a run without a calibration, of another key, or, to be fitted to, of another
            calibration, of a verdict that proves nothing, or with too many requests turned away.
    """
    base = _calibration(fitted[0])
    for run in (*fitted, *held_out):
        _check_key(run, base, fitted[0].name)
    for run in fitted:
        found = _calibration(run)
        if found != base:
            raise InputError(
                f"{run.name}: the plan's calibration",
                f"{found.name} of {found.date}",
                f"that of {fitted[0].name}, {base.name} of {base.date}: a fit starts from one"
                " calibration",
                "compare with this run by --hold-out, or fit to each alone",
            )
        _check_sound(run)
    return base


def _calibration(run: Observed) -> CalibrationSpec:
    found = run.calibration
    if found is None:
        way_out = "time the engine first: `sizing calibrate SCENARIO --engine`"
        expected = "a plan made with --calibration"
        raise InputError(f"{run.name}: the plan's calibration", None, expected, way_out)
    return found


def _check_key(run: Observed, base: CalibrationSpec, name: str) -> None:
    expected = asdict(base.key)
    for part, value in asdict(_calibration(run).key).items():
        if value != expected[part]:
            raise InputError(
                f"{run.name}: the plan's calibration: key.{part}",
                value,
                f"{expected[part]}, as {name} has it",
                "runs of one machine, engine and model",
            )


def _check_sound(run: Observed) -> None:
    if run.verdict is not None and run.verdict not in SOUND:
        raise InputError(
            f"{run.name}: verdict",
            run.verdict,
            f"one of {', '.join(SOUND)}: this run was not fit to measure",
            "load again, or compare with it only by --hold-out",
        )
    sent = run.turned_away + len(run.arrivals)
    if run.turned_away > MOST_TURNED_AWAY * sent:
        raise InputError(
            f"{run.name}: requests turned away",
            f"{run.turned_away:,} of {sent:,}",
            f"at most {MOST_TURNED_AWAY:.0%}: the simulation admits every request",
            "load again at a lower rate",
        )
