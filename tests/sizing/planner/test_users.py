"""Users in place of a rate: the rate that covers them, in plans, predictions and studies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sizing
from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import ClassPrediction, Latency, Prediction, plan_from, to_json
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.edge import TOLERANCE, covering_rates
from sizing.planner.plan import NoPlan, at_planned_rate, plan_classes
from sizing.planner.studies.capacity import capacity
from sizing.planner.studies.decisions import decisions
from sizing.planner.studies.defaults import THINK_S
from sizing.planner.studies.grid import Swept
from sizing.scenario import Scenario
from sizing.simulation.planned import simulate_plan

if TYPE_CHECKING:
    from collections.abc import Callable

USERS, THINK = 120, 8.0
ASKED = {
    "workload.users": USERS, "workload.think_s": THINK, "search.pools": "mixed", "search.tp": [1],
}  # fmt: skip


def load_of(*users: int, think_s: float, rate: float) -> WorkloadSpec:
    """Return users of one load, or of a class each."""
    classes = tuple(
        RequestClass(
            name=f"class-{at}",
            requests_per_s=rate,
            users=each,
            think_s=think_s,
            input_tokens=Lengths.fixed(100),
            output_tokens=Lengths.fixed(10),
        )
        for at, each in enumerate(users)
    )
    if len(classes) > 1:
        return WorkloadSpec(requests_per_s=rate * len(users), classes=classes)
    return WorkloadSpec(requests_per_s=rate, classes=classes).apart[0]


def predicted(load: WorkloadSpec, e2e_s: dict[str, float]) -> Prediction:
    each = {
        name: Latency(mean_s=mean_s, p50_s=mean_s, p90_s=mean_s, p95_s=mean_s, p99_s=mean_s)
        for name, mean_s in e2e_s.items()
    }
    first = next(iter(each.values()))
    return Prediction(
        **dict.fromkeys(("ttft", "tpot", "itl", "e2e"), first),
        output_tokens_per_s=1.0,
        capacity_requests_per_s=1.0,
        utilisation_fraction={},
        bottleneck={},
        ttft_parts_s={},
        by_class={
            name: ClassPrediction(ttft=own, tpot=own, e2e=own)
            for name, own in each.items()
            if load.classes
        },
    )


def rates_of(
    load: WorkloadSpec, e2e_s: Callable[[float], float | None]
) -> tuple[WorkloadSpec, list[float]]:
    """Return the load that covers its users where E2E depends on the whole rate, and the trials."""
    tried = []

    def at(trial: WorkloadSpec) -> tuple[WorkloadSpec, Prediction | None]:
        tried.append(trial.requests_per_s)
        mean_s = e2e_s(trial.requests_per_s)
        if mean_s is None:
            return trial, None
        return trial, predicted(trial, dict.fromkeys([each.name for each in trial.parts], mean_s))

    return covering_rates(load, at), tried


@given(st.integers(1, 10**5), st.floats(0, 100), st.floats(0.01, 100), st.floats(0.01, 1))
def test_a_latency_that_no_rate_changes_gives_littles_law(
    users: int, think_s: float, e2e_s: float, below: float
) -> None:
    """The rate is users / (E2E + think), or a little more, after two trials at most."""
    sent = users / (e2e_s + think_s)
    found, tried = rates_of(load_of(users, think_s=think_s, rate=below * sent), lambda _: e2e_s)
    assert 1 - 1e-9 <= found.requests_per_s / sent <= 1 + TOLERANCE
    assert len(tried) <= 2
    assert (found.users, found.think_s) == (users, think_s)


@given(st.integers(1, 5000), st.floats(0, 20), st.floats(0.5, 50), st.floats(0.001, 1000))
def test_a_queue_that_saturates_has_a_rate_below_its_capacity(
    users: int, think_s: float, capacity_per_s: float, start: float
) -> None:
    """E2E of an M/M/1 queue, 1 / (capacity - rate), wherever the trials begin."""
    found, tried = rates_of(
        load_of(users, think_s=think_s, rate=start),
        lambda rate: None if rate >= capacity_per_s else 1 / (capacity_per_s - rate),
    )
    # users = rate (think + 1 / (capacity - rate)): the smaller root of a square equation.
    a, b, c = think_s, -(users + 1 + think_s * capacity_per_s), users * capacity_per_s
    exact = 2 * c / (-b + math.sqrt(b * b - 4 * a * c))
    if len(tried) < 16:
        assert exact * (1 - 1e-6) <= found.requests_per_s <= exact * (1 + TOLERANCE) * 1.001


@pytest.mark.parametrize(("slow_s", "fast_s"), [(10.0, 5.0), (10.0, 9.5)])
def test_a_jump_of_the_latency_is_covered_from_above(slow_s: float, fast_s: float) -> None:
    """Where a dearer plan is faster, so that users send more, the rate is just above the jump."""
    jump = 100 / (0.5 * (slow_s + fast_s) + 10)
    found, tried = rates_of(
        load_of(100, think_s=10.0, rate=3.0), lambda rate: slow_s if rate >= jump else fast_s
    )
    assert jump <= found.requests_per_s <= jump * (1 + TOLERANCE)
    assert len(tried) <= 8


def test_each_class_has_the_rate_of_its_own_users() -> None:
    load = load_of(30, 300, think_s=4.0, rate=1.0)
    e2e_s = {"class-0": 1.0, "class-1": 11.0}
    found = covering_rates(load, lambda trial: (trial, predicted(trial, e2e_s)))
    for part, sent in zip(found.classes, (6.0, 20.0), strict=True):
        assert sent <= part.requests_per_s <= sent * (1 + TOLERANCE)


def test_without_a_latency_at_any_rate_the_last_result_is_returned() -> None:
    found, tried = rates_of(load_of(5, think_s=1.0, rate=1.0), lambda _: None)
    assert found.requests_per_s == min(tried)


@pytest.fixture(scope="module")
def asked() -> Scenario:
    return Scenario.load("llama-3.1-8b-h100", ASKED)


@pytest.fixture(scope="module")
def planned(asked: Scenario) -> sizing.Plan:
    return sizing.plan(asked)


def test_a_plan_covers_its_users_and_holds_for_them(asked: Scenario, planned: sizing.Plan) -> None:
    """In a closed loop of them, simulated, they send no more than planned, and the SLO holds."""
    plan = planned
    rate = plan.workload.requests_per_s
    sent = USERS / (plan.prediction.e2e.mean_s + THINK)
    assert sent <= rate <= sent * (1 + TOLERANCE)
    assert plan.workload == asked.scenario.workload.with_rates({"": rate})
    assert plan_from(json.loads(to_json(plan)), place="plan") == plan
    source = RequestSource(users=USERS, think_s=THINK)
    outcome = simulate_plan(plan, drawn(plan.workload, source, count=9000, seed=5), seed=5)
    stay_s = float(outcome.series("e2e")[0].mean())
    assert USERS / (stay_s + THINK) == pytest.approx(rate, rel=0.04)
    for metric, limit_s in plan.slo.limits_s.items():
        assert np.quantile(outcome.series(metric)[0], plan.slo.level) <= limit_s
    # Nothing else is planned than for that rate.
    fixed = at_planned_rate(asked)
    assert not fixed.scenario.workload.has_users
    same = sizing.plan(fixed)
    assert (same.pools, same.prediction) == (plan.pools, plan.prediction)


def test_capacity_counts_users_as_the_load_has_them(asked: Scenario, planned: sizing.Plan) -> None:
    """What the plan's GPUs carry are at least the plan's users, thinking as long."""
    found = capacity(asked, [planned.cost.gpus])
    assert found.think_s == THINK
    assert found.points[0].users >= USERS
    assert capacity(asked, [1], think_s=1.0).think_s == 1.0
    assert capacity(at_planned_rate(asked), [1]).think_s == THINK_S


def test_users_that_no_pools_hold_are_infeasible(asked: Scenario) -> None:
    with pytest.raises(NoPlan, match="GPUs") as none:
        sizing.plan(asked.with_({"workload.users": 50_000}))
    assert "workload.users" in none.value.infeasible.way_out or "max_gpus" in str(none.value)
    with pytest.raises(NoPlan, match="TTFT"):
        sizing.plan(asked.with_({"slo.ttft_s": 0.001}))


def test_pools_too_small_for_their_users_slow_them_down(asked: Scenario) -> None:
    """A rate saturates pools; users who wait for them do not, they miss the SLO."""
    many = asked.with_({"workload.users": 60, "workload.think_s": 1.0})
    found = sizing.predict(many, mixed="1xTP1")
    sent = 60 / (found.prediction.e2e.mean_s + 1.0)
    assert sent <= found.workload.requests_per_s <= sent * (1 + TOLERANCE)
    assert found.workload.requests_per_s < found.prediction.capacity_requests_per_s
    assert not found.meets_slo
    for key, value in (("requests_per_s", 500.0), ("users", 20_000)):
        with pytest.raises(NegativeAnswer, match=rf"saturate.*lower workload\.{key}"):
            sizing.predict(many.with_({f"workload.{key}": value}), mixed="1xTP1")


def test_users_of_one_class_beside_the_rate_of_another(asked: Scenario) -> None:
    """On shared pools and on own ones each class's users are covered by its own latency."""
    chat, other = load_of(USERS, 1, think_s=THINK, rate=5.0).classes
    other = replace(other, users=None, think_s=0.0)
    mix = replace(
        asked,
        scenario=replace(
            asked.scenario, workload=WorkloadSpec(requests_per_s=10.0, classes=(chat, other))
        ),
    )
    found = plan_classes(mix)
    assert isinstance(found.shared, sizing.Plan)
    for plan, name in ((found.shared, "class-0"), (found.own_plans["class-0"], "")):
        (rate,) = (each.requests_per_s for each in plan.workload.parts if each.name == name)
        sent = USERS / (plan.prediction.latency("e2e", name).mean_s + THINK)
        assert sent <= rate <= sent * (1 + TOLERANCE)
    assert found.shared.workload.classes[1].requests_per_s == 5.0
    assert found.own_plans["class-1"].workload.requests_per_s == 5.0


def test_decisions_forecast_users(asked: Scenario) -> None:
    rows = decisions(asked, only=["rate"]).rows
    assert {row.value for row in rows} == {"users -25%", "users +25%"}
    loads = [row.result.plans[""].workload for row in rows]
    assert {load.users for load in loads} == {0.75 * USERS, 1.25 * USERS}


@pytest.mark.parametrize("key", ["workload.users", "workload.think_s"])
def test_a_split_map_has_no_axis_of_users(asked: Scenario, key: str) -> None:
    with pytest.raises(InputError, match=r"both kinds have one rate.*capacity"):
        sizing.split_map(asked, Swept(key=key, values=("1", "2")))
