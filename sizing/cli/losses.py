"""`sizing losses`: does the SLO hold with one replica lost?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer
from rich.progress import track

from minicluster.errors import Exit, InputError
from minicluster.plan import read_plan
from minicluster.shell import talk
from minicluster.specs.checks import not_negative, positive
from sizing.cli.console import wide_console
from sizing.cli.simulate import MOST
from sizing.planner.studies.loss import losses as lost
from sizing.report.study import losses_note, losses_table


def losses(
    plan: Annotated[Path, typer.Argument(help="a file that `sizing plan -o` wrote")],
    requests: Annotated[int, typer.Option(help="of each simulation")] = 20_000,
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and routing")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print exactly the data")] = False,
) -> None:
    """Simulate the plan whole, and with one replica less in each pool (N+1)."""
    planned = read_plan(plan)
    positive(**{"--requests": requests})
    not_negative(**{"--seed": seed})
    if requests > MOST:
        raise InputError("--requests", requests, f"at most {MOST:,}")
    found = list(
        track(
            lost(planned, requests=requests, seed=seed),
            "simulating",
            total=1 + len(planned.pools),
            console=talk,
            disable=not talk.is_terminal,
            transient=True,
        )
    )
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    else:
        console = wide_console()
        console.print(losses_table(found, planned.slo.percentile))
        if planned.confidence is not None:
            console.print(losses_note(planned.confidence), highlight=False)
    if not all(each.holds for each in found):
        raise typer.Exit(Exit.NEGATIVE)
