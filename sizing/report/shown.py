"""What a notebook shows of each result, and its columns for pandas."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from minicluster.pages.page import FactTable, Section
from minicluster.pages.page import Text as Paragraph
from minicluster.pages.shown import columns_of, sections_of
from minicluster.plan import Plan, Prediction
from sizing.evidence.validate import record
from sizing.evidence.validated import Validated
from sizing.planner.class_pools import ClassPlans
from sizing.planner.explanation import Explanation
from sizing.planner.predict import PoolPrediction
from sizing.planner.studies.capacity import Capacity
from sizing.planner.studies.day import Day
from sizing.planner.studies.decisions import Decisions
from sizing.planner.studies.result import layout_of
from sizing.planner.studies.split_map import SplitMap
from sizing.report.class_plans import choice_line, class_plans_columns, class_plans_table
from sizing.report.day import day_headline, day_lines, hours_table, shares_table
from sizing.report.plan_screen import answer_facts, evidence_facts, headline, measured
from sizing.report.questions import (
    capacity_lines,
    capacity_table,
    decisions_table,
    split_map_lines,
    split_map_table,
)
from sizing.report.simulation import (
    pools_table,
    request_columns,
    simulated_table,
    simulation_summary,
)
from sizing.report.tables import (
    data_table,
    explanation_tables,
    latency_table,
    layout_table,
    titled_section,
)
from sizing.report.validation import validation_tables
from sizing.scenario import Scenario
from sizing.simulation.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from minicluster.plan import Pool
    from sizing.planner.studies.capacity import CapacityPoint

LATENCIES = ("ttft", "tpot", "itl", "e2e")


@sections_of.register(Plan)
def _plan_sections(plan: Plan) -> list[Section]:
    facts = (("Layout", layout_of(plan)), *answer_facts(plan), *evidence_facts(plan))
    return [
        Section(headline(plan), (FactTable(facts),)),
        titled_section(layout_table(plan.pools, plan.prediction)),
        titled_section(latency_table(plan.prediction, plan.promises)),
    ]


@sections_of.register(ClassPlans)
def _classes_sections(found: ClassPlans) -> list[Section]:
    shown = titled_section(class_plans_table(found))
    plans = (_plan_sections(each) for each in found.chosen.values())
    return [shown, Section("", (Paragraph(choice_line(found)),)), *chain.from_iterable(plans)]


@columns_of.register(ClassPlans)
def _classes_columns(found: ClassPlans) -> dict[str, list[Any]]:
    return class_plans_columns(found)


@columns_of.register(Plan)
def _plan_columns(plan: Plan) -> dict[str, list[Any]]:
    return _pool_columns(plan.pools, plan.prediction)


def _pool_columns(pools: Iterable[Pool], prediction: Prediction) -> dict[str, list[Any]]:
    """Return a row per pool."""
    return _columns(
        {
            "role": pool.role,
            "gpu": pool.gpu,
            "replicas": pool.replicas,
            **{degree: getattr(pool, degree) for degree in ("tp", "pp", "dp", "ep")},
            "gpus": pool.gpus,
            "max_num_seqs": pool.max_num_seqs,
            "kv_bytes": pool.kv_bytes,
            "utilisation_fraction": prediction.utilisation_fraction[pool.role],
            "bottleneck": prediction.bottleneck[pool.role],
        }
        for pool in pools
    )


@columns_of.register(Prediction)
def _prediction_columns(prediction: Prediction) -> dict[str, list[Any]]:
    """Return a row per latency."""
    return _columns({"latency": name, **asdict(getattr(prediction, name))} for name in LATENCIES)


@sections_of.register(PoolPrediction)
def _pools_sections(found: PoolPrediction) -> list[Section]:
    said = "; ".join(found.misses)
    facts = (("Measured", measured(found.validated_on)),)
    title = f"SLO missed: {said}" if said else "SLO met"
    pools = data_table(layout_table(found.pools, found.prediction))
    return [Section(title, (pools, FactTable(facts)))]


@columns_of.register(PoolPrediction)
def _pools_columns(found: PoolPrediction) -> dict[str, list[Any]]:
    return _pool_columns(found.pools, found.prediction)


@sections_of.register(Explanation)
def _terms_sections(found: Explanation) -> list[Section]:
    return [
        Section("", (Paragraph(each),)) if isinstance(each, str) else titled_section(each)
        for each in explanation_tables(found)
    ]


@columns_of.register(Explanation)
def _terms_columns(found: Explanation) -> dict[str, list[Any]]:
    return _columns(asdict(term) for term in found.terms)


@sections_of.register(Outcome)
def _run_sections(outcome: Outcome) -> list[Section]:
    latencies = data_table(simulated_table(outcome, None))
    said = Paragraph(simulation_summary(outcome).plain)
    return [
        Section("Simulated latency, with 90 % intervals", (latencies, said)),
        titled_section(pools_table(outcome)),
    ]


@columns_of.register(Outcome)
def _run_columns(outcome: Outcome) -> Mapping[str, Any]:
    return request_columns(outcome)


@sections_of.register(Validated)
def _validated_sections(found: Validated) -> list[Section]:
    return [titled_section(each) for each in validation_tables(found.verdicts, found.tried)]


@columns_of.register(Validated)
def _validated_columns(found: Validated) -> dict[str, list[Any]]:
    return _columns(record(each) for each in found.verdicts)


@sections_of.register(Capacity)
def _capacity_sections(found: Capacity) -> list[Section]:
    return [titled_section(capacity_table(found)), _lines(capacity_lines(found))]


@columns_of.register(Capacity)
def _capacity_columns(found: Capacity) -> dict[str, list[Any]]:
    return _columns(_capacity_row(point, found.percentile) for point in found.points)


def _capacity_row(point: CapacityPoint, percentile: str) -> dict[str, Any]:
    cost, predicted = point.running, point.prediction
    names = ("gpus", "used_gpus", "requests_per_s", "users", "layout", "binds", "reason")
    costs = ("power_w", "joules_per_output_token", "usd_per_million_output_tokens")
    return {
        **{name: getattr(point, name) for name in names},
        "output_tokens_per_s": predicted and predicted.output_tokens_per_s,
        f"ttft_{percentile}_s": predicted and predicted.ttft.at(percentile),
        f"tpot_{percentile}_s": predicted and predicted.tpot.at(percentile),
        **{name: cost and getattr(cost, name) for name in costs},
    }


@sections_of.register(Day)
def _day_sections(found: Day) -> list[Section]:
    said = _lines((day_headline(found), *day_lines(found)))
    return [said, titled_section(shares_table(found)), titled_section(hours_table(found))]


@columns_of.register(Day)
def _day_columns(found: Day) -> dict[str, list[Any]]:
    best = found.best
    return {
        "requests_per_s": list(found.requests_per_s),
        "gpus": list(best.gpus),
        **{role: list(counts) for role, counts in best.replicas.items()},
        "holds": list(best.holds),
    }


@sections_of.register(SplitMap)
def _map_sections(found: SplitMap) -> list[Section]:
    return [titled_section(split_map_table(found)), _lines(split_map_lines(found))]


@columns_of.register(SplitMap)
def _map_columns(found: SplitMap) -> dict[str, list[Any]]:
    return _columns(
        {**asdict(point), "saved_fraction": point.saved_fraction} for point in found.points
    )


@sections_of.register(Decisions)
def _decisions_sections(found: Decisions) -> list[Section]:
    return [titled_section(decisions_table(found))]


@columns_of.register(Decisions)
def _decisions_columns(found: Decisions) -> dict[str, list[Any]]:
    return _columns(
        {name: getattr(row, name) for name in ("name", "value", "gpus", "against_gpus")}
        for row in found.rows
    )


def _lines(texts: Iterable[str]) -> Section:
    return Section("", tuple(Paragraph(text) for text in texts))


@sections_of.register(Scenario)
def _scenario_sections(asked: Scenario) -> list[Section]:
    rows = tuple(_scenario_columns(asked).items())
    return [Section("Scenario", (FactTable(tuple((key, f"{v[0]}") for key, v in rows)),))]


@columns_of.register(Scenario)
def _scenario_columns(asked: Scenario) -> dict[str, list[Any]]:
    """Return the keys that are not at their defaults, as one row."""
    return {key: [value] for key, value in asked.set_keys().items()}


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows with the same keys as columns."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return columns
