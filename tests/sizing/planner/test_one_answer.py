"""One question, one answer: headroom, capacity and a second plan; figures that add up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

import sizing
from minicluster.pages.page import DataTable
from sizing.planner.configuration import Configuration
from sizing.planner.edge import RESOLUTION
from sizing.planner.explanation import explain_plan
from sizing.planner.predict import prediction_runs
from sizing.planner.studies.capacity import capacity
from sizing.planner.studies.pareto import design_points, fronts
from sizing.report.tables import MEMORY, TIMES, explanation_sections, summed
from sizing.scenario import Scenario

SMALL = "llama-3.1-8b-h100"
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (SMALL, {}),
    (SMALL, {"workload.requests_per_s": 5}),
    (SMALL, {"search.pools": "split", "workload.requests_per_s": 10}),
    ("llama-3.1-70b-h100", {}),
)

OTHER_BATCH_LIMIT = 2
"""Place in `ASKED` of the plan whose GPUs carry more with another batch limit than its own."""


@cache
def planned(at: int) -> tuple[Scenario, sizing.Plan]:
    """Return a scenario and its plan."""
    name, keys = ASKED[at]
    scenario = Scenario.load(name, keys)
    return scenario, sizing.plan(scenario)


@pytest.mark.parametrize("at", range(len(ASKED)))
def test_headroom_is_what_capacity_and_a_second_plan_say(at: int) -> None:
    """
    The GPUs of a plan carry its load times the headroom, and a plan for that needs no more.

    Other pools or batch limits of as many GPUs may carry more; the plan's own do not.
    """
    scenario, plan = planned(at)
    most = plan.headroom.load_factor * plan.workload.requests_per_s
    again = sizing.plan(scenario.with_({"workload.requests_per_s": 0.99 * most}))
    assert again.cost.gpus == plan.cost.gpus
    alone, among = (
        capacity(scenario, gpus).points[-1]
        for gpus in ([plan.cost.gpus], [max(1, plan.cost.gpus - 1), plan.cost.gpus])
    )
    assert alone.requests_per_s == among.requests_per_s  # the page asks for several
    assert alone.requests_per_s >= most / (1 + 2 * RESOLUTION)
    if at != OTHER_BATCH_LIMIT:
        assert alone.layout == str(Configuration.of_plan(plan))
        assert alone.requests_per_s == pytest.approx(most, rel=2 * RESOLUTION)


def test_of_equal_gpus_the_measured_pools_are_the_plan() -> None:
    """Of three GPUs in one pool there are rows, of three in two pools none; these are named."""
    _, plan = planned(0)
    assert [pool.role for pool in plan.pools] == ["mixed"]
    assert plan.validated_on.num_rows > 0
    assert plan.confidence is not None
    assert re.fullmatch(
        r"split pools: the same 3 GPUs \(--prefill 2xTP1 --decode 1xTP1\), headroom 1\.\d\d,"
        " none measured",
        plan.confidence.other_pools,
    )


@pytest.mark.parametrize("at", [0, 3])
def test_charts_are_of_the_very_run_of_the_prediction(at: int) -> None:
    """Every statistic of every latency, to the last digit."""
    _, plan = planned(at)
    outcome, slowed = prediction_runs(plan)
    for name, statistics in outcome.latencies().items():
        if name != "stall":
            predicted = plan.prediction.latency(name)
            for statistic in ("mean", "p50", "p95", "p99"):
                assert statistics[statistic].value_s == predicted.at(statistic)
    assert slowed is not None
    assert len(slowed.due_s) == len(outcome.due_s)
    assert slowed.latencies()["tpot"]["mean"].value_s > plan.prediction.tpot.mean_s


@pytest.mark.parametrize("at", [0, 3])
def test_printed_terms_add_up_to_the_printed_sums(at: int) -> None:
    """TTFT, TPOT, both steps and the memory of a GPU; the sums are those of the prediction."""
    _, plan = planned(at)
    explained, seen = explain_plan(plan), []
    for section in explanation_sections(explained):
        title, table = section.title, section.blocks[0]
        assert isinstance(table, DataTable)
        cells = list(zip(*table.rows, strict=True))
        if title == "Memory":
            count = 1 + next(n for n, cell in enumerate(cells[0]) if str(cell).startswith("sum"))
            for column in cells[1:]:
                _adds_up(column[:count])
        elif title.startswith(("Mean", "Prefill", "Decode")):
            _adds_up(cells[2])
            seen.append(title)
    assert [title.split()[0] for title in seen] == ["Mean", "Mean", "Prefill", "Decode"]
    for of, latency in (("TTFT", plan.prediction.ttft), ("TPOT", plan.prediction.tpot)):
        total = sum(term.seconds for term in explained.terms if term.of == of)
        assert total == pytest.approx(latency.mean_s)


def _adds_up(cells: Sequence[object]) -> None:
    numbers = [float(str(cell).split()[0].replace(",", "")) for cell in cells]
    assert len({str(cell).split()[1] for cell in cells}) == 1
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=1e-9)


@pytest.mark.parametrize(
    ("values", "units", "printed"),
    [
        ([0.00333, 0.00333, 0.00334], TIMES, ["3.33 ms", "3.33 ms", "3.34 ms", "10.00 ms"]),
        ([1 / 3] * 3, TIMES, ["0.334 s", "0.333 s", "0.333 s", "1.000 s"]),
        ([2e-6, -1e-6], TIMES, ["2.000 µs", "-1.000 µs", "1.000 µs"]),
        ([16.06e9, 64e9], MEMORY, ["16.06 GB", "64.00 GB", "80.06 GB"]),
    ],
)
def test_rounding_keeps_sums(
    values: list[float], units: tuple[tuple[float, str], ...], printed: list[str]
) -> None:
    assert summed(values, units) == printed


def test_the_plan_lies_on_its_own_front() -> None:
    """Fronts hold pools of both kinds, and the plan; no two rows are equal."""
    scenario, plan = planned(0)
    points = design_points(scenario, plan)
    labels = {point.label for point in points}
    assert any(label.startswith("--mixed") for label in labels)
    assert any(label.startswith("--prefill") for label in labels)
    own = next(n for n, point in enumerate(points) if point.label == "--mixed 3xTP1")
    assert any(front.kept[own] for front in fronts(points))
    rows = [(point.label, point.ttft_s, point.tpot_s) for point in points]
    assert len(set(rows)) == len(rows)
