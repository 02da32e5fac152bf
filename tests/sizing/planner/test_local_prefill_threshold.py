"""Prompts computed where they are decoded, and when plans do it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minicluster.plan import Inputs, plan_from, to_json
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.candidates import one_replica_each
from sizing.planner.configuration import Configuration
from sizing.planner.error_model import AS_PREDICTED
from sizing.planner.explanation import explain_plan
from sizing.planner.layout import Layout
from sizing.planner.plan import build_plan
from sizing.planner.pool_sizing import choose_local_threshold
from sizing.planner.search import search
from sizing.planner.simulated_check import Found, Simulations
from sizing.planner.step_models import StepModels, utilisations
from sizing.simulation.planned import simulate_plan
from tests.sizing.scenarios import LARGE
from tests.sizing.scenarios import inputs as named

SCENARIO = replace(
    LARGE,
    workload=WorkloadSpec(
        requests_per_s=3.5,
        input_tokens=Lengths(distribution="lognormal", median=1000, sigma=1.5, high=16_000),
        output_tokens=Lengths.fixed(200),
    ),
    slo=SloSpec(ttft_s=2.0, tpot_s=0.1),
)
"""Many short prompts, a few long ones, and tokens that may take their time."""


LAYOUT = Layout.split(4, 4, "h100-sxm")


def inputs(threshold: int | None = None, **load: Any) -> Inputs:  # noqa: ANN401  (keys of a load)
    """Return a scenario with what it names; behind two choices a threshold saves replicas."""
    search = replace(SCENARIO.search, local_threshold_tokens=threshold, routing="power-of-two")
    return named(replace(SCENARIO, workload=replace(SCENARIO.workload, **load), search=search))


@pytest.fixture(scope="module")
def plain() -> Found:
    """Return what is found where the scenario forbids a threshold."""
    found = search(inputs(0))
    assert isinstance(found, Found)
    return found


def test_a_prefill_replica_is_saved(plain: Found) -> None:
    """The plan that keeps short prompts from the prefill pool is cheaper, says so, and holds."""
    given = inputs()
    found = search(given)
    assert isinstance(found, Found)
    assert plain.configuration.local_threshold_tokens == 0
    assert found.configuration.replicas["prefill"] < plain.configuration.replicas["prefill"]
    assert found.configuration.gpus < plain.configuration.gpus
    plan = plan_from(json.loads(to_json(build_plan(given, found))), place="plan.json")
    assert plan.routing.local_threshold_tokens > 0
    assert Configuration.of_plan(plan) == found.configuration
    arrivals = drawn(plan.workload, RequestSource(), count=20_000, seed=9)
    outcome = simulate_plan(plan, arrivals, seed=9)
    local = arrivals.input_tokens <= plan.routing.local_threshold_tokens
    np.testing.assert_array_equal(outcome.prefill_of < 0, local)
    for name, limit_s in (("ttft", plan.slo.ttft_s), ("tpot", plan.slo.tpot_s)):
        assert limit_s is not None
        assert outcome.surely_below(name, "p99", limit_s)
    parts = [term.seconds for term in explain_plan(plan).terms if term.of == "TTFT"]
    assert sum(parts) == pytest.approx(plan.prediction.ttft.mean_s)
    promised = plan.prediction.ttft.p99_s
    assert np.quantile(outcome.series("ttft")[0], 0.99) == pytest.approx(promised, rel=0.1)


def test_prompts_that_are_all_alike_go_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fixed lengths nothing is tried, and of those that the scenario decides on neither."""
    alike = inputs(input_tokens=Lengths.fixed(2000))
    found = search(alike)
    assert isinstance(found, Found)
    assert found.configuration.local_threshold_tokens == 0
    monkeypatch.setattr(Simulations, "holds", None)
    assert choose_local_threshold(Simulations(found.models), found) is found
    assert choose_local_threshold(Simulations(StepModels(inputs(0))), found) is found


def test_a_threshold_above_all_prompts_leaves_the_prefill_pool_idle() -> None:
    """Its utilisation is nothing, and requests are served all the same."""
    given = inputs(20_000, requests_per_s=1.0)
    models = StepModels(given)
    chosen = one_replica_each(models, LAYOUT).sized({"prefill": 1, "decode": 2})
    assert utilisations(models, chosen)["prefill"] < 1e-6
    outcome = Simulations(models).outcome(chosen, AS_PREDICTED, requests=500, seed=0)
    assert (outcome.prefill_of < 0).all()
