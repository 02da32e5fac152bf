"""`sizing simulate` and `losses`: a plan under arrivals, request by request."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from minicluster.errors import SET, Exit, InputError
from minicluster.shell import say
from minicluster.specs.checks import not_negative, positive
from minicluster.workload.trace_options import SkipImages, TimeUnit, TraceReading
from sizing.cli.common import (
    MAX_REQUESTS,
    AsJson,
    Overrides,
    PlanFile,
    Seed,
    out_file,
    progress,
    show,
    tracked,
    with_overrides,
)

if TYPE_CHECKING:
    from minicluster.pages.page import ChartRow, Section
    from minicluster.plan import Plan, StepModel
    from minicluster.workload.arrivals import Arrivals
    from minicluster.workload.engine_steps import EngineSteps
    from minicluster.workload.sources import RequestSource
    from sizing.evidence.refit.engine_steps import Pace
    from sizing.simulation.outcome import Outcome


def simulate(  # noqa: PLR0913, PLR0917  (a command's options)
    plan: PlanFile,
    trace: Annotated[
        Path | None,
        Option(
            "--trace",
            "--schedule",
            help="Trace of arrivals and lengths: Azure LLM, BurstGPT, Mooncake, Qwen-Bailian, a log"
            " or schedule.jsonl",
        ),
    ] = None,
    requests: Annotated[int, Option(help="Number of requests to draw; not with --trace")] = 20_000,
    seed: Seed = 0,
    rate: Annotated[
        float | None, Option(help="Requests per second, in place of the plan's or the trace's")
    ] = None,
    arrivals: Annotated[
        str, Option(help="Gaps between requests: poisson, gamma or constant")
    ] = "poisson",
    gap_cv: Annotated[float | None, Option(help="Coefficient of variation of gamma gaps")] = None,
    users: Annotated[int | None, Option(help="Users of a closed loop, in place of a rate")] = None,
    turns: Annotated[int, Option(help="Requests per conversation")] = 1,
    think_s: Annotated[
        float, Option(help="Seconds from an answer to the user's next request")
    ] = 0.0,
    handshake_s: Annotated[
        float, Option(help="Seconds of the first KV transfer between two replicas")
    ] = 0.0,
    skip_unanswered: Annotated[
        bool, Option(help="Requests of a trace with 0 output tokens left out")
    ] = False,
    time_unit: TimeUnit = None,
    skip_images: SkipImages = False,
    by_capacity: Annotated[
        bool, Option(help="Prefix hits of a --trace that names contents, by capacity of a replica")
    ] = False,
    engine_steps: Annotated[
        Path | None,
        Option(
            help="Steps that the engines ran under this load (engine-steps.json of `loadtest run`):"
            " the simulation has their pace"
        ),
    ] = None,
    out: Annotated[Path | None, out_file("CSV file to write, one line per request")] = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Simulate a plan: percentiles with intervals, queues and caches over time."""
    from minicluster.plan import read_plan
    from minicluster.workload.sources import RequestSource
    from sizing.evidence.refit.engine_steps import paces, timed_steps
    from sizing.evidence.refit.pace import simulated_at_pace
    from sizing.report.simulation import simulation_json, simulation_sections, write_requests
    from sizing.simulation.planned import simulate as simulate_requests

    planned = with_overrides(read_plan(plan), overrides or [], str(plan))
    positive(**{"--rate": rate})
    not_negative(**{"--handshake-s": handshake_s})
    _check_run(requests, seed)
    source: RequestSource | Arrivals = RequestSource(
        process=arrivals, gap_cv=gap_cv, users=users, turns=turns, think_s=think_s
    )
    reading = TraceReading(time_unit=time_unit, skip_images=skip_images)
    if trace is None and reading != TraceReading():
        raise InputError("--trace", None, "a file for the options that say how to read it")
    if trace is not None:
        alone = source == RequestSource()
        _check_trace(trace, overrides or [], alone=alone)
        source = _traced(planned, trace, reading, skip_unanswered=skip_unanswered, seed=seed)
    kept_steps = None if engine_steps is None else _read_steps(engine_steps)
    with progress("simulating") as said:

        def run(model: StepModel) -> Outcome:
            return simulate_requests(
                replace(planned, step_model=model),
                source,
                requests=requests,
                requests_per_s=rate,
                seed=seed,
                handshake_s=handshake_s,
                progress=said,
            )

        outcome = simulated_at_pace(planned.step_model, kept_steps, run)
    if out is not None:
        write_requests(outcome, out)
    parts: list[Section | ChartRow | str] = [*simulation_sections(outcome, planned.promises)]
    classes = [each.name for each in planned.workload.classes] if trace is None else []
    found = simulation_json(outcome, classes)
    found["misses"] = _misses(planned, outcome, classes)
    if kept_steps is not None:
        pace_of = paces(planned.step_model, timed_steps(kept_steps))
        found["pace"] = {role: asdict(pace) for role, pace in pace_of.items()}
        parts = [*(pace_text(role, pace) for role, pace in pace_of.items()), *parts]
    if by_capacity:
        curve, section = _by_capacity(planned, outcome, source)
        found["hit_rate_by_capacity"] = curve
        parts.append(section)
    show(found, *parts, as_json=as_json)
    if found["misses"]:
        raise typer.Exit(Exit.NEGATIVE)


