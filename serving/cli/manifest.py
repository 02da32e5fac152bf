"""`serving manifest`: the same deployment for tools that are not ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from serving.compile import compile_app
from serving.compose import compose
from serving.engine import Ground
from serving.kubernetes import PLAN_DIRECTORY, ray_service
from serving.manifest import Manifest, as_yaml, ray_serve
from serving.target import is_directory
from sizing.errors import InputError, NegativeAnswer
from sizing.plan import Plan, read_plan, to_json

FORMATS = {
    "ray-serve": lambda manifest: as_yaml(ray_serve(manifest)),
    "kuberay": ray_service,
    "compose": compose,
}
PLAN_PATHS = {"kuberay": f"{PLAN_DIRECTORY}/plan.json", "compose": f"{PLAN_DIRECTORY}/plan.json"}


def manifest(
    plan: Annotated[Path, typer.Argument(help="Plan written by `sizing plan -o`.")],
    kind: Annotated[str, typer.Option("--format", help="ray-serve, kuberay or compose.")],
    image: Annotated[
        str, typer.Option(help="Container image that holds minicluster (Dockerfile).")
    ] = "minicluster:latest",
    model: Annotated[
        str | None, typer.Option(help="Directory of the model there, if not the plan's.")
    ] = None,
) -> None:
    """Print what `serving up` would start as a file for other tools."""
    if kind not in FORMATS:
        raise InputError("--format", kind, "one of " + ", ".join(FORMATS))
    given = read_plan(plan)
    if not given.deployable.ok:
        raise NegativeAnswer(f"{plan}: not deployable: {given.deployable.rule_broken}")
    path = PLAN_PATHS.get(kind, str(plan.absolute()))
    typer.echo(FORMATS[kind](manifest_of(_with_model(given, model), path, image)), nl=False)


def manifest_of(plan: Plan, plan_path: str, image: str) -> Manifest:
    """Compile *plan* for hosts of its own."""
    target = plan.inputs.gpu.kind
    return Manifest(
        served=compile_app(plan.deployment, Ground(target=target, one_host=False), plan=plan),
        target=target,
        plan=to_json(plan),
        plan_path=plan_path,
        model_source=plan.model.source,
        image=image,
    )


def _with_model(plan: Plan, model: str | None) -> Plan:
    """Return the plan with its model where the containers will find it."""
    source = model or plan.model.source
    if is_directory(source) and not source.startswith("/"):
        source = str(Path(source).absolute())
    return replace(plan, model=replace(plan.model, source=source))
