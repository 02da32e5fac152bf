"""`serving manifest`: the deployment as a file for other tools."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer

from minicluster.errors import InputError


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
    from minicluster.plan import read_plan
    from serving.deployment.feasibility import plan_findings, refuse
    from serving.deployment.manifest import FORMATS, manifest_findings, manifest_text

    if kind not in FORMATS:
        raise InputError("--format", kind, "one of " + ", ".join(FORMATS))
    planned = read_plan(plan)
    refuse([*plan_findings(planned), *manifest_findings(planned.deployment)])
    text = manifest_text(planned, plan, kind, image=image, model=model, open_access=open_access)
    typer.echo(text, nl=False)
