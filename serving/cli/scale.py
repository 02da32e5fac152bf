"""`serving scale`: what the pools should have, and getting there without refusing a request."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minicluster.errors import Inconclusive, InputError, NegativeAnswer
from minicluster.plan import read_deployment, read_plan
from serving.operations.progress import progress
from serving.operations.scale import SCALED, moves
from serving.operations.scale import scale as bring_to
from serving.operations.scaling_policy import Advice, Share, advise
from serving.operations.slo_metrics import scrape, seen_between
from serving.operations.status import current

if TYPE_CHECKING:
    from serving.cluster.state import State


def scale(
    advice: Annotated[
        bool, typer.Option("--advise/--apply", help="Only say what to do, or do it.")
    ] = True,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill replicas; default: as measured.", min=1)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode replicas; default: as measured.", min=1)
    ] = None,
    window_s: Annotated[
        float, typer.Option("--window", help="Seconds to watch the endpoint.", min=1.0)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Exactly the data, as JSON.")] = False,
) -> None:
    """Move replicas between prefill and decode, within the plan's devices, without a break."""
    state = current()
    given = {
        role: replicas
        for role, replicas in (("prefill", prefill), ("decode", decode))
        if replicas is not None
    }
    if given:
        found = Advice(replicas=_asked(state, given), reason="asked for", holds=False)
    else:
        with progress() as told:
            told(f"watching {state.base_url} for {window_s:.0f} s")
            found = _watch(state, window_s)
    if as_json:
        typer.echo(json.dumps({"replicas": found.replicas, "reason": found.reason}))
    else:
        numbers = ", ".join(f"{role} {number}" for role, number in found.replicas.items())
        typer.echo(f"{found.reason}; replicas: {numbers}")
    if not found.conclusive:
        raise Inconclusive("scale: watch longer (--window), or under load")
    if not advice:
        with progress() as told:
            changed = bring_to(state, found.replicas, told)
        for change in changed.changes:
            typer.echo(f"not as planned, by request: {change}")


def _asked(state: State, given: dict[str, int]) -> dict[str, int]:
    """Return the replicas asked for, those of the other pools as they are, if the plan allows."""
    planned, now = read_deployment(Path(state.plan)), read_deployment(Path(state.deployment))
    wanted = {pool.role: given.get(pool.role, pool.replicas) for pool in now.pools}
    unknown = set(given) - set(wanted)
    if unknown:
        raise InputError(f"--{min(unknown)}", given[min(unknown)], f"a pool of {list(wanted)}")
    moves(planned, now, wanted)
    return wanted


def _watch(state: State, window_s: float) -> Advice:
    """Judge what the endpoint measures over the window."""
    if not all(SCALED in change for change in state.changes):
        raise NegativeAnswer("what is deployed was substituted: the plan promises nothing of it")
    plan, now = read_plan(Path(state.plan)), read_deployment(Path(state.deployment))
    if len(now.pools) == 1:
        raise NegativeAnswer("a mixed pool has nothing to move; plan again for another load")
    before = scrape(state.base_url)
    time.sleep(window_s)
    seen = seen_between(before, scrape(state.base_url), plan.slo)
    shares = {
        pool.role: Share(replicas=pool.replicas, width=pool.gpus // pool.replicas)
        for pool in now.pools
    }
    return advise(seen, shares, plan.slo)
