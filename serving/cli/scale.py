"""`serving scale`: the recommended replicas of the pools, and the change without downtime."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from minicluster.errors import Inconclusive, NegativeAnswer
from minicluster.plan import read_deployment, read_plan
from serving.cli.progress import progress
from serving.cluster.state import DEPLOYMENT, PLAN, changing
from serving.operations.scale import replica_changes
from serving.operations.scale import scale as apply_scale
from serving.operations.scaling_policy import Advice, advise
from serving.operations.slo_metrics import scrape, window_metrics
from serving.operations.status import current

if TYPE_CHECKING:
    from serving.cluster.state import State


def scale(
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
    as_json: Annotated[bool, typer.Option("--json", help="JSON output.")] = False,
) -> None:
    """Move replicas between prefill and decode, within the plan's devices, without downtime."""
    state = current()
    given = {"prefill": prefill, "decode": decode}
    requested = {role: replicas for role, replicas in given.items() if replicas is not None}
    if requested:
        found = Advice(replicas=_requested(requested), reason="requested")
    else:
        with progress() as report:
            report(f"measuring {state.base_url} for {window_s:.0f} s")
            found = _measured_advice(state, window_s)
    if as_json:
        typer.echo(json.dumps({"replicas": found.replicas, "reason": found.reason}))
    else:
        numbers = ", ".join(f"{role} {number}" for role, number in found.replicas.items())
        typer.echo(f"{found.reason}; replicas: {numbers}")
    if not found.conclusive:
        raise Inconclusive("scale: measure longer (--window), or under load")
    if not advice:
        with progress() as report, changing():
            changed = apply_scale(state, found.replicas, report)
        for change in changed.changes:
            typer.echo(f"not as planned, by request: {change}")


def _requested(requested: dict[str, int]) -> dict[str, int]:
    """Return the replicas of all pools after the request, if the plan allows them."""
    planned, now = read_deployment(PLAN), read_deployment(DEPLOYMENT)
    replica_changes(planned, now, requested)
    return {pool.role: requested.get(pool.role, pool.replicas) for pool in now.pools}


def _measured_advice(state: State, window_s: float) -> Advice:
    plan, now = read_plan(PLAN), read_deployment(DEPLOYMENT)
    if len(now.pools) == 1:
        raise NegativeAnswer("a mixed pool has nothing to move; plan again for another load")
    before = scrape(state.base_url, state.tls_cert)
    time.sleep(window_s)
    seen = window_metrics(before, scrape(state.base_url, state.tls_cert), plan.slo)
    return advise(seen, {pool.role: pool for pool in now.pools}, plan.slo)
