"""`sizing predict`: latencies of one given configuration, no search."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import Annotated

import typer
from rich.console import Console

from minicluster.errors import InputError
from minicluster.specs.slicing import Slicing
from minicluster.units import seconds
from sizing.cli.inputs import naming, read_inputs
from sizing.cli.plan import CALIBRATION, OVERRIDES  # noqa: TC001  (Typer reads the annotations)
from sizing.planner.given import Size, given
from sizing.report.tables import latency_table, layout_table, parts_table

SIZE = re.compile(
    r"(?P<replicas>[1-9]\d*)xTP(?P<tp>[1-9]\d*)(?:xPP(?P<pp>[1-9]\d*))?(?:xDP(?P<dp>[1-9]\d*))?"
    r"(?:xEP(?P<ep>[1-9]\d*))?(?:@(?P<gpu>\S+))?",
    re.IGNORECASE,
)


def predict(  # noqa: PLR0913, PLR0917  (a command's options)
    scenario: Annotated[Path, typer.Argument(help="TOML; `sizing init` writes one")],
    prefill: Annotated[
        str | None, typer.Option(metavar="RxTPn", help="replicas and TP: 2xTP4")
    ] = None,
    decode: Annotated[
        str | None, typer.Option(metavar="RxTPn", help="replicas and TP: 3xTP2")
    ] = None,
    mixed: Annotated[
        str | None, typer.Option(metavar="RxTPn", help="one pool that does both: 4xTP2")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the prediction")] = False,
    overrides: OVERRIDES = None,
    calibration: CALIBRATION = None,
) -> None:
    """Predict TTFT, TPOT, utilisation and capacity of pools that you name."""
    inputs = read_inputs(scenario, overrides or [], calibration)
    sizes = {
        role: parse_size(text, f"--{role}")
        for role, text in {"prefill": prefill, "decode": decode, "mixed": mixed}.items()
        if text is not None
    }
    with naming(scenario):
        answer = given(inputs, **sizes)
    if as_json:
        sys.stdout.write(json.dumps(asdict(answer), indent=2, sort_keys=True) + "\n")
        return
    console = Console()
    console.print(layout_table(answer.pools, answer.prediction))
    console.print(latency_table(answer.prediction, inputs.scenario.slo))
    console.print(parts_table(answer.prediction))
    console.print(f"Saturates at {answer.prediction.capacity_requests_per_s:.3g} requests/s")
    behind = answer.validated_on
    console.print(f"{behind.num_rows} measured rows behind it: {behind.note}", highlight=False)
    for role, extra_s in answer.beyond_hb_domain_s.items():
        console.print(
            f"TP beyond the HB domain costs {seconds(extra_s)} a step in {role}", highlight=False
        )
    for miss in answer.misses:
        console.print(f"SLO missed: {miss}", style="red", highlight=False)


def parse_size(text: str, place: str) -> Size:
    """Read replicas, slicing and GPU."""
    match = SIZE.fullmatch(text)
    if match is None:
        raise InputError(place, text, "replicas x TP, for example 2xTP4 or 2xTP4xPP2@h200-sxm")
    found = match.groupdict()
    degrees = {name: int(found[name] or 1) for name in ("tp", "pp", "dp", "ep")}
    return Size(replicas=int(found["replicas"]), slicing=Slicing(**degrees), gpu=found["gpu"])
