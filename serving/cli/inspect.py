"""`serving status`, `verify` and `logs`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minicluster.errors import NegativeAnswer

if TYPE_CHECKING:
    from minicluster.plan import Pool
    from serving.cluster.state import State

AsJson = Annotated[bool, typer.Option("--json", help="JSON output.")]


def status(
    *,
    as_json: AsJson = False,
    ports: Annotated[
        bool,
        typer.Option(
            "--sockets",
            help="Listening sockets of the processes started here, instead of the pools.",
        ),
    ] = False,
) -> None:
    """Show planned, deployed and healthy replicas."""
    from minicluster.plan import read_deployment
    from serving.cluster.state import PLAN, UNFINISHED
    from serving.deployment.engine_args import SIMULATED
    from serving.operations.status import cluster_status, current

    state = current()
    if ports:
        _show_sockets(state, as_json=as_json)
        return
    deployed = cluster_status(state)
    planned = read_deployment(PLAN)

    def engines(pool: Pool) -> int:
        """Return the engines that run; one process has all ranks of a simulated group."""
        ranks = pool.dp if state.target == SIMULATED else 1
        return deployed.pool(pool.role).replicas * ranks

    rows = [
        {
            "role": pool.role,
            "planned": pool.engines,
            "deployed": engines(pool),
            "healthy": deployed.pool(pool.role).status == "HEALTHY",
        }
        for pool in planned.pools
    ]
    if as_json:
        names = ("base_url", "target", "slowdown", "plan_hash", "started", "ready", "changes")
        fields = {name: getattr(state, name) for name in names}
        typer.echo(json.dumps({**fields, "answers": deployed.answers, "pools": rows}))
        return
    answers = "answers" if deployed.answers else "does not answer"
    typer.echo(f"{state.base_url} {answers}; started {state.started}; plan {state.plan_hash}")
    for pool in planned.pools:
        running = deployed.pool(pool.role)
        health = "healthy" if running.status == "HEALTHY" else running.status
        typer.echo(f"{pool.role:8} {engines(pool)} of {planned_engines(pool)}, {health}")
    if not state.ready:
        typer.echo(f"`serving up` {UNFINISHED} (`serving down` clears what is left)")
    if state.target == SIMULATED:
        typer.echo(f"engines are simulated, {state.slowdown:g} times slower than the plan")
    for change in state.changes:
        typer.echo(f"not as planned, by request: {change}")


def planned_engines(pool: Pool) -> str:
    """Return how many engines a pool has: replicas, or the ranks of its data-parallel groups."""
    if pool.dp == 1:
        return f"{pool.engines} replicas"
    groups = "1 group" if pool.replicas == 1 else f"{pool.replicas} groups"
    return f"{pool.engines} ranks in {groups}"


def _show_sockets(state: State, *, as_json: bool) -> None:
    from serving.cluster.processes import cluster_processes
    from serving.cluster.sockets import answers, sockets
    from serving.operations.scale import cluster_id_of

    cluster_id = cluster_id_of(state)
    if not cluster_id:
        raise NegativeAnswer(f"{state.address} was not started from this directory")
    rows = [
        {
            "address": listening.address,
            "port": listening.port,
            "process": listening.process,
            "answers": answer,
        }
        for listening, answer in answers(sockets(cluster_processes(cluster_id)))
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        where = f"{row['address']}:{row['port']}"
        typer.echo(f"{where:22} {row['answers']:16} {row['process']}")


def verify(*, as_json: AsJson = False) -> None:
    """Compare what runs with the plan: replicas, TP, nodes, cores, limits, engine settings."""
    from minicluster.plan import read_deployment
    from serving.cluster.state import DEPLOYMENT
    from serving.operations.status import cluster_status, current
    from serving.operations.verify import differences

    state = current()
    planned = read_deployment(DEPLOYMENT)
    differing = differences(planned, cluster_status(state, facts=True), state.target, bounds(state))
    if as_json:
        data = {"as_planned": not differing, "differences": differing, "changes": state.changes}
        typer.echo(json.dumps(data))
    if differing:
        lines = ["the deployment differs from the plan:", *differing]
        raise NegativeAnswer("\n  ".join(lines), answered=as_json)
    if not as_json:
        pools = ", ".join(f"{pool.role} {pool.replicas}x{pool.slicing}" for pool in planned.pools)
        typer.echo(f"deployed as planned: {pools}")
        for change in state.changes:
            typer.echo(f"but, by request: {change}")


def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of last lines of each log.", min=1)
    ] = 20,
) -> None:
    """Print the end of each replica's log, of the running or else the last deployment."""
    from serving.cluster.logs import replica_logs

    for title, text in replica_logs(lines):
        typer.echo(f"==> {title} <==\n{text}")


def bounds(state: State) -> dict[str, dict[str, Any]]:
    """Return the compiled queue bounds of each role."""
    from minicluster.plan import read_deployment, read_plan
    from serving.cluster.state import PLAN
    from serving.deployment.compile import limits
    from serving.deployment.engine_args import SIMULATED
    from serving.deployment.simulated import slowed

    plan = read_plan(PLAN) if state.planned else None
    if plan is not None and state.target == SIMULATED:
        plan = slowed(plan, state.slowdown)
    return {
        pool.role: limits(pool, plan, deadlines_s=state.deadlines_s, token_limit=state.token_limit)
        for pool in read_deployment(PLAN).pools
    }
