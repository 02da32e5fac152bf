"""`sizing simulate`: a plan under arrivals, request by request."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from minicluster.errors import InputError
from minicluster.plan import read_plan
from minicluster.shell import talk
from minicluster.specs.checks import not_negative, positive
from minicluster.workload.sources import RequestSource, drawn
from minicluster.workload.traces import read_trace
from sizing.cli.inputs import with_overrides
from sizing.cli.plan import OVERRIDES  # noqa: TC001  (Typer reads the annotations)
from sizing.report.simulation import (
    pools_table,
    simulated_table,
    simulation_json,
    simulation_summary,
    write_requests,
)
from sizing.simulation.planned import simulate_plan

if TYPE_CHECKING:
    from minicluster.plan import Plan
    from minicluster.workload.arrivals import Arrivals

MOST = 10_000_000
"""Requests of one run; it is bounded by counts, never by seconds."""


def simulate(  # noqa: PLR0913, PLR0917  (a command's options)
    plan: Annotated[Path, typer.Argument(help="a file that `sizing plan -o` wrote")],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", "--schedule", help="arrivals and lengths: Azure LLM, BurstGPT, Mooncake, own"
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="requests to draw without --trace")] = 20_000,
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and routing")] = 0,
    rate: Annotated[
        float | None, typer.Option(help="requests/s in place of the plan's; of a trace: scaled to")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma or constant gaps")] = "poisson",
    gap_cv: Annotated[float | None, typer.Option(help="variation of gamma gaps")] = None,
    users: Annotated[int | None, typer.Option(help="closed loop of so many users")] = None,
    turns: Annotated[int, typer.Option(help="requests of a conversation")] = 1,
    think_s: Annotated[float, typer.Option(help="from an answer to the next request")] = 0.0,
    handshake_s: Annotated[float, typer.Option(help="first pull between two replicas")] = 0.0,
    skip_unanswered: Annotated[bool, typer.Option(help="of a trace: leave out 0 tokens")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="CSV, a line a request")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print percentiles and series")] = False,
    overrides: OVERRIDES = None,
) -> None:
    """Simulate a plan: percentiles with intervals, queues and caches over time."""
    planned = with_overrides(read_plan(plan), overrides or [], str(plan))
    positive(**{"--rate": rate, "--requests": requests})
    not_negative(**{"--handshake-s": handshake_s, "--seed": seed})
    if requests > MOST:
        raise InputError("--requests", requests, f"at most {MOST:,}")
    if trace is None:
        source = RequestSource(
            process=arrivals, gap_cv=gap_cv, users=users, turns=turns, think_s=think_s
        )
        coming = _drawn(planned, source, rate, requests, seed)
    else:
        if (arrivals, gap_cv, users, turns, think_s) != ("poisson", None, None, 1, 0.0):
            raise InputError("--trace", str(trace), "no options about arrivals besides it")
        if any(each.strip().startswith("workload") for each in overrides or []):
            raise InputError("--trace", str(trace), "no --set workload.… besides it")
        coming = _traced(trace, rate, skip_unanswered=skip_unanswered)
    with Progress(console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(coming))
        outcome = simulate_plan(
            planned,
            coming,
            seed=seed,
            handshake_s=handshake_s,
            progress=lambda done: bar.update(task, completed=done),
        )
    if out is not None:
        try:
            write_requests(outcome, out)
        except OSError as error:
            raise InputError("-o", str(out), f"a file to write: {error.strerror}") from None
    if as_json:
        sys.stdout.write(json.dumps(simulation_json(outcome), indent=2, sort_keys=True) + "\n")
        return
    console = Console()
    console.print(simulation_summary(outcome))
    console.print(simulated_table(outcome, planned.slo))
    console.print(pools_table(outcome))


def _drawn(
    plan: Plan, source: RequestSource, rate: float | None, requests: int, seed: int
) -> Arrivals:
    """Draw the plan's workload."""
    workload = plan.workload
    if rate is not None:
        workload = replace(workload, requests_per_s=rate)
    return drawn(workload, source, count=requests, seed=seed)


def _traced(path: Path, rate: float | None, *, skip_unanswered: bool) -> Arrivals:
    """Read a trace, and stretch its time to *rate*."""
    read = read_trace(path, skip_unanswered=skip_unanswered)
    if read.skipped:
        talk.print(f"left out {read.skipped:,} requests without an answer", highlight=False)
    if rate is None:
        return read.arrivals
    due = read.arrivals.due_s
    if len(due) < 2 or due[-1] == 0:  # noqa: PLR2004  (a rate takes two)
        raise InputError("--rate", rate, f"none: all requests of {path} come at one time")
    return replace(read.arrivals, due_s=due * ((len(due) - 1) / (due[-1] * rate)))
