"""`serving cluster`: labelled raylets on this machine, or the commands for real hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from minicluster.command import terminable
from minicluster.errors import Fault, InputError
from serving.cli.progress import progress

app = typer.Typer(help="Labelled Ray cluster to deploy on.", no_args_is_help=True)

PlanFile = Annotated[
    Path | None, typer.Argument(help="Plan or deployment whose nodes and roles to start.")
]


@app.command()
def up(
    plan: PlanFile = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes, each with both roles (instead of a plan).", min=1),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            help="CPUs per role and node, with --nodes (default: all of this machine).", min=1
        ),
    ] = None,
) -> None:
    """Start raylets on this machine that outlive the deployments on them."""
    from minicluster.plan import read_deployment
    from serving.cluster.local_cluster import CLUSTER_TOKEN, cluster_up, numbered_nodes
    from serving.cluster.token import TOKEN_PATH
    from serving.deployment.compile import kind_of, ray_nodes

    if (plan is None) == (nodes is None):
        given = "has neither a plan nor" if plan is None else "has both a plan and"
        raise InputError("serving cluster up", Fault(f"{given} --nodes"), "one of the two")
    if plan is not None:
        deployment = read_deployment(plan)
        raylets = ray_nodes(deployment, kind_of(deployment))
    else:
        raylets = numbered_nodes(nodes or 1, cpus or len(os.sched_getaffinity(0)))
    with progress() as report, terminable():
        cluster = cluster_up(raylets, report)
    typer.echo(f"up: {len(raylets)} raylet(s) at {cluster.address}")
    typer.echo(f"deploy: serving up plan.json --address {cluster.address}")
    typer.echo(f"token:  {CLUSTER_TOKEN.absolute()} ({TOKEN_PATH} from another directory)")
    typer.echo("stop:   serving cluster down")


@app.command()
def status(
    *, as_json: Annotated[bool, typer.Option("--json", help="JSON output.")] = False
) -> None:
    """Show the cluster's raylets, and which of them are alive."""
    from serving.cluster.local_cluster import current_cluster
    from serving.cluster.processes import cluster_processes

    cluster = current_cluster()
    import ray

    from serving.cluster.connection import connected

    with connected(cluster.address):
        alive = [node["Labels"] for node in ray.nodes() if node["Alive"]]
    rows = [
        {
            "node": node.node,
            "role": node.role,
            "cores": node.cores,
            "gpus": node.gpus,
            "alive": any(node.labels.items() <= labels.items() for labels in alive),
        }
        for node in cluster.nodes
    ]
    if as_json:
        typer.echo(json.dumps({"address": cluster.address, "raylets": rows}))
        return
    running = len(cluster_processes(cluster.cluster_id))
    typer.echo(f"{cluster.address}, started {cluster.started}, {running} processes")
    for row in rows:
        devices = row["gpus"] or row["cores"]
        typer.echo(
            f"{row['node']:10} {row['role']:8} devices {devices} "
            f"{'alive' if row['alive'] else 'gone'}"
        )


@app.command()
def down() -> None:
    """Stop the cluster and all its processes."""
    from serving.cluster.local_cluster import cluster_down

    with progress() as report:
        report("stopping")
        stopped = cluster_down()
    typer.echo("stopped" if stopped else "no cluster was started from this directory")


@app.command()
def lines(
    plan: Annotated[Path, typer.Argument(help="Plan whose nodes are your hosts.")],
    head: Annotated[str, typer.Option(help="Address and port of the head node.")] = "HEAD:6379",
) -> None:
    """Print the `ray start` command for each host of a plan."""
    from minicluster.plan import read_deployment
    from serving.api.access import KEYS_FILE
    from serving.cluster.raylets import ray_lines
    from serving.cluster.token import TOKEN_PATH, refuse_missing_certificates, shared_variables
    from serving.deployment.compile import kind_of, ray_nodes
    from serving.deployment.manifest import KEYS_PATH

    deployment = read_deployment(plan)
    refuse_missing_certificates(os.environ)
    variables = shared_variables(os.environ)
    shared = " ".join(f"{name}={quote(value)}" for name, value in variables.items())
    token = quote(variables[TOKEN_PATH])
    typer.echo("# once; the same file on every host, readable by its owner only")
    typer.echo(f"(umask 077; openssl rand -hex 32 > {token})")
    for line in ray_lines(ray_nodes(deployment, kind_of(deployment)), head, shared):
        typer.echo(line)
    typer.echo("# then, on the head; with --open instead of a file of API keys no key is needed")
    up = f"serving up {plan} --address {head} --host 0.0.0.0"
    typer.echo(f"{KEYS_FILE}={KEYS_PATH} {shared} {up}")
