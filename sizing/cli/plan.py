"""`sizing plan`, `predict` and `explain`: a scenario's plan, named pools, a plan's terms."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from minicluster.errors import Exit as ExitCode
from minicluster.errors import NegativeAnswer
from minicluster.files import write_atomically
from minicluster.shell import say, talk
from sizing.cli.common import (
    AsJson,
    Calibration,
    Overrides,
    PlanFile,
    ScenarioFile,
    Verbose,
    leave_interrupted,
    naming,
    out_file,
    print_json,
    show,
)
from sizing.cli.study import StudyOptions, study

if TYPE_CHECKING:
    from minicluster.pages.page import ChartRow, Section
    from minicluster.plan import Plan
    from sizing.planner.plan import ClassPlans


REPLAN_FACTOR = 1.2
"""What a rate is raised by in the advice after a trace that missed the SLO on its plan."""


@study
def plan(
    asked: StudyOptions,
    out: Annotated[Path | None, out_file("Plan file to write")] = None,
    verbose: Verbose = False,
) -> None:
    """
    Find the fewest GPUs and their layout that hold the SLO, or say why there are none.

    Classes of requests are planned on shared pools, and each on pools of its own; the result is
    the cheaper. Plans of own pools are written to a file for each class: plan.chat.json beside
    plan.json.
    """
    from sizing.planner.plan import NoPlan, plan_classes
    from sizing.planner.workers import Workers

    inputs, scenario = asked.load(), asked.scenario
    try:
        with (
            naming(scenario),
            talk.status("searching layouts"),
            Workers.beside(asked.jobs) as workers,
        ):
            found = plan_classes(inputs, workers=workers)
    except NoPlan as none:
        if asked.as_json:
            print_json({"infeasible": asdict(none.infeasible)})
        raise NegativeAnswer(f"{scenario}: {none}", answered=asked.as_json) from None
    except KeyboardInterrupt as stopped:
        leave_interrupted(str(stopped) or "nothing found so far")
    for of, built in found.chosen.items():
        _write(built, _named(out, of), _named(asked.html, of), place=scenario)
    if asked.as_json:
        sys.stdout.write(_json(found, classes=bool(inputs.scenario.workload.classes)))
    else:
        _print_plans(found, out, verbose=verbose)
    _replay_trace(found)
    if found.interrupted:
        sure = found.chosen[""].confidence
        if sure is None or not sure.interrupted:
            leave_interrupted("the plan of shared pools; own pools of the classes were not planned")
        unverified = ", estimated, not simulated" if sure.unverified else ""
        leave_interrupted(f"the best plan so far{unverified}")


def _json(found: ClassPlans, *, classes: bool) -> str:
    if not classes:
        from minicluster.plan import to_json

        return to_json(found.chosen[""])
    from sizing.report.plan_screen import class_plans_json

    return class_plans_json(found)


def _replay_trace(found: ClassPlans) -> None:
    """Replay the trace that a load was taken from; one that misses the SLO is a negative answer."""
    built = found.chosen.get("")
    trace = None if built is None else built.inputs.scenario.workload.trace
    if built is None or trace is None:
        return
    from minicluster.workload.traces import read_trace
    from sizing.planner.replay import replay

    with talk.status("replaying the trace"):
        replayed = replay(built, read_trace(Path(trace), skip_unanswered=True).arrivals)
    if replayed.misses:
        rate = built.workload.requests_per_s * REPLAN_FACTOR
        raise NegativeAnswer(
            f"{replayed}; its requests come closer together than arrivals by chance do: plan for"
            f" more, at first --set workload.requests_per_s={rate:.3g}, or allow bursts their time"
            " (slo.ttft_s)",
            answered=True,
        )
    say(f"replayed: {replayed}")


def _named(path: Path | None, of: str) -> Path | None:
    """Return the file of a class's own pools: plan.chat.json beside plan.json."""
    return path.with_suffix(f".{of}{path.suffix}") if path is not None and of else path


def _write(built: Plan, out: Path | None, html: Path | None, *, place: Path) -> None:
    from minicluster.plan import to_json

    if out is not None:
        again = out.exists()
        write_atomically(out, to_json(built))
        if again:
            say(f"{out} was there and is overwritten")
    if html is not None:
        from minicluster.pages.write import write_page
        from sizing.report.plan_page import plan_page

        with naming(place), talk.status("simulating and drawing"):
            write_page(html, plan_page(built))


def _print_plans(found: ClassPlans, written: Path | None, *, verbose: bool) -> None:
    from sizing.report.plan_screen import (
        choice_sections,
        next_commands,
        plan_details,
        plan_sections,
    )

    parts: list[Section | ChartRow | str] = [*choice_sections(found)]
    for of, built in found.chosen.items():
        if of:
            parts.append(f"Own pools of {of}")
        parts += [
            *plan_sections(built),
            next_commands(built, _named(written, of), verbose=verbose),
        ]
        if verbose:
            from sizing.network.network_cost import crossing
            from sizing.report.fabric import crossing_lines

            parts += plan_details(built)
            parts += crossing_lines(crossing(built)) if built.inputs.cluster.tiers else []
    show(None, *parts, as_json=False)


def predict(  # noqa: PLR0913, PLR0917  (a command's options)
    scenario: ScenarioFile,
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
    from sizing.planner.predict import predict as predict_pools
    from sizing.report.plan_screen import VERBOSE, prediction_details, prediction_sections
    from sizing.report.tables import facts
    from sizing.scenario import Scenario

    inputs = Scenario.load(scenario, overrides or [], calibration)
    with naming(scenario):
        found = predict_pools(inputs, prefill=prefill, decode=decode, mixed=mixed)
    parts = prediction_sections(found, inputs)
    if verbose:
        parts += prediction_details(found, inputs.scenario.promises)
    else:
        parts.append(facts("", [("Next", VERBOSE)]))
    show(asdict(found), *parts, as_json=as_json)
    if not found.meets_slo:
        raise Exit(ExitCode.NEGATIVE)


def explain(plan: PlanFile, as_json: AsJson = False) -> None:
    """Show every term of the prediction: equation, seconds, share, source; and the limits."""
    from minicluster.plan import read_plan
    from sizing.planner.explanation import explain_plan
    from sizing.report.plan_screen import endpoint_text, lora_text, offload_text
    from sizing.report.tables import explanation_sections, facts, latency_table

    read = read_plan(plan)
    explained = explain_plan(read)
    rows = [("Endpoint", endpoint_text(read))]
    if read.engine.kv_offload is not None:
        rows.append(("KV offload (Q14)", offload_text(read.engine.kv_offload)))
    if read.engine.lora is not None:
        rows.append(("LoRA", lora_text(read)))
    limits = latency_table(read.prediction, read.promises)
    parts = [*explanation_sections(explained), limits, facts("", rows)]
    show(asdict(explained), *parts, as_json=as_json)
