"""The page of a plan: answer, latencies, layout, alternatives, assumptions and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.page import ChartRow, FactTable, Page, Section, Tile, ToType
from minicluster.units import seconds
from sizing.planner.predict import prediction_runs
from sizing.planner.studies.cost import YOURS
from sizing.planner.studies.pareto import design_points
from sizing.planner.studies.result import figures, layout_of
from sizing.report.plan_charts import front_figures, latency_figures, layout_grid, over_time_figures
from sizing.report.plan_screen import (
    answer_facts,
    detail_facts,
    evidence_facts,
    headline,
    lengths_text,
    rate_text,
)
from sizing.report.simulation import simulation_summary
from sizing.report.tables import latency_table, layout_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan


def plan_page(plan: Plan, *, alternatives: bool = True) -> Page:
    """
    Return the page of a plan.

    Args:
        alternatives: whether other configurations are simulated (5 to 10 seconds) and drawn too.

    Raises:
        InputError: a plan that cannot be simulated.
    """
    outcome, slowed = prediction_runs(plan)
    facts = (
        ("Arrivals", "Poisson, independent of one another"),
        *answer_facts(plan),
        *evidence_facts(plan),
        *detail_facts(plan),
        ("Predicted by", "\n".join(simulation_summary(outcome))),
    )
    over_time = over_time_figures(plan, outcome)
    points = design_points(plan.inputs, plan) if alternatives else ()
    layout = layout_table(plan.pools, plan.prediction)
    sources = tuple(_source_rows(plan))
    return Page(
        title=headline(plan),
        headline=headline(plan),
        lines=(_asked(plan),),
        tiles=tuple(plan_tiles(plan)),
        parts=(
            latency_table(plan.prediction, plan.promises),
            ChartRow(tuple(latency_figures(plan, outcome, slowed))),
            Section(layout.title, (layout_grid(plan), *layout.blocks)),
            Section("Assumptions and errors", (FactTable(facts),)),
            Section("Next", _next_commands(plan)),
            ChartRow(tuple(over_time), folded="Queues, batches and KV cache over time"),
            ChartRow(
                tuple(front_figures(points, plan)), folded="Alternatives: latency against cost"
            ),
            Section("Sources of the numbers", (FactTable(sources),), folded=True),
        ),
        footer=f"minicluster {plan.provenance.version}, sizing plan, inputs"
        f" {plan.provenance.inputs_hash}",
    )


def _asked(plan: Plan) -> str:
    asked = []
    slos = plan.inputs.scenario.promises
    for part, slo in zip(plan.workload.parts, slos.values(), strict=True):
        of = f"{part.name} at {rate_text(part)}: " if part.name else ""
        kept = f"every limit kept at {slo.percentile}"
        asked.append(f"{of}{lengths_text(part)}, {kept}")
    return f"{'; '.join(asked)}: {layout_of(plan)}."


def plan_tiles(plan: Plan) -> Iterator[Tile]:
    """Yield the most important figures: latencies, confidence, headroom, energy and price."""
    found = figures({"": plan})
    for of, slo in plan.promises.items():
        for name in ("ttft", "tpot", *(["e2e"] if slo.e2e_s else [])):
            limit_s = slo.limits_s.get(name)
            below = "" if limit_s is None else f"SLO {seconds(limit_s)}"
            value = seconds(plan.prediction.latency(name, of).at(slo.percentile))
            label = f"{of} {name.upper()} {slo.percentile}".strip()
            yield Tile(name=label, value=value, below=below)
    if found.confidence_fraction is not None and plan.confidence is not None:
        yield Tile(name="confidence", value=f"{found.confidence_fraction:.0%}")
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
            below=f"${cost.usd_per_hour:,.2f} an hour, "
            f"{YOURS if cost.price_source == YOURS else 'list prices'}",
        )


def _source_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    inputs = plan.inputs
    engine = f"engine {inputs.engine.name} {inputs.engine.version}"
    kinds = {gpu.name: gpu for gpu in (inputs.gpu, *inputs.other_gpus)}
    for name, sources in (
        *((f"GPU {name}", kinds[name].sources) for name in plan.gpus_by_kind),
        (f"cluster {inputs.cluster.name}", inputs.cluster.sources),
        (engine, inputs.engine.sources),
    ):
        for source in sources:
            yield f"{name}: {source.covers}", f"{source.document} ({source.date})"


def _next_commands(plan: Plan) -> tuple[ToType, ...]:
    deploy = ToType("serving up plan.json", "serves it")
    if not plan.inputs.engine.deployable:
        deploy = ToType("sizing export plan.json", f"writes the commands of {plan.engine.name}")
    return (
        ToType("sizing plan SCENARIO -o plan.json", "writes this plan to a file"),
        deploy,
        ToType("loadtest run plan.json", "loads it and compares what is measured with this page"),
    )
