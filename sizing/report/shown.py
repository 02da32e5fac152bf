"""What a notebook shows of each result, and its columns for pandas."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table

from minicluster.pages.page import FactTable, Section
from minicluster.pages.page import Text as Paragraph
from minicluster.pages.shown import columns_of, sections_of
from minicluster.plan import Plan, Prediction
from sizing.evidence.validate import Validated, record
from sizing.planner.explanation import Explanation
from sizing.planner.plan import ClassPlans
from sizing.planner.predict import PoolPrediction
from sizing.planner.studies.capacity import Capacity, CapacityPoint
from sizing.planner.studies.day import Day
from sizing.planner.studies.decisions import Decisions
from sizing.planner.studies.result import layout_of
from sizing.planner.studies.split_map import SplitMap
from sizing.report.plan_screen import (
    answer_facts,
    choice_line,
    class_plans_columns,
    class_plans_table,
    evidence_facts,
    headline,
    measured,
)
from sizing.report.questions import (
    capacity_parts,
    day_parts,
    decisions_parts,
    split_map_parts,
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
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Sections = Callable[[Any], list[Section]]
    Columns = Callable[[Any], Mapping[str, Any]]


def _sections(parts: Iterable[Table | str]) -> list[Section]:
    """Return tables below their titles, and lines that follow one another without one."""
    found: list[Section] = []
    for _, alike in groupby(parts, type):
        run = list(alike)
        tables = [titled_section(part) for part in run if isinstance(part, Table)]
        found += tables or [Section("", tuple(Paragraph(str(part)) for part in run))]
    return found


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows with the same keys as columns."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return columns


def _plan_sections(plan: Plan) -> list[Section]:
    facts = (("Layout", layout_of(plan)), *answer_facts(plan), *evidence_facts(plan))
    tables = (
        layout_table(plan.pools, plan.prediction),
        latency_table(plan.prediction, plan.promises),
    )
    return [Section(headline(plan), (FactTable(facts),)), *_sections(tables)]


def _classes_sections(found: ClassPlans) -> list[Section]:
    plans = (section for plan in found.chosen.values() for section in _plan_sections(plan))
    return [*_sections((class_plans_table(found), choice_line(found))), *plans]


def _pool_sections(found: PoolPrediction) -> list[Section]:
    said = "; ".join(found.misses)
    facts = (("Measured", measured(found.validated_on)),)
    title = f"SLO missed: {said}" if said else "SLO met"
    pools = data_table(layout_table(found.pools, found.prediction))
    return [Section(title, (pools, FactTable(facts)))]


def _pool_columns(found: Plan | PoolPrediction) -> dict[str, list[Any]]:
    prediction = found.prediction
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
        for pool in found.pools
    )


def _latency_columns(prediction: Prediction) -> dict[str, list[Any]]:
    names = ("ttft", "tpot", "itl", "e2e")
    return _columns({"latency": name, **asdict(getattr(prediction, name))} for name in names)


def _run_sections(outcome: Outcome) -> list[Section]:
    latencies = data_table(simulated_table(outcome, None))
    said = Paragraph(simulation_summary(outcome).plain)
    title = "Simulated latency, with 90 % intervals"
    return [Section(title, (latencies, said)), *_sections([pools_table(outcome)])]


def _capacity_rows(found: Capacity) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of GPUs, and below it one for each class's own pools."""
    for point in found.points:
        for name, each in {"": point, **point.own}.items():
            yield {"class": name, **_capacity_row(each, found.percentile)}


def _capacity_row(point: CapacityPoint, percentile: str) -> dict[str, Any]:
    cost, predicted = point.running, point.prediction
    names = ("gpus", "used_gpus", "requests_per_s", "users", "layout", "binds", "reason")
    costs = ("power_w", "joules_per_output_token", "usd_per_million_output_tokens")
    return {
        **{name: getattr(point, name) for name in names},
        "output_tokens_per_s": point.output_tokens_per_s,
        f"ttft_{percentile}_s": predicted and predicted.ttft.at(percentile),
        f"tpot_{percentile}_s": predicted and predicted.tpot.at(percentile),
        **{name: cost and getattr(cost, name) for name in costs},
    }


def _day_columns(found: Day) -> dict[str, list[Any]]:
    best = found.best
    return {
        "requests_per_s": list(found.requests_per_s),
        "gpus": list(best.gpus),
        **{role: list(counts) for role, counts in best.replicas.items()},
        "holds": list(best.holds),
    }


def _scenario_sections(asked: Scenario) -> list[Section]:
    rows = tuple((key, f"{value}") for key, value in asked.set_keys().items())
    return [Section("Scenario", (FactTable(rows),))]


SHOWN: tuple[tuple[type, Sections | None, Columns], ...] = (
    (Plan, _plan_sections, _pool_columns),
    (ClassPlans, _classes_sections, class_plans_columns),
    (PoolPrediction, _pool_sections, _pool_columns),
    (Prediction, None, _latency_columns),
    (
        Explanation,
        lambda found: _sections(explanation_tables(found)),
        lambda found: _columns(map(asdict, found.terms)),
    ),
    (Outcome, _run_sections, request_columns),
    (
        Validated,
        lambda found: _sections(validation_tables(found.verdicts, found.tried)),
        lambda found: _columns(map(record, found.verdicts)),
    ),
    (
        Capacity,
        lambda found: _sections(capacity_parts(found)),
        lambda found: _columns(_capacity_rows(found)),
    ),
    (
        Day,
        lambda found: _sections(day_parts(found)),
        _day_columns,
    ),
    (
        SplitMap,
        lambda found: _sections(split_map_parts(found)),
        lambda found: _columns(
            {**asdict(each), "saved_fraction": each.saved_fraction} for each in found.points
        ),
    ),
    (
        Decisions,
        lambda found: _sections(decisions_parts(found)),
        lambda found: _columns(
            {name: getattr(row, name) for name in ("name", "value", "gpus", "against_gpus")}
            for row in found.rows
        ),
    ),
    (
        Scenario,
        _scenario_sections,
        lambda asked: {key: [value] for key, value in asked.set_keys().items()},
    ),
)
"""Sections in a notebook and columns of each type of result."""

for kind, sections, columns in SHOWN:
    if sections is not None:
        sections_of.register(kind, sections)
    columns_of.register(kind, columns)
