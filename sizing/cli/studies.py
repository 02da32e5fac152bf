"""`sizing compare`, `sweep`, `pareto` and `long-context`: what-if studies."""

from __future__ import annotations

import re
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from minicluster.errors import Exit, InputError, NegativeAnswer
from minicluster.shell import talk
from minicluster.specs.checks import one_of
from sizing.cli.common import (
    AsJson,
    Calibration,
    Jobs,
    Overrides,
    naming,
    show,
    tracked,
)
from sizing.cli.study import StudyOptions, study

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Inputs
    from minicluster.specs.slicing import Slicing
    from sizing.planner.configuration import Configuration
    from sizing.planner.studies.pareto import DesignPoint, Front
    from sizing.planner.studies.result import StudyResult

SLICING = re.compile(r"TP([1-9]\d{0,5})(?:xPP([1-9]\d{0,5}))?", re.IGNORECASE)
LENGTHS = "32768,65536,100000,131072"
LAYOUTS = "TP8,TP16,TP4xPP3,TP8xPP2,TP8xPP4,TP8xPP8"
LONG_SCENARIO = Path("llama-2-70b-long")


# --- compare


def compare(  # noqa: PLR0913, PLR0917  (a command's options)
    scenarios: Annotated[
        list[Path], Argument(help="Scenario files (TOML), or names of shipped scenarios")
    ],
    gpu: Annotated[
        str, Option(help="GPUs in place of each scenario's own, separated by commas")
    ] = "",
    engine: Annotated[
        str, Option(help="Engines in place of each scenario's own, separated by commas")
    ] = "",
    price: Annotated[
        list[str] | None,
        Option(metavar="GPU=USD", help="Your price of one GPU per hour; repeatable"),
    ] = None,
    by: Annotated[str, Option(help="Objective that names the best: gpus, usd or watts")] = ("gpus"),
    as_json: AsJson = False,
    overrides: Overrides = None,
    calibration: Calibration = None,
    jobs: Jobs = None,
) -> None:
    """Compare the plans of scenarios, GPUs or engines: GPUs, power, cost, latency, headroom."""
    from sizing.planner.studies.cost import require_price
    from sizing.planner.studies.result import OBJECTIVES, answer_line, cheapest, result_json
    from sizing.planner.workers import Workers
    from sizing.report.study import comparison_sections

    one_of(OBJECTIVES, **{"--by": by})
    prices = dict(_price(each) for each in price or [])
    if calibration is not None and (gpu or engine):
        expected = "no --gpu and no --engine: it timed one engine on one machine"
        raise InputError("--calibration", str(calibration), expected)
    changes = {"cluster.gpu": _names(gpu), "engine.name": _names(engine)}
    rows = _rows(scenarios, changes, prices, overrides or [], calibration)
    if len(rows) < 2:  # noqa: PLR2004  (one is no comparison)
        expected = "two, or several GPUs by --gpu, or engines by --engine"
        raise InputError("SCENARIOS", [str(s) for s in scenarios], expected)
    if by == "usd":
        for label, _, inputs in rows:
            require_price(inputs, label)
    with Workers.instead(jobs) as workers:
        planned = workers.map(_compared, rows)
        results = list(tracked(planned, "planning", total=len(rows)))
    best = cheapest(results, by)
    data = {
        "by": by,
        "best": best.label if best else None,
        "answers": [result_json(result) for result in results],
    }
    headline = "None has a plan" if best is None else answer_line(results, by)
    compared = comparison_sections(results, rows[0][2].scenario.slo.percentile, headline)
    show(data, *compared, as_json=as_json)
    if best is None:
        raise typer.Exit(Exit.NEGATIVE)


def _compared(row: tuple[str, Path, Inputs]) -> StudyResult:
    from sizing.planner.studies.result import plan_scenario

    label, scenario, inputs = row
    with naming(scenario):
        return plan_scenario(inputs, label)


