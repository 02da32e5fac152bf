"""`sizing compare`: scenarios or GPUs in one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from minicluster.errors import Exit, InputError
from minicluster.shell import talk
from minicluster.specs.checks import one_of
from sizing import catalog
from sizing.cli.console import wide_console
from sizing.cli.inputs import naming, read_inputs
from sizing.cli.plan import CALIBRATION, OVERRIDES  # noqa: TC001  (Typer reads the annotations)
from sizing.planner.studies.answer import OBJECTIVES, StudyAnswer, answered, cheapest, data
from sizing.planner.studies.cost import require_price
from sizing.report.study import comparison_lines, comparison_table

if TYPE_CHECKING:
    from minicluster.plan import Inputs


def compare(  # noqa: PLR0913, PLR0917  (a command's options)
    scenarios: Annotated[list[Path], typer.Argument(help="TOML files or shipped scenarios")],
    gpu: Annotated[str, typer.Option(help="in place of each scenario's GPU, by commas")] = "",
    price: Annotated[
        list[str] | None, typer.Option(metavar="GPU=USD", help="your price of one GPU and hour")
    ] = None,
    by: Annotated[str, typer.Option(help="say which is best by gpus, usd or watts")] = "gpus",
    as_json: Annotated[bool, typer.Option("--json", help="print exactly the data")] = False,
    overrides: OVERRIDES = None,
    calibration: CALIBRATION = None,
) -> None:
    """Put scenarios or GPUs in one table: GPUs, nodes, W, $, headroom, confidence, what binds."""
    one_of(OBJECTIVES, **{"--by": by})
    prices = dict(_price(each) for each in price or [])
    if calibration is not None and gpu:
        raise InputError("--calibration", str(calibration), "no --gpu: it timed one machine")
    rows = _rows(scenarios, gpu, prices, overrides or [], calibration)
    if len(rows) < 2:  # noqa: PLR2004  (one is no comparison)
        raise InputError("SCENARIOS", [str(s) for s in scenarios], "two, or several GPUs by --gpu")
    if by == "usd":
        for label, _, inputs in rows:
            require_price(inputs, label)
    answers = []
    for label, scenario, inputs in track(
        rows, "planning", console=talk, disable=not talk.is_terminal, transient=True
    ):
        with naming(scenario):
            answers.append(answered(inputs, label))
    best = cheapest(answers, by)
    if as_json:
        document = {
            "by": by,
            "best": best.label if best else None,
            "answers": [data(answer) for answer in answers],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _print(answers, best, by, rows[0][2].scenario.slo.percentile)
    if best is None:
        raise typer.Exit(Exit.NEGATIVE)


def _print(answers: list[StudyAnswer], best: StudyAnswer | None, by: str, statistic: str) -> None:
    """Show the table, and whose numbers are in it."""
    console = wide_console()
    console.print(comparison_table(answers, statistic))
    for line in comparison_lines(answers):
        console.print(line, highlight=False)
    if best is not None:
        console.print(f"Least {by}: {best.label}", highlight=False)


def _rows(
    scenarios: list[Path],
    gpu: str,
    prices: dict[str, float],
    overrides: list[str],
    calibration: Path | None,
) -> list[tuple[str, Path, Inputs]]:
    """Resolve every scenario with every GPU, before anything is planned."""
    names = [catalog.find_gpu(each.strip(), place="--gpu").name for each in gpu.split(",") if gpu]
    rows = []
    for scenario in scenarios:
        for name in names or [""]:
            chosen = [*overrides, *([f"cluster.gpu={name}"] if name else [])]
            inputs = read_inputs(scenario, chosen, calibration)
            if inputs.gpu.name in prices:
                paid = prices[inputs.gpu.name]
                inputs = read_inputs(
                    scenario, [*chosen, f"cluster.price_usd_per_gpu_hour={paid}"], calibration
                )
            label = " ".join(filter(None, [scenario.stem if len(scenarios) > 1 or not name else "",
                                           name]))  # fmt: skip
            rows.append((label, scenario, inputs))
    return rows


def _price(text: str) -> tuple[str, float]:
    """Read `h100-sxm=2.5`."""
    name, equals, value = text.partition("=")
    try:
        paid = float(value)
    except ValueError:
        paid = 0.0
    if not equals or not paid > 0:
        raise InputError("--price", text, "GPU=USD, for example h100-sxm=2.5")
    return catalog.find_gpu(name.strip(), place="--price").name, paid
