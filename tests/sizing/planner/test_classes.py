"""Plans of several classes of requests, and E2E limits: properties of the search."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import sizing
from minicluster.errors import InputError
from minicluster.plan import Inputs, Plan, StepModel, plan_from, to_json
from minicluster.specs.scenario import CostChoice
from minicluster.specs.slo import ClassSlo, SloSpec
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.candidates import list_candidates
from sizing.planner.configuration import cost_of_plan, with_load
from sizing.planner.error_model import AS_PREDICTED
from sizing.planner.plan import ClassPlans, NoPlan, own_inputs, plan, plan_classes
from sizing.planner.step_models import StepModels, utilisations
from sizing.planner.studies.grid import Swept
from sizing.planner.studies.result import figures, plan_scenario
from sizing.planner.studies.split_map import split_map
from sizing.report.questions import split_map_sections
from sizing.scenario import Scenario
from sizing.simulation.planned import simulate_plan
from tests.sizing.scenarios import SMALL, inputs, proposed

CHAT = RequestClass(
    name="chat",
    requests_per_s=20.0,
    input_tokens=Lengths.fixed(1000),
    output_tokens=Lengths.fixed(200),
)
SUMMARIES = RequestClass(
    name="summaries",
    requests_per_s=4.0,
    input_tokens=Lengths(distribution="uniform", low=4000, high=12000),
    output_tokens=Lengths.fixed(100),
    slo=ClassSlo(ttft_s=4.0, tpot_s=0.1, e2e_s=20.0),
)


def of(*classes: RequestClass, slo: SloSpec | None = None) -> Inputs:
    rate = sum(each.requests_per_s for each in classes)
    load = WorkloadSpec(requests_per_s=rate, classes=classes)
    return inputs(replace(SMALL, workload=load, slo=slo or SMALL.slo))


@cache
def pools_of_the_mix() -> ClassPlans:
    """Return what is planned for both classes, shared and own."""
    return plan_classes(of(CHAT, SUMMARIES))


def plain(part: RequestClass, slo: SloSpec | None = None) -> Inputs:
    load = WorkloadSpec(
        requests_per_s=part.requests_per_s,
        input_tokens=part.input_tokens,
        output_tokens=part.output_tokens,
    )
    return inputs(replace(SMALL, workload=load, slo=slo or SMALL.slo))


def test_a_single_class_is_planned_like_a_load_without_classes() -> None:
    """Pools, routing, step model and every predicted number are the same, bit for bit."""
    one, without = proposed(of(CHAT)), proposed(plain(CHAT))
    for name in ("pools", "routing", "engine", "step_model"):
        assert getattr(one, name) == getattr(without, name)
    assert replace(one.prediction, by_class={}) == without.prediction
    own = one.prediction.by_class["chat"]
    assert (own.ttft, own.tpot) == (one.prediction.ttft, one.prediction.tpot)
    assert one.headroom.load_factor == without.headroom.load_factor
    sure, known = one.confidence, without.confidence
    assert sure is not None
    assert known is not None
    assert list(sure.tightest.values()) == list(known.tightest.values())
    assert sure.requests == known.requests
    assert plan_classes(of(CHAT)).own == {}


def test_two_classes_alike_are_one_of_the_summed_rate() -> None:
    halves = [replace(CHAT, name=name, requests_per_s=10.0) for name in ("a", "b")]
    both, one = proposed(of(*halves)), proposed(plain(CHAT))
    assert abs(both.cost.gpus - one.cost.gpus) <= 1
    assert both.prediction.capacity_requests_per_s == pytest.approx(
        one.prediction.capacity_requests_per_s * both.cost.gpus / one.cost.gpus, rel=0.35
    )
    for name in ("a", "b"):
        found = both.prediction.latency("ttft", name)
        assert found.p50_s == pytest.approx(both.prediction.ttft.p50_s, rel=0.05)


def test_capacity_taken_by_a_mix_is_that_of_its_classes_together() -> None:
    """Prefill adds up exactly; decode steps that classes share cost no more than apart."""
    mix = of(CHAT, SUMMARIES)
    steps: dict[Any, StepModel] = {}
    models = StepModels(mix, steps)
    apart = [StepModels(with_load(mix, load), steps) for load in mix.scenario.workload.apart]
    for each in list_candidates(models, AS_PREDICTED).split[:3]:
        parts = [utilisations(one, each) for one in apart]
        whole = utilisations(models, each)
        for role, used in whole.items():
            assert used == pytest.approx(sum(part[role] for part in parts), rel=0.02)


def test_every_class_holds_its_limits_when_simulated() -> None:
    """Also with requests of another seed; the plan says so by class, and its file keeps it."""
    built = proposed(of(CHAT, SUMMARIES))
    outcome = simulate_plan(
        built, drawn(built.workload, RequestSource(), count=12_000, seed=77), seed=77
    )
    for at, (name, slo) in enumerate(built.promises.items()):
        for metric, limit_s in slo.limits_s.items():
            assert built.prediction.latency(metric, name).at(slo.percentile) <= limit_s
            values, _ = outcome.series(metric, at)
            assert np.quantile(values, slo.level) <= limit_s
    together = sum(len(outcome.series("ttft", at)[0]) for at in (0, 1))
    assert together == len(outcome.series("ttft")[0])
    assert built.slo.ttft_s == 4.0  # what the endpoint, which knows no classes, can hold
    assert plan_from(json.loads(to_json(built)), place="plan") == built


def test_the_cheaper_pools_are_chosen() -> None:
    """The plans are those of shared pools, and of each class as an ordinary scenario."""
    mix, found = of(CHAT, SUMMARIES), pools_of_the_mix()
    assert isinstance(found.shared, Plan)
    assert list(found.own_plans) == ["chat", "summaries"]
    costs = [cost_of_plan(found.shared), sum(map(cost_of_plan, found.own_plans.values()))]
    assert sum(map(cost_of_plan, found.chosen.values())) == min(costs)
    assert found.own["chat"] == proposed(plain(CHAT))
    assert own_inputs(mix)["summaries"].scenario.slo == SUMMARIES.slo.over(SMALL.slo)
    assert replace(found, own={}).chosen == {"": found.shared}
    assert replace(found, shared=None).chosen == found.own_plans


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        (CostChoice(max_power_w=1000.0), "cost.max_power_w is 1.0 kW"),
        (CostChoice(), "own pools need"),
    ],
)
def test_own_pools_are_within_the_budgets_together(cost: CostChoice, says: str) -> None:
    """Each class alone is within them; the reason says what all of them take."""
    mix = of(CHAT, SUMMARIES)
    search = replace(mix.scenario.search, class_pools="own")
    tight = replace(mix, scenario=replace(mix.scenario, search=search, cost=cost))
    if cost == CostChoice():
        most = max(each.cost.gpus for each in pools_of_the_mix().own_plans.values())
        tight = replace(tight, cluster=replace(tight.cluster, max_gpus=most))
    with pytest.raises(NoPlan) as found:
        plan_classes(tight)
    assert says in found.value.infeasible.reason
    assert found.value.infeasible.reason.startswith("own pools")


def test_studies_weigh_pools_of_their_own_as_a_plan_does() -> None:
    """GPUs, power and tokens are those of all pools; the limit and headroom of the tightest."""
    found = pools_of_the_mix()
    row = plan_scenario(of(CHAT, SUMMARIES), "x")
    assert row.plans == found.chosen
    each, both = found.own_plans.values(), figures(found.own_plans)
    assert both.gpus == sum(one.cost.gpus for one in each)
    assert both.running.power_w == sum(one.cost.gpu_power_w or 0 for one in each)
    assert both.running.joules_per_output_token == pytest.approx(
        (both.running.power_w or 0) / sum(one.prediction.output_tokens_per_s for one in each)
    )
    tightest = min(found.own_plans, key=lambda name: found.own_plans[name].headroom.load_factor)
    assert both.headroom_factor == found.own_plans[tightest].headroom.load_factor
    assert both.binds == f"{tightest} {found.own_plans[tightest].headroom.binds}"
    assert (both.ttft_s, both.tpot_s) == (None, None)
    one = figures({"": found.own["chat"]})
    assert one.ttft_s == found.own["chat"].prediction.ttft.p99_s
    assert one.layout in both.layout


def test_the_capacity_of_classes_is_that_of_the_better_pools() -> None:
    """Own pools hold their class's share of the rate; the GPUs of a plan carry its rate."""
    asked = Scenario.load("chat-and-summaries-8b", {"search.pools": "mixed", "search.tp": [1]})
    planned = sum(each.cost.gpus for each in plan_classes(asked).chosen.values())
    curves = [
        sizing.capacity(asked.with_({"search.class_pools": pools}), [1, planned])
        for pools in ("shared", "any")
    ]
    assert list(curves[1].to_frame()["class"]) == ["", "", "chat", "summaries"]
    shared, best = (curve.points for curve in curves)
    assert best[1].requests_per_s > 0.9 * 50
    assert best[1].requests_per_s > shared[1].requests_per_s >= shared[0].requests_per_s
    assert best[0] == shared[0]  # one GPU is none for two classes
    own = best[1].own
    assert {name: each.requests_per_s / best[1].requests_per_s for name, each in own.items()} == (
        pytest.approx({"chat": 0.8, "summaries": 0.2})
    )
    for name, each in own.items():
        assert each.prediction is not None
        slo = asked.scenario.promises[name]
        for metric, limit_s in slo.limits_s.items():
            assert getattr(each.prediction, metric).at(slo.percentile) <= limit_s
    assert best[1].users == pytest.approx(sum(each.users for each in own.values()))
    assert sum(each.used_gpus for each in own.values()) == best[1].used_gpus <= planned
    assert best[1].binds.split()[0] in own


