"""`sizing pareto`: what no other configuration beats."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minicluster.errors import Exit, NegativeAnswer
from minicluster.pages.write import write_page
from minicluster.shell import talk
from minicluster.specs.checks import one_of
from sizing.cli.console import wide_console
from sizing.cli.inputs import naming, read_inputs
from sizing.cli.plan import CALIBRATION, HTML, OVERRIDES  # noqa: TC001  (Typer reads them)
from sizing.planner.evaluated import evaluations, in_order
from sizing.planner.studies.answer import OBJECTIVES
from sizing.planner.studies.cost import require_price
from sizing.planner.studies.pareto import fronts
from sizing.report.study import front_table
from sizing.report.study_pages import pareto_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Inputs
    from sizing.planner.evaluated import Evaluated
    from sizing.planner.studies.pareto import Front


def pareto(
    scenario: Annotated[Path, typer.Argument(help="TOML, or a shipped scenario")],
    by: Annotated[str, typer.Option(help="cost: gpus, usd (per million tokens) or watts")] = "gpus",
    as_json: Annotated[bool, typer.Option("--json", help="print every configuration")] = False,
    overrides: OVERRIDES = None,
    calibration: CALIBRATION = None,
    html: HTML = None,
) -> None:
    """Show the configurations that no other beats: cost against TTFT and TPOT, pace against it."""
    one_of(OBJECTIVES, **{"--by": by})
    inputs = read_inputs(scenario, overrides or [], calibration)
    if by == "usd":
        require_price(inputs, str(scenario))
    with naming(scenario), talk.status("forecasting configurations"):
        points, stopped = _points(inputs)
        if not points:
            raise NegativeAnswer(f"{scenario}: no configuration carries the load")
        found = fronts(points, by=by)
    if html is not None:
        write_page(html, pareto_page(str(scenario), points, found))
    if as_json:
        sys.stdout.write(json.dumps(_document(points, found), indent=2) + "\n")
    else:
        console = wide_console()
        for front in found:
            console.print(front_table(front, points))
    if stopped:
        talk.print("interrupted: the configurations so far", style="red")
        raise typer.Exit(Exit.INTERRUPTED)


def _points(inputs: Inputs) -> tuple[tuple[Evaluated, ...], bool]:
    """Return all configurations, or those that an interrupt leaves; and whether there was one."""
    points: list[Evaluated] = []
    try:
        points.extend(evaluations(inputs))
    except KeyboardInterrupt:
        if not points:
            raise
        return in_order(points), True
    return in_order(points), False


def _document(points: Sequence[Evaluated], found: Sequence[Front]) -> list[dict[str, Any]]:
    """Return every configuration, and on which fronts it is."""
    kept = ("label", "gpus", "ttft_s", "tpot_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user",
            "power_w", "price_usd_per_hour", "deployable", "meets_slo")  # fmt: skip
    return [
        {
            **{name: getattr(point, name) for name in kept},
            "max_batch_size": point.candidate.tandem.decode.max_batch_size,
            "on_fronts": [front.name for front in found if front.kept[at]],
        }
        for at, point in enumerate(points)
    ]
