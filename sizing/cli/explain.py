"""`sizing explain`: every term of a plan's prediction."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer
from rich.console import Console

from minicluster.plan import read_plan
from sizing.planner.explanation import explain_plan
from sizing.report.explanation import explanation_tables


def explain(
    plan: Annotated[Path, typer.Argument(help="a file that `sizing plan -o` wrote")],
    as_json: Annotated[bool, typer.Option("--json", help="print the terms")] = False,
) -> None:
    """Show every term of the prediction: equation, seconds, share, source."""
    explained = explain_plan(read_plan(plan))
    if as_json:
        sys.stdout.write(json.dumps(asdict(explained), indent=2, sort_keys=True) + "\n")
        return
    console = Console()
    for table in explanation_tables(explained):
        console.print(table)
