"""`serving demo-model`, `up` and `down`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from minicluster.command import terminable
from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Deployment, Plan, read_plan_or_deployment
from minicluster.shell import talk
from serving.api.api_keys import refuse_open
from serving.cluster.ports import free_port
from serving.cluster.state import read_state
from serving.deployment.feasibility import refuse, ruled_out
from serving.deployment.target import located
from serving.measurement import cpu_dtype
from serving.operations.deploy import Site
from serving.operations.deployed import bring_up
from serving.operations.down import take_down
from serving.operations.progress import progress
from serving.request.token_limit import read_token_limit


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(
        ".minicluster/models/demo"
    ),
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, or auto: what this CPU computes natively.")
    ] = "auto",
) -> None:
    """Make the demo model: a random-weight Llama with its own tokenizer, nothing downloaded."""
    from serving.measurement.demo_model import make_demo_model  # noqa: PLC0415  (wants tokenizers)

    if dtype == "auto":
        pace = cpu_dtype.measure()
        dtype = cpu_dtype.native_dtype(pace)
        talk.print(cpu_dtype.choice_text(pace), highlight=False, soft_wrap=True)
    typer.echo(make_demo_model(directory, dtype=dtype))


def up(  # noqa: PLR0913, PLR0917  (a command's options)
    plan: Annotated[
        Path, typer.Argument(help="Plan written by `sizing plan -o`, or a deployment to measure.")
    ],
    target: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    host: Annotated[str, typer.Option(help="Address the endpoint listens on.")] = "127.0.0.1",
    everybody: Annotated[
        bool, typer.Option("--open", help="Let everybody in who reaches --host: no API keys.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port the endpoint listens on; 0: any.", min=0, max=65535)
    ] = 8000,
    address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster; default: start one here.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Directory of the model here, if not the plan's.")
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for the nodes of --address.", min=0)
    ] = 0,
    prefill_deadline_s: Annotated[
        float | None,
        typer.Option("--prefill-deadline", help="Seconds; default: twice the SLO's TTFT.", min=0.1),
    ] = None,
    kv_deadline_s: Annotated[
        float | None,
        typer.Option("--kv-deadline", help="Seconds from there to the first token.", min=0.1),
    ] = None,
    substitute: Annotated[
        bool,
        typer.Option(
            "--substitute", help="On a CPU: deploy what of the plan fits, and record each change."
        ),
    ] = False,
) -> None:
    """Deploy a plan; returns when requests get through every way that they can take."""
    asked = read_plan_or_deployment(plan)
    given = asked if isinstance(asked, Plan) else None
    if substitute and given is None:
        raise InputError("--substitute", str(plan), "a plan: a deployment is deployed as it is")
    kind = target_of(asked, target, substitute=substitute)
    if given is not None and not substitute:
        refuse([*ruled_out(given, kind)])
    if not everybody:
        refuse_open(host, os.environ)
    site = Site(
        target=kind,
        host=host,
        port=port or free_port(host),
        address=address,
        wait_s=wait_s,
        deadlines_s=(prefill_deadline_s, kv_deadline_s),
        token_limit=read_token_limit(os.environ),
    )
    deployment = located(asked.deployment if isinstance(asked, Plan) else asked, model)
    with progress() as told, terminable():
        endpoint = bring_up(
            deployment,
            site,
            told=told,
            plan=given,
            substitute=substitute,
            before_start=_warn_of_dtype if kind == "cpu" else None,
        )
    ready = endpoint.readiness
    typer.echo(f"ready: {endpoint.base_url}/v1 serves {endpoint.model_id}")
    for change in endpoint.state.changes:
        typer.echo(f"substituted: {change}")
    typer.echo(
        f"checked: first token {ready.ttft_s * 1e3:.0f} ms; KV hand-off "
        f"{ready.handoff_s * 1e3:.0f} ms; transfers that stalled before: {ready.stalls}"
    )
    body = {"model": endpoint.model_id, "prompt": "Hello", "max_tokens": 16, "stream": True}
    typer.echo(f"try:   curl -N {endpoint.base_url}/v1/completions -d '{json.dumps(body)}'")
    typer.echo(f"logs:  serving logs   (all of them: {endpoint.state.logs})")
    typer.echo("stop:  serving down")


def down() -> None:
    """Stop what `serving up` started: no process and no state is left."""
    state = read_state()
    if state is None:
        typer.echo("nothing is deployed from this directory")
        return
    with progress() as told:
        told("stopping")
        take_down(state)
    typer.echo("stopped")


def _warn_of_dtype(deployment: Deployment) -> None:
    """Say on stderr where this CPU is slow in a dtype of *deployment*."""
    pace = cpu_dtype.measure()
    for dtype in sorted({pool.dtype for pool in deployment.pools}):
        warning = cpu_dtype.dtype_warning(dtype, pace)
        if warning is not None:
            talk.print(warning, style="yellow", highlight=False, soft_wrap=True)


def target_of(plan: Plan | Deployment, asked: str, *, substitute: bool) -> str:
    """Return `cpu` or `gpu`; only with *substitute* may a plan for GPUs go to a CPU."""
    gpu = plan.pools[0].gpu
    planned = "cpu" if gpu == "cpu" else "gpu"
    if asked not in {"auto", "cpu", "gpu"}:
        raise InputError("--target", asked, "auto, cpu or gpu")
    if substitute:
        if asked == "gpu":
            raise InputError("--substitute", "--target gpu", "--target cpu: on GPUs plan again")
        return "cpu"
    if asked not in {"auto", planned}:
        smaller = ", or --substitute for what of it fits" if asked == "cpu" else ""
        raise NegativeAnswer(
            f"the plan is for {gpu}, a {planned}; it cannot be deployed on a "
            f"{asked} (plan again for what you have{smaller})"
        )
    return planned
