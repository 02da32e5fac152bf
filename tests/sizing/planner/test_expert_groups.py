"""A plan whose replicas are groups of data-parallel ranks around one set of experts."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from minicluster.phases import label
from minicluster.plan import Plan, to_json
from minicluster.specs.scenario import ModelChoice
from minicluster.specs.slicing import Slicing
from sizing.planner import bounds
from sizing.planner.candidates import one_replica_each
from sizing.planner.error_model import AS_PREDICTED
from sizing.planner.explanation import explain_plan
from sizing.planner.layout import Layout, LayoutShape
from sizing.planner.plan import build_plan
from sizing.planner.pool_sizing import estimated_sizes
from sizing.planner.simulated_check import Found
from sizing.planner.step_models import StepModels
from sizing.report.tables import explanation_sections
from sizing.report.terminal import print_sections
from sizing.simulation.planned import deployed_system
from tests.sizing.scenarios import LARGE, inputs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sizing.conftest import Sizing


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two decode replicas of 16 ranks, on two nodes each, beside prefill replicas of 8."""
    load = replace(LARGE.workload, requests_per_s=2.0)
    given = inputs(replace(LARGE, model=ModelChoice(id="qwen3-30b-a3b"), workload=load))
    prefill, decode = (
        LayoutShape(slicing=Slicing(dp=ranks, ep=ranks), gpu="h100-sxm") for ranks in (8, 16)
    )
    layout = Layout(prefill=prefill, decode=decode)
    models = StepModels(given)
    two = one_replica_each(models, layout).limited(8).sized({"prefill": 2, "decode": 2})
    return build_plan(given, Found(configuration=two, models=models))


def test_place_says_what_the_plan_says(plan: Plan, sizing: Sizing, tmp_path: Path) -> None:
    """`sizing place` leaves the replicas where the plan has put them."""
    path, placed = tmp_path / "plan.json", tmp_path / "placed.json"
    path.write_text(to_json(plan))
    assert sizing("place", str(path), "-o", str(placed)).code == 0
    assert placed.read_text() == path.read_text()
    assert {len(pool.placement) for pool in plan.pools} == {2, 4}


def test_explain_says_what_ranks_wait_for(plan: Plan) -> None:
    """Each exchange, the busiest rank's experts and the wait; names stay whole."""
    explained = explain_plan(plan)
    names = {term.name for term in explained.terms}
    assert {"expert gather", "expert scatter", "experts up", "experts down"} <= names
    assert 1 < explained.busiest_experts["prefill"] < explained.busiest_experts["decode"] < 16
    assert 0 < explained.group_wait_s < 0.2 * plan.prediction.tpot.mean_s

    console = Console(width=80, record=True, file=StringIO())
    print_sections(explanation_sections(explained), console)
    said = " ".join(console.export_text().split())
    assert all(f" {label(term.name)} {term.equation} " in said for term in explained.terms)
    assert "wait for the slowest one, which adds" in said
    assert f"has {explained.busiest_experts['decode']:.2f} times the tokens" in said


@pytest.mark.parametrize(("ttft_s", "needs_idle_groups"), [(1.0, False), (0.25, True)])
def test_an_estimate_has_an_idle_group_where_a_step_is_too_long_to_wait_for(
    ttft_s: float, *, needs_idle_groups: bool
) -> None:
    """Its prompt finds an idle group, or the limit has room for a step."""
    load = replace(LARGE.workload, requests_per_s=100.0)
    scenario = replace(LARGE, model=ModelChoice(id="qwen3-30b-a3b"), workload=load)
    given = inputs(replace(scenario, slo=replace(scenario.slo, ttft_s=ttft_s)))
    prefill, decode = (
        LayoutShape(slicing=Slicing(dp=ranks, ep=ranks), gpu="h100-sxm") for ranks in (8, 16)
    )
    layout = Layout(prefill=prefill, decode=decode)
    models = StepModels(given)
    one = one_replica_each(models, layout).limited(8)
    groups = estimated_sizes(models, one, AS_PREDICTED).replicas["prefill"]
    assert (groups > bounds.busy_prefill(models.load(one))) == needs_idle_groups


def test_each_rank_of_a_group_is_simulated_on_its_gpus(plan: Plan) -> None:
    """All ranks together have the GPUs of the pool, whose uplinks they share (eq. N6)."""
    system = deployed_system(plan.deployment, plan.step_model)
    pools = {"prefill": system.prefill, "decode": system.decode}
    for role, simulated in pools.items():
        assert simulated is not None
        pool = plan.pool(role)
        assert simulated.replicas == pool.replicas * pool.dp
        assert simulated.replicas * simulated.gpus == pool.gpus
