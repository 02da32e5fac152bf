"""`sizing compare`, `sweep`, `pareto` and `long-context`: what-if studies."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from minicluster.errors import Exit, Fault, InputError, NegativeAnswer
from minicluster.shell import talk
from minicluster.specs.checks import one_of
from sizing.cli.common import (
    AsJson,
    Calibration,
    Html,
    Jobs,
    Overrides,
    naming,
    show,
    tracked,
)
from sizing.cli.study import StudyOptions, study

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.plan import Inputs
    from minicluster.specs.slicing import Slicing
    from sizing.planner.configuration import Configuration
    from sizing.planner.studies.grid import GridCase, Swept
    from sizing.planner.studies.pareto import DesignPoint, Front
    from sizing.planner.studies.result import StudyResult
    from sizing.planner.workers import Workers

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
        list[str] | None,
        Option(help="GPUs in place of each scenario's own, by commas; repeatable"),
    ] = None,
    engine: Annotated[
        list[str] | None,
        Option(help="Engines in place of each scenario's own, by commas; repeatable"),
    ] = None,
    price: Annotated[
        list[str] | None,
        Option(metavar="GPU=USD", help="Your price of one GPU per hour; repeatable"),
    ] = None,
    by: Annotated[str, Option(help="Objective that names the best: gpus, usd or watts")] = ("gpus"),
    as_json: AsJson = False,
    overrides: Overrides = None,
    calibration: Calibration = None,
    html: Html = None,
    jobs: Jobs = None,
) -> None:
    """Compare plans of scenarios, GPUs or engines: GPUs, power, cost, latency, headroom."""
    from minicluster.plan import Inputs
    from sizing.planner.studies.cost import require_price
    from sizing.planner.studies.result import (
        OBJECTIVES,
        answer_line,
        cheapest,
        plan_cases,
        result_json,
    )
    from sizing.planner.workers import Workers
    from sizing.report.study import comparison_sections

    one_of(OBJECTIVES, **{"--by": by})
    prices = dict(_price(price_of_gpu) for price_of_gpu in price or [])
    if calibration is not None and (gpu or engine):
        expected = "no --gpu and no --engine: it timed one engine on one machine"
        raise InputError("--calibration", str(calibration), expected)
    keys = _compared_keys(",".join(gpu or []), ",".join(engine or []))
    cases = [
        case
        for scenario in scenarios
        for case in _read_compared(
            scenario, keys, prices, overrides or [], calibration, named=not keys or scenarios[1:]
        )
    ]
    if len(cases) < 2:  # noqa: PLR2004  (one is no comparison)
        expected = "two scenarios, or several GPUs by --gpu, or engines by --engine"
        raise InputError("what is compared", Fault("is one plan"), expected)
    known = [(case.label, case.scenario) for case in cases if isinstance(case.scenario, Inputs)]
    if by == "usd":
        for label, inputs in known:
            require_price(inputs, label)
    with Workers.instead(jobs) as workers:
        results = list(tracked(plan_cases(cases, workers), "planning", total=len(cases)))
    best = cheapest(results, by)
    data = {
        "by": by,
        "best": best.label if best else None,
        "answers": [result_json(result) for result in results],
    }
    headline = "None has a plan" if best is None else answer_line(results, by)
    compared = [*comparison_sections(results, known[0][1].scenario.slo.percentile, headline)]
    if html is not None:
        from minicluster.pages.write import write_page
        from sizing.report.tables import answer_page

        write_page(html, answer_page(compared, title="Compared", footer="sizing compare"))
    show(data, *compared, as_json=as_json)
    if best is None:
        raise typer.Exit(Exit.NEGATIVE)


def _compared_keys(gpus: str, engines: str) -> list[Swept]:
    """Return the axes of a comparison, each name of a GPU as the catalog has it."""
    from sizing import catalog
    from sizing.planner.studies.grid import Swept

    known = [catalog.find_gpu(name, place="--gpu").name for name in _names(gpus)]
    axes = {"cluster.gpu": known, "engine.name": _names(engines)}
    return [Swept(key=key, values=tuple(values)) for key, values in axes.items() if values]


def _read_compared(
    scenario: Path,
    keys: Sequence[Swept],
    prices: dict[str, float],
    overrides: list[str],
    calibration: Path | None,
    *,
    named: object,
) -> Iterator[GridCase]:
    """Yield the cases of one scenario, called by what differs: its name, GPU, engine's version."""
    from minicluster.plan import Inputs
    from sizing.planner.studies.grid import read_cases
    from sizing.scenario import Scenario

    def load(more: tuple[str, ...]) -> Inputs:
        inputs = Scenario.load(scenario, [*overrides, *more], calibration)
        if inputs.gpu.name in prices:
            paid = f"cluster.price_usd_per_gpu_hour={prices[inputs.gpu.name]}"
            inputs = Scenario.load(scenario, [*overrides, *more, paid], calibration)
        return inputs

    name = scenario.name.removesuffix(".toml") if named else ""
    for case in read_cases(keys, load):
        words = [name, *case.values]
        if keys and keys[-1].key == "engine.name" and isinstance(case.scenario, Inputs):
            words.append(case.scenario.engine.version)
        yield replace(case, label=" ".join(filter(None, words)))


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
    from sizing.planner.studies.grid import parse_key, read_cases
    from sizing.planner.studies.result import plan_cases, result_json
    from sizing.planner.workers import Workers
    from sizing.report.study import sweep_sections

    keys = [parse_key(text) for text in key or []]
    if not keys:
        raise InputError("--key", None, "at least one, for example workload.requests_per_s=1,2,5")
    cases = read_cases(keys, asked.load)
    results: list[StudyResult] = []
    try:
        with Workers.instead(asked.jobs) as workers:
            for result in tracked(plan_cases(cases, workers), "planning", total=len(cases)):
                results.append(result)
                if result.interrupted:
                    break
    except KeyboardInterrupt:
        if not results:
            raise
    stopped = len(results) < len(cases) or results[-1].interrupted
    names = [swept.key for swept in keys]
    data = [
        {"values": dict(zip(names, case.values, strict=True)), **result_json(result)}
        for case, result in zip(cases, results, strict=False)
    ]
    asked.answer("sweep", data, sweep_sections(keys, cases[: len(results)], results))
    found = any(result.plans for result in results)
    asked.leave(found=found, stopped=stopped, so_far="the points so far")


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
    from sizing.planner.workers import Workers
    from sizing.report.study import pareto_sections

    one_of(OBJECTIVES, **{"--by": by})
    inputs, name = asked.load(), str(asked.scenario)
    if by == "usd":
        require_price(inputs, name)
    found: list[DesignPoint] = []
    stopped = False
    with (
        naming(name),
        talk.status("forecasting configurations"),
        Workers.instead(asked.jobs) as workers,
    ):
        try:
            planned, own = _with_plan(inputs, workers)
            found.extend(iter_design_points(planned, own, workers))
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


def _with_plan(inputs: Inputs, workers: Workers) -> tuple[Inputs, Configuration | None]:
    """Return a scenario at the rate that is planned for, and its plan; of users there has to be."""
    from sizing.planner.configuration import Configuration, with_load
    from sizing.planner.plan import NoPlan, plan

    try:
        found = plan(inputs, workers=workers)
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
