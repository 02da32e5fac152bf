"""The `serving` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from serving.deploy import Site
from serving.deployed import bring_up
from serving.measure import measure
from serving.status import current, look
from serving.takedown import take_down
from serving.target import located
from serving.terminal import progress
from serving.verify import differences
from sizing.child import terminable
from sizing.errors import InputError, NegativeAnswer
from sizing.plan import Deployment, Plan, read_deployment, read_plan
from sizing.shell import run

app = typer.Typer(
    help="Serve a plan: split prefill and decode on Ray Serve and vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print exactly the data, as JSON.")]


@app.command("demo-model")
def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(
        ".minicluster/models/demo"
    ),
) -> None:
    """Make the demo model: a random-weight Llama with its own tokenizer, nothing downloaded."""
    from serving.demo_model import make_demo_model  # noqa: PLC0415  (wants tokenizers)

    typer.echo(make_demo_model(directory))


@app.command()
def up(
    plan: Annotated[Path, typer.Argument(help="Plan written by `sizing plan -o`.")],
    target: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    host: Annotated[str, typer.Option(help="Address the endpoint listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port the endpoint listens on.", min=1, max=65535)
    ] = 8000,
    address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster; default: start one here.")
    ] = None,
) -> None:
    """Deploy a plan; returns when requests get through every prefill → decode pair."""
    given = read_plan(plan)
    kind = _target(given, target)
    if not given.deployable.ok:
        raise NegativeAnswer(
            f"{plan}: the plan itself says that it cannot be deployed: "
            f"{given.deployable.rule_broken} ({given.deployable.profile})"
        )
    site = Site(target=kind, host=host, port=port, address=address)
    with progress() as told, terminable():
        endpoint = bring_up(given.deployment, site, told=told, plan=given)
    ready = endpoint.readiness
    typer.echo(f"ready: {endpoint.base_url}/v1 serves {endpoint.model_id}")
    typer.echo(
        f"checked: first token {ready.ttft_s * 1e3:.0f} ms; KV hand-off "
        f"{ready.handoff_s * 1e3:.0f} ms; transfers that stalled before: {ready.stalls}"
    )
    body = {"model": endpoint.model_id, "prompt": "Hello", "max_tokens": 16, "stream": True}
    typer.echo(f"try:   curl -N {endpoint.base_url}/v1/completions -d '{json.dumps(body)}'")
    typer.echo(f"logs:  serving logs   (all of them: {endpoint.state.logs})")
    typer.echo("stop:  serving down")


@app.command()
def status(*, as_json: AsJson = False) -> None:
    """Show what is planned, what is deployed, and whether it is healthy."""
    state = current()
    deployed = look(state)
    planned = read_deployment(Path(state.plan))
    rows = [
        {
            "role": pool.role,
            "planned": pool.replicas,
            "deployed": deployed.replicas.get(pool.role, 0),
            "healthy": deployed.status.get(pool.role) == "HEALTHY",
        }
        for pool in planned.pools
    ]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "base_url": state.base_url,
                    "plan_hash": state.plan_hash,
                    "started": state.started,
                    "ready": state.ready,
                    "answers": deployed.answers,
                    "pools": rows,
                }
            )
        )
        return
    answers = "answers" if deployed.answers else "does not answer"
    typer.echo(f"{state.base_url} {answers}; started {state.started}; plan {state.plan_hash}")
    for row in rows:
        healthy = "healthy" if row["healthy"] else deployed.status.get(str(row["role"]), "missing")
        typer.echo(f"{row['role']:8} {row['deployed']} of {row['planned']} replicas, {healthy}")


@app.command()
def verify(*, as_json: AsJson = False) -> None:
    """Compare what runs with the plan: replicas, TP, nodes, cores, engine settings."""
    state = current()
    planned = located(read_deployment(Path(state.plan)))
    found = differences(planned, look(state, facts=True), state.target)
    if as_json:
        typer.echo(json.dumps({"as_planned": not found, "differences": found}))
    if found:
        raise NegativeAnswer("\n  ".join(["deployed is not what was planned:", *found]))
    if not as_json:
        typer.echo(f"deployed as planned: {_summary(planned)}")


@app.command()
def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Last lines of each log.", min=1)
    ] = 20,
) -> None:
    """Print the end of each replica's log, of what runs or else of what ran last."""
    from serving.logs import replica_logs  # noqa: PLC0415

    for title, text in replica_logs(lines):
        typer.echo(f"==> {title} <==\n{text}")


@app.command()
def down() -> None:
    """Stop what `serving up` started: no process and no state is left."""
    from serving.state import read_state  # noqa: PLC0415

    state = read_state()
    if state is None:
        typer.echo("nothing is deployed from this directory")
        return
    with progress() as told:
        told("stopping")
        take_down(state)
    typer.echo("stopped")


app.command()(measure)


def _target(plan: Plan, asked: str) -> str:
    """Return `cpu` or `gpu`."""
    planned = plan.inputs.gpu.kind
    if asked not in {"auto", "cpu", "gpu"}:
        raise InputError("--target", asked, "auto, cpu or gpu")
    if asked not in {"auto", planned}:
        raise NegativeAnswer(
            f"the plan is for {plan.inputs.gpu.name}, a {planned}; it cannot be deployed on a "
            f"{asked} (plan again for what you have)"
        )
    return planned


def _summary(planned: Deployment) -> str:
    """Return the pools in a few words."""
    return ", ".join(f"{pool.role} {pool.replicas}xTP{pool.tp}" for pool in planned.pools)


def main() -> NoReturn:
    """Run `serving`."""
    run(app, "serving")


if __name__ == "__main__":
    sys.exit(main())