def _check_trace(trace: Path, overrides: list[str], *, alone: bool) -> None:
    """Refuse a trace beside what says arrivals or lengths, too."""
    if not alone:
        raise InputError("--trace", str(trace), "no options about arrivals besides it")
    if any(each.strip().startswith("workload") for each in overrides):
        raise InputError("--trace", str(trace), "no --set workload.… besides it")


def _misses(plan: Plan, outcome: Outcome, classes: list[str]) -> tuple[str, ...]:
    """Return the limits that are missed; those of classes only where requests have theirs."""
    from sizing.planner.error_model import missed_limits
    from sizing.planner.simulated_check import limits_of

    if len(plan.promises) > max(1, len(classes)):
        return ()
    return missed_limits(check for check, _ in limits_of(outcome, plan.promises))


def _traced(
    plan: Plan, trace: Path, reading: TraceReading, *, skip_unanswered: bool, seed: int
) -> Arrivals:
    """Return the arrivals of a trace, with adapters as the plan's load has them."""
    import numpy as np

    from minicluster.workload.traces import read_trace

    read = read_trace(trace, reading, skip_unanswered=skip_unanswered)
    for line in read.file.lines():
        say(line)
    return read.arrivals.with_adapters(plan.workload, np.random.default_rng(seed))


def _read_steps(file: Path) -> EngineSteps:
    """Return the steps that engines ran; refuse those that say nothing."""
    from minicluster.workload.engine_steps import read_engine_steps
    from sizing.evidence.refit.engine_steps import FEWEST

    kept = read_engine_steps(file)
    if kept is None or max(map(len, kept.of.values())) < FEWEST:
        expected = f"{FEWEST} steps or more of one engine, as `loadtest run` keeps them"
        raise InputError("--engine-steps", str(file), expected)
    return kept


def pace_text(role: str, pace: Pace) -> str:
    """Return the pace of a pool in words."""
    return (
        f"{role} steps took {pace.factor - 1:+.0%} against the plan's for the same work"
        f" ({pace.steps:,} steps); simulated at that pace"
    )


def _by_capacity(
    plan: Plan, outcome: Outcome, source: RequestSource | Arrivals
) -> tuple[list[dict[str, float]], Section]:
    """Return prefix hits by capacity, from an eighth of the KV cache of a replica's batch on."""
    from minicluster.engine_model.kv_cache import kv_bytes_per_token
    from minicluster.engine_model.planned_limits import planned_limits
    from minicluster.workload.arrivals import Arrivals
    from sizing.report.simulation import hit_rate_table
    from sizing.simulation.hit_rate import hit_rates

    if not isinstance(source, Arrivals) or (source.content is None and source.session is None):
        raise InputError(
            "--by-capacity",
            SET,
            "a --trace whose prompts say what they share: hash_ids (Mooncake) or session",
        )
    pool = next(pool for pool in plan.pools if pool.role != "decode")
    limits = planned_limits(plan.deployment, pool)
    token_bytes = kv_bytes_per_token(plan.model, slicing=pool.slicing) * pool.pp
    rates = hit_rates(outcome, source, first_tokens=limits.max_tokens / 8)
    drawn = hit_rate_table(rates, gpu_tokens=limits.max_tokens, token_bytes=token_bytes)
    curve = [{**each._asdict(), "bytes_per_gpu": each.capacity_tokens * token_bytes}
             for each in rates]  # fmt: skip
    return curve, drawn


def _check_run(requests: int, seed: int) -> None:
    positive(**{"--requests": requests})
    not_negative(**{"--seed": seed})
    if requests > MAX_REQUESTS:
        raise InputError("--requests", requests, f"at most {MAX_REQUESTS:,}")


def losses(
    plan: PlanFile,
    requests: Annotated[int, Option(help="Number of requests per simulation")] = 20_000,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate the plan whole, and with one replica less in each pool (N+1)."""
    from minicluster.plan import read_plan
    from sizing.planner.studies.loss import losses as lost_replicas
    from sizing.report.study import losses_section

    planned = read_plan(plan)
    _check_run(requests, seed)
    simulated = lost_replicas(planned, requests=requests, seed=seed)
    found = list(tracked(simulated, "simulating", total=1 + len(planned.pools)))
    section = losses_section(found, planned.slo.percentile, planned.confidence)
    show([asdict(loss) for loss in found], section, as_json=as_json)
    if not all(each.holds for each in found):
        raise typer.Exit(Exit.NEGATIVE)
