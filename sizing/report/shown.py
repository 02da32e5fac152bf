"""Columns for pandas of each result; its sections are registered beside their functions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minicluster.pages.shown import columns_of, sections_of
from minicluster.plan import Plan, Prediction
from sizing.evidence.validate import Validated, record
from sizing.planner.explanation import Explanation
from sizing.planner.plan import ClassPlans
from sizing.planner.predict import PoolPrediction
from sizing.planner.studies.capacity import Capacity
from sizing.planner.studies.day import Day
from sizing.planner.studies.decisions import Decisions
from sizing.planner.studies.split_map import SplitMap
from sizing.report import questions, validation
from sizing.report.plan_screen import class_plans_columns
from sizing.report.simulation import request_columns
from sizing.report.tables import facts
from sizing.scenario import Scenario
from sizing.simulation.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from minicluster.pages.page import Section

SECTIONS = (questions, validation)
"""Modules that register sections, beside those that are imported for their columns."""


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows with the same keys as columns."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return columns


@columns_of.register(Outcome)
def _request_columns(outcome: Outcome) -> dict[str, Any]:
    return dict(request_columns(outcome))


columns_of.register(ClassPlans, class_plans_columns)


@columns_of.register(Plan)
@columns_of.register(PoolPrediction)
def _pool_columns(planned: Plan | PoolPrediction) -> dict[str, list[Any]]:
    prediction = planned.prediction
    names = ("role", "gpu", "replicas", "tp", "pp", "dp", "ep", "gpus", "max_num_seqs", "kv_bytes")
    return _columns(
        {name: getattr(pool, name) for name in names}
        | {
            "utilisation_fraction": prediction.utilisation_fraction[pool.role],
            "bottleneck": prediction.bottleneck[pool.role],
        }
        for pool in planned.pools
    )


@columns_of.register(Prediction)
def _latency_columns(prediction: Prediction) -> dict[str, list[Any]]:
    names = ("ttft", "tpot", "itl", "e2e")
    return _columns({"latency": name, **asdict(getattr(prediction, name))} for name in names)


@columns_of.register(Capacity)
def _capacity_columns(curve: Capacity) -> dict[str, list[Any]]:
    return _columns(_capacity_rows(curve))


def _capacity_rows(curve: Capacity) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of GPUs, and below it one for each class's own pools."""
    names = ("gpus", "used_gpus", "requests_per_s", "users", "layout", "binds", "reason",
             "output_tokens_per_s")  # fmt: skip
    costs = ("power_w", "joules_per_output_token", "usd_per_million_output_tokens")
    at = curve.percentile
    for whole in curve.points:
        for of, point in {"": whole, **whole.own}.items():
            cost, predicted = point.running, point.prediction
            yield {
                "class": of,
                **{name: getattr(point, name) for name in names},
                f"ttft_{at}_s": predicted and predicted.ttft.at(at),
                f"tpot_{at}_s": predicted and predicted.tpot.at(at),
                **{name: cost and getattr(cost, name) for name in costs},
            }


@columns_of.register(Day)
def _day_columns(day: Day) -> dict[str, list[Any]]:
    best = day.best
    return {
        "requests_per_s": list(day.requests_per_s),
        "gpus": list(best.gpus),
        **{role: list(counts) for role, counts in best.replicas.items()},
        "holds": list(best.holds),
    }


@columns_of.register(Explanation)
def _explanation_columns(explained: Explanation) -> dict[str, list[Any]]:
    return _columns(map(asdict, explained.terms))


@columns_of.register(Validated)
def _validation_columns(validated: Validated) -> dict[str, list[Any]]:
    return _columns(map(record, validated.verdicts))


@columns_of.register(SplitMap)
def _map_columns(split_map: SplitMap) -> dict[str, list[Any]]:
    return _columns(
        {**asdict(point), "saved_fraction": point.saved_fraction} for point in split_map.points
    )


@columns_of.register(Decisions)
def _decision_columns(decisions: Decisions) -> dict[str, list[Any]]:
    names = ("name", "value", "gpus", "against_gpus")
    return _columns({name: getattr(row, name) for name in names} for row in decisions.rows)


@columns_of.register(Scenario)
def _scenario_columns(scenario: Scenario) -> dict[str, list[Any]]:
    return {key: [value] for key, value in scenario.set_keys().items()}


@sections_of.register(Scenario)
def _scenario_sections(scenario: Scenario) -> list[Section]:
    return [facts("Scenario", ((key, f"{value}") for key, value in scenario.set_keys().items()))]
