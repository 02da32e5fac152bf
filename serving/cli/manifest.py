"""`serving manifest`: the deployment as a file for other tools."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Plan, read_plan, to_json
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.deployment.manifest import (
    PLAN_DIRECTORY,
    Manifest,
    as_yaml,
    compose,
    ray_serve,
    ray_service,
)
from serving.deployment.target import is_directory, located

FORMATS = {
    "ray-serve": lambda manifest: as_yaml(ray_serve(manifest)),
    "kuberay": ray_service,
    "compose": compose,
}


def manifest(
    plan: Annotated[Path, typer.Argument(help="Plan (from `sizing plan -o`).")],
    kind: Annotated[str, typer.Option("--format", help="Format: ray-serve, kuberay or compose.")],
    image: Annotated[
        str, typer.Option(help="Container image that holds minicluster (Dockerfile).")
    ] = "minicluster:latest",
    model: Annotated[
        str | None, typer.Option(help="Directory of the model on the hosts (default: the plan's).")
    ] = None,
    open_access: Annotated[
        bool,
        typer.Option("--open", help="Endpoint without API keys, for every client that reaches it."),
    ] = False,
) -> None:
    """Print the deployment as a file for other tools."""
    if kind not in FORMATS:
        raise InputError("--format", kind, "one of " + ", ".join(FORMATS))
    planned = read_plan(plan)
    if not planned.deployable.ok:
        raise NegativeAnswer(f"{plan}: not deployable: {planned.deployable.rule_broken}")
    found = manifest_of(planned, plan, kind, image=image, model=model, open_access=open_access)
    typer.echo(FORMATS[kind](found), nl=False)


def manifest_of(
    plan: Plan,
    file: Path,
    kind: str,
    *,
    image: str,
    model: str | None,
    open_access: bool = False,
) -> Manifest:
    """Compile *plan* of *file* for its own hosts, which have the model at *model*."""
    target, source = plan.inputs.gpu.kind, plan.model.source
    deployment = located(plan.deployment, model)
    return Manifest(
        served=compile_app(deployment, DeployTarget(kind=target, one_host=False), plan=plan),
        target=target,
        plan=to_json(plan),
        plan_path=str(file.absolute()) if kind == "ray-serve" else f"{PLAN_DIRECTORY}/plan.json",
        model_source=deployment.model.source,
        plan_file=str(file),
        model_here=source if is_directory(source) else deployment.model.source,
        image=image,
        open_access=open_access,
    )