def test_gpus_are_divided_so_that_no_class_limits_the_rate_more_than_it_has_to() -> None:
    """Three to one and one to three are both worse than half of the GPUs for each class."""
    few = {"search.class_pools": "own", "search.pools": "mixed", "search.tp": [1]}
    asked = Scenario.load("chat-and-summaries-8b", few)
    two, four = sizing.capacity(asked, [2, 4]).points
    assert [each.gpus for each in four.own.values()] == [2, 2]
    assert four.requests_per_s > 2 * two.requests_per_s


def test_studies_that_know_no_own_pools_say_so() -> None:
    asked = Scenario.load("chat-and-summaries-8b", {"search.class_pools": "own"})
    with pytest.raises(InputError, match="looks at shared pools only"):
        split_map(asked)
    x, y = (
        Swept(key=key, values=("2",)) for key in ("slo.ttft_s", "workload.classes.chat.slo.ttft_s")
    )
    found = split_map(asked.with_({"search.class_pools": "any"}), x, y)
    assert any(
        "2 classes of requests share pools here" in str(each) for each in split_map_sections(found)
    )


def test_a_tighter_limit_never_costs_fewer_gpus() -> None:
    gpus = [
        proposed(plain(CHAT, replace(SMALL.slo, e2e_s=limit_s))).cost.gpus
        for limit_s in (100.0, 2.5, 1.5, 1.1)
    ]
    assert gpus == sorted(gpus)
    assert gpus[-1] > gpus[0] == proposed(plain(CHAT)).cost.gpus
    hurried = replace(CHAT, slo=ClassSlo(tpot_s=0.008))
    assert proposed(of(hurried, SUMMARIES)).cost.gpus >= proposed(of(CHAT, SUMMARIES)).cost.gpus


