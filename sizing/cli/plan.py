"""`sizing plan`: the fewest GPUs that hold the SLO."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from minicluster.errors import Exit, NegativeAnswer
from minicluster.files import write_atomically
from minicluster.pages.write import write_page
from minicluster.plan import Plan, to_json
from minicluster.shell import talk
from sizing.cli.inputs import naming, read_inputs
from sizing.network.network_cost import crossing
from sizing.planner.proposal import propose
from sizing.planner.search import Infeasible, search
from sizing.report.confidence import confidence_lines
from sizing.report.placement import crossing_lines
from sizing.report.tables import latency_table, layout_table, summary

OVERRIDES = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a scenario key")
]
CALIBRATION = Annotated[
    Path | None, typer.Option(help="step times of this machine, from `sizing calibrate`")
]

HTML = Annotated[
    Path | None, typer.Option(help="HTML page to write; plotly.min.js is written beside it")
]


def plan(  # noqa: PLR0913, PLR0917  (a command's options)
    scenario: Annotated[Path, typer.Argument(help="TOML; `sizing init` writes one")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="plan file to write")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan")] = False,
    overrides: OVERRIDES = None,
    calibration: CALIBRATION = None,
    html: HTML = None,
    layouts: Annotated[
        str | None, typer.Option(help="any: also what serving cannot deploy (search.layouts)")
    ] = None,
) -> None:
    """Find the fewest GPUs and their layout for the SLO; say what binds, or why there are none."""
    keys = [*(overrides or []), *([] if layouts is None else [f"search.layouts={layouts}"])]
    inputs = read_inputs(scenario, keys, calibration)
    try:
        with naming(scenario), talk.status("searching layouts"):
            found = search(inputs)
            if not isinstance(found, Infeasible):
                proposed = propose(inputs, found)
    except KeyboardInterrupt as stopped:
        _say_interrupted(str(stopped) or "nothing found so far")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if isinstance(found, Infeasible):
        if as_json:
            sys.stdout.write(json.dumps({"infeasible": asdict(found)}, indent=2) + "\n")
        nearest = f"nearest: {found.nearest} ({found.nearest_gpus} GPUs); " if found.nearest else ""
        raise NegativeAnswer(
            f"{scenario}: {found.reason}; {nearest}missed by: {found.missed_by};"
            f" way out: {found.way_out}"
        )
    if out is not None:
        write_atomically(out, to_json(proposed))
    if html is not None:
        from sizing.report.plan_page import plan_page  # noqa: PLC0415  (it simulates)

        with naming(scenario), talk.status("simulating and drawing"):
            write_page(html, plan_page(proposed))
    _show(proposed, as_json=as_json)
    if found.interrupted:
        _say_interrupted(
            "the best plan so far" + ("" if found.verdicts else ", by closed forms, not simulated")
        )
        raise typer.Exit(Exit.INTERRUPTED)


def _say_interrupted(what: str) -> None:
    """Say on stderr what an interrupt leaves."""
    talk.print(f"interrupted: {what}", style="red", highlight=False, soft_wrap=True)


def _show(proposed: Plan, *, as_json: bool) -> None:
    """Print a plan as data, or on one screen."""
    if as_json:
        sys.stdout.write(to_json(proposed))
        return
    console = Console()
    console.print(summary(proposed))
    for line in confidence_lines(proposed):
        console.print(line, highlight=False)
    console.print(layout_table(proposed.pools, proposed.prediction))
    console.print(latency_table(proposed.prediction, proposed.slo))
    if proposed.inputs.cluster.tiers:
        for line in crossing_lines(crossing(proposed)):
            console.print(line, highlight=False)