def _rows(
    scenarios: list[Path],
    changes: dict[str, list[str]],
    prices: dict[str, float],
    overrides: list[str],
    calibration: Path | None,
) -> list[tuple[str, Path, Inputs]]:
    """Read every scenario with every GPU and engine: errors come before any planning."""
    from sizing import catalog
    from sizing.scenario import Scenario

    gpus = [catalog.find_gpu(name, place="--gpu").name for name in changes["cluster.gpu"]]
    engines = changes["engine.name"]
    rows: list[tuple[str, Path, Inputs]] = []
    for scenario, gpu, engine in product(scenarios, gpus or [""], engines or [""]):
        chosen = [
            *overrides,
            *([f"cluster.gpu={gpu}"] if gpu else []),
            *([f"engine.name={engine}"] if engine else []),
        ]
        inputs = Scenario.load(scenario, chosen, calibration)
        if inputs.gpu.name in prices:
            paid = prices[inputs.gpu.name]
            inputs = Scenario.load(
                scenario, [*chosen, f"cluster.price_usd_per_gpu_hour={paid}"], calibration
            )
        alone = len(scenarios) == 1 and (gpu or engine)
        name = "" if alone else scenario.name.removesuffix(".toml")
        version = f"{inputs.engine.name} {inputs.engine.version}" if engine else ""
        rows.append((" ".join(filter(None, [name, gpu, version])), scenario, inputs))
    return rows


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _price(text: str) -> tuple[str, float]:
    from sizing import catalog

    name, equals, value = text.partition("=")
    try:
        paid = float(value)
    except ValueError:
        paid = 0.0
    if not equals or not paid > 0:
        raise InputError("--price", text, "GPU=USD, for example h100-sxm=2.5")
    return catalog.find_gpu(name.strip(), place="--price").name, paid


# --- sweep


@study
def sweep(
    asked: StudyOptions,
    key: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=V,V",
            help="Scenario key and its values, such as workload.requests_per_s=1,2,5; repeatable",
        ),
    ] = None,
) -> None:
    """Plan every combination of values of some scenario keys; infeasible ones say why."""
    from sizing.planner.studies.result import result_json
    from sizing.planner.studies.sweep import parse_key, points
    from sizing.planner.workers import Workers
    from sizing.report.study import sweep_sections

    keys = [parse_key(each) for each in key or []]
    combinations = points(keys)
    cases = _read_points(asked, combinations)
    results: list[StudyResult] = []
    try:
        labels = map(" ".join, combinations)
        with Workers.instead(asked.jobs) as workers:
            points_of = workers.map(_planned, list(zip(cases, labels, strict=True)))
            for result in tracked(points_of, "planning", total=len(combinations)):
                results.append(result)
                if result.interrupted:
                    break
    except KeyboardInterrupt:
        if not results:
            raise
    stopped = len(results) < len(combinations) or results[-1].interrupted
    combinations = combinations[: len(results)]
    data = [
        {"values": dict(each.split("=", 1) for each in combination), **result_json(result)}
        for combination, result in zip(combinations, results, strict=True)
    ]
    asked.answer("sweep", data, sweep_sections(keys, combinations, results))
    found = any(result.plans for result in results)
    asked.leave(found=found, stopped=stopped, so_far="the points so far")


def _read_points(
    asked: StudyOptions, combinations: Sequence[tuple[str, ...]]
) -> list[Inputs | InputError]:
    """Read the scenario at every point; an error in all of them is one of the scenario."""
    from minicluster.plan import Inputs

    asked.load()
    cases: list[Inputs | InputError] = []
    for combination in combinations:
        try:
            cases.append(asked.load(combination))
        except InputError as error:
            cases.append(error)
    if isinstance(cases[-1], InputError) and not any(isinstance(case, Inputs) for case in cases):
        raise cases[-1]
    return cases


def _planned(point: tuple[Inputs | InputError, str]) -> StudyResult:
    """Plan one point; one that cannot be planned is a result too."""
    from sizing.planner.studies.result import StudyResult, plan_scenario

    case, label = point
    if isinstance(case, InputError):
        return StudyResult(label=label, refused=str(case))
    return plan_scenario(case, label, keep_refusals=True)


# --- pareto


