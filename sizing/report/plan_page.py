"""The page of a plan: answer, latencies, layout, alternatives, assumptions and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.page import ChartRow, Command, DataTable, FactTable, Page, Section, Tile
from minicluster.units import seconds
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.design_points import design_points
from sizing.planner.studies.cost import DATASHEET, running
from sizing.planner.studies.loss import as_confident
from sizing.planner.studies.result import figures, layout_of
from sizing.report.plan_charts import front_figures, latency_figures, layout_grid, over_time_figures
from sizing.report.plan_screen import fit_error
from sizing.report.simulation import simulated_interval
from sizing.report.tables import data_table, free_gpus, kinds_of, layout_table
from sizing.simulation.planned import simulate_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan
    from sizing.simulation.outcome import Outcome

REQUESTS = 20_000
"""Number of requests simulated for the page: enough for a p99 with its interval."""
SEED = 0
UNPROVEN = "the search was interrupted before it simulated; sizes are estimates"
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
NEXT = (
    Command("sizing plan SCENARIO -o plan.json", "writes this plan to a file"),
    Command("serving up plan.json", "serves it"),
    Command("loadtest run plan.json", "loads it and compares what is measured with this page"),
)


def plan_page(plan: Plan) -> Page:
    """
    Simulate a plan, evaluate its alternatives, and return the page that shows both.

    Raises:
        InputError: a plan that cannot be simulated.
    """
    arrivals = drawn(plan.workload, RequestSource(), count=REQUESTS, seed=SEED)
    outcome = simulate_plan(plan, arrivals, seed=SEED)
    slowed = None
    if plan.confidence is not None:
        slowed = simulate_plan(as_confident(plan), arrivals, seed=SEED)
    latency_heads = ("", *STATISTICS, f"90 % interval at {plan.slo.percentile}", "SLO")
    latencies = DataTable(latency_heads, tuple(_latency_rows(plan, outcome)))
    pools = data_table(layout_table(plan.pools, plan.prediction))
    return Page(
        title=f"{plan.model.id}: {_hardware(plan)}",
        headline=f"{_hardware(plan)} for {plan.model.id}",
        lines=(_asked(plan),),
        notes=(_holds(plan),),
        tiles=tuple(_tiles(plan)),
        parts=(
            Section("Latency: predicted, and simulated", (latencies,)),
            ChartRow(tuple(latency_figures(plan, outcome, slowed))),
            Section("Layout", (layout_grid(plan), pools)),
            ChartRow(
                (
                    *over_time_figures(plan, outcome),
                    *front_figures(design_points(plan.inputs), plan),
                )
            ),
            Section("Assumptions and errors", (FactTable(tuple(_assumption_rows(plan, outcome))),)),
            Section("Sources of the numbers", (FactTable(tuple(_source_rows(plan))),)),
            Section("Next", NEXT),
        ),
        footer=f"minicluster {plan.provenance.version}, sizing plan, inputs"
        f" {plan.provenance.inputs_hash}",
    )


def _asked(plan: Plan) -> str:
    load = plan.workload
    return (
        f"{load.requests_per_s:g} requests/s of {_lengths(load.input_tokens.mean)}"
        f"{load.input_tokens.max_tokens:,} tokens in, {_lengths(load.output_tokens.mean)}"
        f"{load.output_tokens.max_tokens:,} out, every limit kept at {plan.slo.percentile}:"
        f" {layout_of(plan)}."
    )


def _holds(plan: Plan) -> str:
    nodes = f"{plan.cost.nodes} node" + ("s" if plan.cost.nodes > 1 else "") + free_gpus(plan)
    held = f"Holds to {plan.headroom.load_factor:.2f} times the load, then {plan.headroom.binds}"
    return f"On {nodes}. {held}."


def _hardware(plan: Plan) -> str:
    if plan.inputs.gpu.kind == "cpu":
        return f"{plan.cost.gpus} cores"
    return " and ".join(f"{gpus} {kind}" for kind, gpus in kinds_of(plan).items())


def _lengths(mean: int | None) -> str:
    """Return `up to ` where lengths differ, since the longest one is shown."""
    return "" if mean is not None else "up to "


def _tiles(plan: Plan) -> Iterator[Tile]:
    """Yield the most important figures: latencies, confidence, headroom, energy and price."""
    found, slo = figures(plan), plan.slo
    for name, value_s, limit_s in (
        ("TTFT", found.ttft_s, slo.ttft_s),
        ("TPOT", found.tpot_s, slo.tpot_s),
    ):
        below = "" if limit_s is None else f"SLO {seconds(limit_s)}"
        yield Tile(name=f"{name} {slo.percentile}", value=seconds(value_s), below=below)
    if found.confidence_fraction is not None and plan.confidence is not None:
        at = plan.confidence.gpus_at
        others = ", ".join(f"{gpus} GPUs at {float(name):.0%}" for name, gpus in at.items())
        yield Tile(name="confidence", value=f"{found.confidence_fraction:.0%}", below=others)
    capacity = f"saturates at {plan.prediction.capacity_requests_per_s:.3g}/s"
    yield Tile(name="headroom", value=f"{found.headroom_factor:.2f} x", below=capacity)
    cost = found.running
    if cost.joules_per_output_token is not None and cost.power_w is not None:
        yield Tile(
            name="energy",
            value=f"{cost.joules_per_output_token:.2f} J/token",
            below=f"{cost.power_w / 1e3:,.1f} kW, {cost.power_source}",
        )
    if cost.usd_per_million_output_tokens is not None and cost.usd_per_hour is not None:
        yield Tile(
            name="price",
            value=f"${cost.usd_per_million_output_tokens:,.2f}/Mtok",
            below=f"${cost.usd_per_hour:,.2f} an hour, {cost.price_source}",
        )


def _latency_rows(plan: Plan, outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Yield two rows a latency: predicted and simulated."""
    simulated = outcome.latencies()
    for name in ("ttft", "tpot", "itl", "e2e"):
        predicted = getattr(plan.prediction, name)
        limit = plan.slo.limits_s.get(name)
        yield (
            f"{name.upper()} predicted",
            *(seconds(predicted.at(each)) for each in STATISTICS),
            "",
            "" if limit is None else f"{seconds(limit)} at {plan.slo.percentile}",
        )
        if name in simulated:
            found = simulated[name]
            cells = [seconds(found[each].value_s) if each in found else "" for each in STATISTICS]
            yield (
                f"{name.upper()} simulated",
                *cells,
                simulated_interval(found[plan.slo.percentile]),
                "",
            )


