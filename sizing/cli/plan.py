"""`sizing plan`, `predict` and `explain`: a scenario's plan, named pools, a plan's terms."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

from typer import Option

from minicluster.errors import InputError, NegativeAnswer
from minicluster.files import write_atomically
from minicluster.pages.write import write_page
from minicluster.plan import read_plan, to_json
from minicluster.shell import talk
from minicluster.specs.slicing import Slicing
from sizing.cli.common import (
    AsJson,
    Calibration,
    Html,
    Overrides,
    PlanFile,
    Scenario,
    Verbose,
    leave_interrupted,
    naming,
    out_file,
    print_json,
    read_inputs,
    show,
)
from sizing.planner.build_plan import build_plan
from sizing.planner.explanation import explain_plan
from sizing.planner.predict import PoolSize, predict_pools
from sizing.planner.search import Infeasible, search
from sizing.report.plan_screen import (
    infeasible_text,
    plan_details,
    plan_screen,
    prediction_details,
    prediction_screen,
)
from sizing.report.tables import explanation_tables

if TYPE_CHECKING:
    from rich.console import RenderableType

    from minicluster.plan import Plan

POOL_SIZE = re.compile(
    r"(?P<replicas>[1-9]\d*)xTP(?P<tp>[1-9]\d*)(?:xPP(?P<pp>[1-9]\d*))?(?:xDP(?P<dp>[1-9]\d*))?"
    r"(?:xEP(?P<ep>[1-9]\d*))?(?:@(?P<gpu>\S+))?",
    re.IGNORECASE,
)


def plan(  # noqa: PLR0913, PLR0917  (a command's options)
    scenario: Scenario,
    out: Annotated[Path | None, out_file("Plan file to write")] = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
    calibration: Calibration = None,
    html: Html = None,
    verbose: Verbose = False,
) -> None:
    """Find the fewest GPUs and their layout that hold the SLO, or say why there are none."""
    inputs = read_inputs(scenario, overrides or [], calibration)
    try:
        with naming(scenario), talk.status("searching layouts"):
            found = search(inputs)
            if isinstance(found, Infeasible):
                if as_json:
                    print_json({"infeasible": asdict(found)})
                raise NegativeAnswer(infeasible_text(found, scenario))
            built = build_plan(inputs, found)
    except KeyboardInterrupt as stopped:
        leave_interrupted(str(stopped) or "nothing found so far")
    if out is not None:
        write_atomically(out, to_json(built))
    if html is not None:
        from sizing.report.plan_page import plan_page  # noqa: PLC0415  (charts take time to import)

        with naming(scenario), talk.status("simulating and drawing"):
            write_page(html, plan_page(built))
    if as_json:
        sys.stdout.write(to_json(built))
    else:
        _print_plan(built, out, verbose=verbose)
    if found.interrupted:
        unverified = "" if found.verdicts else ", estimated, not simulated"
        leave_interrupted(f"the best plan so far{unverified}")


def _print_plan(built: Plan, written: Path | None, *, verbose: bool) -> None:
    parts: list[RenderableType] = [plan_screen(built, written=written, verbose=verbose)]
    if verbose:
        from sizing.network.network_cost import crossing  # noqa: PLC0415  (only these tables need it)
        from sizing.report.fabric import crossing_lines  # noqa: PLC0415  (likewise)

        parts += plan_details(built)
        parts += crossing_lines(crossing(built)) if built.inputs.cluster.tiers else []
    show(None, *parts, as_json=False)


def predict(  # noqa: PLR0913, PLR0917  (a command's options)
    scenario: Scenario,
    prefill: Annotated[
        str | None, Option(metavar="RxTPn", help="Prefill pool: replicas and TP, such as 2xTP4")
    ] = None,
    decode: Annotated[
        str | None, Option(metavar="RxTPn", help="Decode pool: replicas and TP, such as 3xTP2")
    ] = None,
    mixed: Annotated[
        str | None,
        Option(metavar="RxTPn", help="Aggregated pool (prefill and decode), such as 4xTP2"),
    ] = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
    calibration: Calibration = None,
    verbose: Verbose = False,
) -> None:
    """Predict TTFT, TPOT, utilisation and capacity of pools that you name."""
    inputs = read_inputs(scenario, overrides or [], calibration)
    sizes = {
        role: parse_pool_size(text, f"--{role}")
        for role, text in {"prefill": prefill, "decode": decode, "mixed": mixed}.items()
        if text is not None
    }
    with naming(scenario):
        found = predict_pools(inputs, sizes)
    parts: list[RenderableType] = [prediction_screen(found, inputs)]
    if verbose:
        parts += prediction_details(found, inputs.scenario.slo)
    show(asdict(found), *parts, as_json=as_json, sort_keys=True)


def parse_pool_size(text: str, place: str) -> PoolSize:
    """
    Read the replicas, slicing and GPU of a pool, such as `2xTP4xPP2@h200-sxm`.

    Raises:
        InputError: the text is no pool size; *place* is the option that holds it.
    """
    match = POOL_SIZE.fullmatch(text)
    if match is None:
        raise InputError(place, text, "replicas x TP, for example 2xTP4 or 2xTP4xPP2@h200-sxm")
    found = match.groupdict()
    degrees = {name: int(found[name] or 1) for name in ("tp", "pp", "dp", "ep")}
    with naming(place):
        slicing = Slicing(**degrees)
    return PoolSize(replicas=int(found["replicas"]), slicing=slicing, gpu=found["gpu"])


def explain(plan: PlanFile, as_json: AsJson = False) -> None:
    """Show every term of the prediction: equation, seconds, share, source."""
    explained = explain_plan(read_plan(plan))
    tables = explanation_tables(explained)
    show(asdict(explained), *tables, as_json=as_json, sort_keys=True)
