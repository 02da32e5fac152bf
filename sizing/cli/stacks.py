"""`sizing export` and `read`: plans for other serving stacks, and what runs there as a scenario."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer
from typer import Option

from minicluster.errors import InputError
from minicluster.files import write_atomically
from minicluster.plan import read_plan
from minicluster.shell import say
from sizing.cli.common import PlanFile  # noqa: TC001  (likewise)
from sizing.stacks.export import TARGETS
from sizing.stacks.export import export as exported


def export(
    plan: PlanFile,
    to: Annotated[str, Option(help="Stack: " + ", ".join(TARGETS) + ".")],
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="DIR", help="Folder of the files; else stdout")
    ] = None,
    image: Annotated[
        str | None, Option(help="Container image (dynamo, llm-d; optional for kserve)")
    ] = None,
) -> None:
    """Write a plan for another serving stack: commands of its engines, or its files."""
    files = exported(read_plan(plan), to, image=image)
    if out is None:
        many = len(files) > 1
        for name, text in files.items():
            typer.echo((f"# file: {name}\n" if many else "") + text)
        return
    if out.exists() and not out.is_dir():
        raise InputError("--out", str(out), "a folder")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(out / name, text)
        say(f"wrote {out / name}")
