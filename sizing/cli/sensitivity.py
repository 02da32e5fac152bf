"""`sizing sensitivity`: the plan where a given number is a little different."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer
from rich.progress import track

from minicluster.errors import NegativeAnswer
from minicluster.shell import talk
from sizing.cli.console import wide_console
from sizing.cli.inputs import naming, read_inputs
from sizing.cli.plan import CALIBRATION, OVERRIDES  # noqa: TC001  (Typer reads the annotations)
from sizing.planner.studies.answer import answered, data
from sizing.planner.studies.sensitivity import CHANGES, VARIED
from sizing.planner.studies.sensitivity import sensitivity as changed
from sizing.report.study import sensitivity_table


def sensitivity(
    scenario: Annotated[Path, typer.Argument(help="TOML, or a shipped scenario")],
    as_json: Annotated[bool, typer.Option("--json", help="print exactly the data")] = False,
    overrides: OVERRIDES = None,
    calibration: CALIBRATION = None,
) -> None:
    """Plan anew with lengths, rate, hit rate and link bandwidth 10, 25 and 50 % off."""
    inputs = read_inputs(scenario, overrides or [], calibration)
    with naming(scenario):
        base = answered(inputs, "as given")
        if base.plan is None:
            raise NegativeAnswer(f"{scenario}: no plan to vary: {base.reason}")
        found = list(
            track(
                changed(inputs),
                "planning",
                total=len(VARIED) * len(CHANGES),
                console=talk,
                disable=not talk.is_terminal,
                transient=True,
            )
        )
    if as_json:
        document = {
            "base": data(base),
            "changes": [
                {"name": each.name, "change_fraction": each.change_fraction, "value": each.value,
                 **data(each.answer)}
                for each in found
            ],
        }  # fmt: skip
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    wide_console().print(sensitivity_table(base, found))