@study
def pareto(
    asked: StudyOptions,
    by: Annotated[
        str, Option(help="Cost: gpus, usd (per million output tokens) or watts")
    ] = "gpus",
) -> None:
    """Show the Pareto fronts: cost against TTFT and TPOT, tokens/s per GPU against per user."""
    from sizing.planner.studies.cost import require_price
    from sizing.planner.studies.pareto import fronts, iter_design_points, sort_design_points
    from sizing.planner.studies.result import OBJECTIVES
    from sizing.report.study import pareto_sections

    one_of(OBJECTIVES, **{"--by": by})
    inputs, name = asked.load(), str(asked.scenario)
    if by == "usd":
        require_price(inputs, name)
    found: list[DesignPoint] = []
    stopped = False
    with naming(name), talk.status("forecasting configurations"):
        try:
            planned, own = _with_plan(inputs)
            found.extend(iter_design_points(planned, own))
        except KeyboardInterrupt:
            if not found:
                raise
            stopped = True
        if not found:
            raise NegativeAnswer(f"{name}: no configuration carries the load")
        points = sort_design_points(found)
        drawn = fronts(points, by=by)
    asked.answer("pareto", _pareto_json(points, drawn), pareto_sections(points, drawn))
    asked.leave(found=True, stopped=stopped, so_far="the configurations so far")


def _with_plan(inputs: Inputs) -> tuple[Inputs, Configuration | None]:
    """Return a scenario at the rate that is planned for, and its plan; of users there has to be."""
    from sizing.planner.configuration import Configuration, with_load
    from sizing.planner.plan import NoPlan, plan

    try:
        found = plan(inputs)
    except NoPlan:
        if inputs.scenario.workload.has_users:
            raise
        return inputs, None
    load = found.workload.at_rate(found.workload.requests_per_s)
    return with_load(inputs, load), Configuration.of_plan(found)


def _pareto_json(found: Sequence[DesignPoint], drawn: Sequence[Front]) -> list[dict[str, Any]]:
    """Return every configuration with the fronts that it is on."""
    kept = (
        *("label", "gpus", "ttft_s", "tpot_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user"),
        *("power_w", "price_usd_per_hour", "deployable", "meets_slo"),
    )
    return [
        {
            **{name: getattr(point, name) for name in kept},
            "max_batch_size": point.configuration.batch_limit,
            "on_fronts": [front.name for front in drawn if front.kept[at]],
        }
        for at, point in enumerate(found)
    ]


# --- long-context


def long_context(
    scenario: Annotated[
        Path,
        Argument(
            help="Scenario file (TOML), or a shipped scenario; its rate and lengths are not used"
        ),
    ] = LONG_SCENARIO,
    tokens: Annotated[str, Option(help="Prompt lengths in tokens, separated by commas")] = LENGTHS,
    slicing: Annotated[
        str, Option(help="Layouts such as TP8 or TP8xPP2, separated by commas")
    ] = LAYOUTS,
    preset: Annotated[str, Option(help="Rule of thumb to compare with")] = "talk",
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Count the GPUs that hold the TTFT of one long prompt, by compute and by the whole model."""
    from sizing.planner.studies.long_context import find_rule, long_prompt
    from sizing.report.long_context import long_context_sections
    from sizing.scenario import Scenario

    inputs = Scenario.load(scenario, overrides or [], None)
    rule = find_rule(preset)
    slicings = [parse_slicing(each) for each in slicing.split(",")]
    for each in tokens.split(","):
        if not each.strip().isdecimal():
            raise InputError("--tokens", each, "whole numbers, for example 32768,65536")
    lengths = [int(each) for each in tokens.split(",")]
    with naming(scenario):
        found = [long_prompt(inputs, each, slicings, rule) for each in lengths]
    data = {
        "model": inputs.model.id,
        "gpu": inputs.gpu.name,
        "slo_ttft_s": inputs.scenario.slo.ttft_s,
        "assumed_context_tokens": inputs.scenario.model.assumed_context_tokens,
        "preset": asdict(rule),
        "prompts": [asdict(each) for each in found],
    }
    show(data, *long_context_sections(inputs, found, rule), as_json=as_json)


def parse_slicing(text: str) -> Slicing:
    """
    Read a layout, such as `TP8` or `TP8xPP2`.

    Raises:
        InputError: the text is no layout.
    """
    from minicluster.specs.slicing import Slicing

    match = SLICING.fullmatch(text.strip())
    if match is None:
        raise InputError("--slicing", text, "a layout, for example TP8 or TP8xPP2")
    return Slicing(tp=int(match[1]), pp=int(match[2] or 1))