def test_an_e2e_limit_that_nothing_holds_says_by_how_much() -> None:
    with pytest.raises(NoPlan) as found:
        plan(of(replace(CHAT, slo=ClassSlo(e2e_s=0.2)), SUMMARIES))
    none = asdict(found.value.infeasible)
    assert none["binds"] == "SLO floor"
    assert "chat E2E p99 of a request without any load" in none["reason"]
    assert none["missed_by"].startswith("chat E2E p99")
    assert none["nearest_gpus"] > 0


@pytest.mark.parametrize("asked", ["shared", "own"])
def test_only_the_pools_that_are_asked_for_are_planned(asked: str) -> None:
    """Nothing holds the chat's limit; the reason names the pools that were tried."""
    mix = of(replace(CHAT, slo=ClassSlo(e2e_s=0.2)), SUMMARIES)
    search = replace(mix.scenario.search, class_pools=asked)
    with pytest.raises(NoPlan) as found:
        plan_classes(replace(mix, scenario=replace(mix.scenario, search=search)))
    reason = found.value.infeasible.reason
    assert ("own pools of chat" in reason) == (asked == "own")
    assert "shared pools" not in reason
    assert "E2E p99" in reason


@pytest.mark.parametrize("stopped_at", [1, 2])
def test_ctrl_c_leaves_no_pools_for_some_classes_only(
    stopped_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after shared pools are planned, the result is their plan, marked as interrupted."""
    built = proposed(of(CHAT, SUMMARIES))
    calls = iter(range(9))

    def planned(given: Inputs, **_: object) -> Plan:
        if next(calls) == stopped_at:
            raise KeyboardInterrupt
        return replace(built, inputs=given)

    monkeypatch.setattr("sizing.planner.plan.plan", planned)
    found = plan_classes(of(CHAT, SUMMARIES))
    assert (list(found.chosen), found.own, found.interrupted) == ([""], {}, True)


@pytest.mark.parametrize("lacking", [0, 1])
def test_own_pools_may_take_all_the_gpus_there_are(
    lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = proposed(of(CHAT, SUMMARIES))
    monkeypatch.setattr(
        "sizing.planner.plan.plan",
        lambda given, **_: replace(built, inputs=given),
    )
    mix, needed = of(CHAT, SUMMARIES), 2 * built.cost.gpus
    search = replace(mix.scenario.search, class_pools="own")
    cluster = replace(mix.cluster, max_gpus=needed - lacking)
    given = replace(mix, scenario=replace(mix.scenario, search=search), cluster=cluster)
    if not lacking:
        assert list(plan_classes(given).own_plans) == ["chat", "summaries"]
        return
    with pytest.raises(NoPlan) as found:
        plan_classes(given)
    none = found.value.infeasible
    assert (none.nearest_gpus, none.missed_by) == (needed, "1 GPUs")
    assert f"max_gpus = {needed}," in none.way_out


def test_the_reason_names_shared_and_own_pools_where_both_were_tried() -> None:
    """In the order in which they were tried."""
    mix = of(replace(CHAT, slo=ClassSlo(e2e_s=0.2)), SUMMARIES)
    with pytest.raises(NoPlan) as found:
        plan_classes(mix)
    reason = found.value.infeasible.reason
    assert reason.startswith("shared pools: ")
    assert "; own pools of chat: " in reason