def _assumption_rows(plan: Plan, outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield the assumptions behind the answer, and its errors."""
    scenario, cost = plan.inputs.scenario, running(plan)
    yield "arrivals", "Poisson, independent of one another"
    local = plan.routing.local_threshold_tokens
    kept = f"; prompts up to {local:,} tokens stay with their decode replica" if local else ""
    yield "routing", f"{plan.routing.policy} among prefill replicas{kept}"
    yield "step times", f"{plan.calibration.name}, {plan.calibration.date}"
    yield "error of the fitted steps", fit_error(plan)
    behind = plan.validated_on
    yield "validation", f"{behind.num_rows} measured rows behind it: {behind.note}"
    for name in ("ttft", "tpot"):
        found = getattr(plan.prediction, name)
        if found.low_factor is not None and found.high_factor is not None:
            between = (
                f"between {found.low_factor:.2f} and {found.high_factor:.2f} times the prediction"
            )
            yield f"error of {name.upper()}", f"80 % of measurements like this lay {between}"
    sure = plan.confidence
    if sure is not None:
        slow = f"prefill steps {sure.prefill_factor:.2f} and decode steps {sure.decode_factor:.2f}"
        what = f"holds with {slow} times as long as predicted (`with slowed steps` in the charts)"
        yield "confidence", f"{sure.fraction:.0%}: {what if sure.requests else UNPROVEN}"
    assumed = scenario.model.assumed_context_tokens
    if assumed is not None:
        yield "context", f"assumed: the model serves {assumed:,} tokens"
    if cost.power_source is not None:
        full = "at full power all the time"
        own = cost.power_source != DATASHEET
        yield "power", f"{full}, {'your number' if own else cost.power_source}"
    priced = cost.price_source is not None
    yield "price", "your number" if priced else "none given: no default is taken"
    counted = int(outcome.counts.sum())
    yield (
        "simulation",
        f"{len(outcome.due_s):,} requests, {counted:,} counted after the warm-up"
        + ("" if outcome.settled else "; no steady state was reached"),
    )
    if not plan.deployable.ok:
        yield "deployment", f"`serving up` refuses it: {plan.deployable.rule_broken}"


def _source_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the sources of the numbers of GPUs, cluster and engine."""
    inputs = plan.inputs
    engine = f"engine {inputs.engine.name} {inputs.engine.version}"
    kinds = {gpu.name: gpu for gpu in (inputs.gpu, *inputs.other_gpus)}
    for name, sources in (
        *((f"GPU {name}", kinds[name].sources) for name in kinds_of(plan)),
        (f"cluster {inputs.cluster.name}", inputs.cluster.sources),
        (engine, inputs.engine.sources),
    ):
        for source in sources:
            yield f"{name}: {source.covers}", f"{source.document} ({source.date})"
