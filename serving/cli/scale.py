"""`serving scale`: the recommended replicas of the pools, and the change without downtime."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from minicluster.command import postponed
from minicluster.errors import Inconclusive, InputError, NegativeAnswer
from minicluster.specs.scaling import HOLD_S, MARGIN
from serving.cli.progress import progress

if TYPE_CHECKING:
    from minicluster.plan import Plan
    from serving.cluster.state import State
    from serving.operations.autoscale import Advice


def scale(  # noqa: PLR0913, PLR0917  (a command's options)
    advice: Annotated[
        bool, typer.Option("--advise/--apply", help="Recommendation only, or the change itself.")
    ] = True,
    prefill: Annotated[
        int | None,
        typer.Option(help="Prefill replicas (default: recommended by measurement).", min=1),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(help="Decode replicas (default: recommended by measurement).", min=1),
    ] = None,
    window_s: Annotated[
        float, typer.Option("--window", help="Measurement time, seconds.", min=1.0)
    ] = 60.0,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Follow the rate until Ctrl-C: from 1 replica to the plan's."),
    ] = False,
    margin: Annotated[
        float, typer.Option(help="With --auto: share by which the next rate may be higher.")
    ] = MARGIN,
    hold_seconds: Annotated[
        float, typer.Option(help="With --auto: seconds that a replica stays when not needed.")
    ] = HOLD_S,
    as_json: Annotated[bool, typer.Option("--json", help="JSON output.")] = False,
) -> None:
    """Move replicas between prefill and decode, or with --auto follow the rate, no downtime."""
    from serving.cluster.state import changing
    from serving.deployment.mapped_gpus import refuse_mapped
    from serving.operations.autoscale import Advice
    from serving.operations.scale import scale as apply_scale
    from serving.operations.status import current

    state = current()
    refuse_mapped(state, os.environ, "`serving scale`")
    if auto:
        if prefill is not None or decode is not None or as_json:
            raise InputError("--auto", "with --prefill, --decode or --json", "--auto without them")
        _follow(state, window_s, hold_seconds, margin)
        return
    options = {"prefill": prefill, "decode": decode}
    requested = {role: replicas for role, replicas in options.items() if replicas is not None}
    if requested:
        advised = Advice(replicas=_requested(requested), reason="requested")
    else:
        with progress() as report:
            report(f"measuring {state.base_url} for {window_s:.0f} s")
            advised = _measured_advice(state, window_s)
    if as_json:
        typer.echo(json.dumps({"replicas": advised.replicas, "reason": advised.reason}))
    else:
        numbers = ", ".join(f"{role} {number}" for role, number in advised.replicas.items())
        typer.echo(f"{advised.reason}; replicas: {numbers}")
    if not advised.conclusive:
        raise Inconclusive("scale: measure longer (--window), or under load", answered=as_json)
    if not advice:
        with progress() as report, changing():
            changed = apply_scale(state, advised.replicas, report)
        for change in changed.changes:
            typer.echo(f"not as planned, by request: {change}")


def _requested(requested: dict[str, int]) -> dict[str, int]:
    from minicluster.plan import read_deployment
    from serving.cluster.state import DEPLOYMENT, PLAN
    from serving.operations.scale import replica_changes

    planned, now = read_deployment(PLAN), read_deployment(DEPLOYMENT)
    replica_changes(planned, now, requested)
    return {pool.role: requested.get(pool.role, pool.replicas) for pool in now.pools}


def _follow(state: State, window_s: float, hold_s: float, margin: float) -> None:
    """Scale with the rate until Ctrl-C; a change that is under way then is finished first."""
    from minicluster.plan import read_deployment
    from minicluster.plan.scaling import held_intervals, scaled_pools
    from serving.cluster.state import DEPLOYMENT, changing
    from serving.operations.autoscale import follow, offered_per_s, scrape
    from serving.operations.scale import replica_changes
    from serving.operations.scale import scale as apply_scale
    from serving.operations.status import current

    plan, now = _running_plan(state), read_deployment(DEPLOYMENT)
    replicas = {pool.role: pool.replicas for pool in now.pools}
    replica_changes(plan.deployment, now, replicas)  # refuses pools that cannot change
    held = held_intervals(hold_s, window_s, margin)
    scraped, since_s = scrape(state.base_url, state.tls_cert), time.monotonic()

    def rate() -> float:
        nonlocal scraped, since_s
        time.sleep(window_s)
        before, before_s = scraped, since_s
        scraped, since_s = scrape(state.base_url, state.tls_cert), time.monotonic()
        return offered_per_s(before, scraped, since_s - before_s)

    def change(wanted: dict[str, int]) -> None:
        with changing(), postponed():
            apply_scale(current(), wanted, lambda _step: None)

    try:
        for decision in follow(
            scaled_pools(plan), replicas, rate, change, held=held, margin=margin
        ):
            numbers = ", ".join(f"{role} {number}" for role, number in decision.replicas.items())
            typer.echo(f"{decision.requests_per_s:.4g} requests/s; replicas: {numbers}")
    except KeyboardInterrupt:
        typer.echo("stopped; the replicas stay as they are")


def _running_plan(state: State) -> Plan:
    """Return the plan in the seconds of what runs: simulated engines may be slower."""
    from minicluster.plan import read_plan
    from serving.cluster.state import PLAN
    from serving.deployment.engine_args import SIMULATED
    from serving.deployment.simulated import slowed

    plan = read_plan(PLAN)
    return slowed(plan, state.slowdown) if state.target == SIMULATED else plan


def _measured_advice(state: State, window_s: float) -> Advice:
    from minicluster.plan import read_deployment
    from serving.cluster.state import DEPLOYMENT
    from serving.operations.autoscale import advise, scrape, window_metrics

    plan, now = _running_plan(state), read_deployment(DEPLOYMENT)
    if len(now.pools) == 1:
        raise NegativeAnswer("a mixed pool has nothing to move; plan again for another load")
    before = scrape(state.base_url, state.tls_cert)
    time.sleep(window_s)
    seen = window_metrics(before, scrape(state.base_url, state.tls_cert), plan.slo)
    return advise(seen, {pool.role: pool for pool in now.pools}, plan.slo)
