"""A plan with simulated engines: slower as asked for, and every replica of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from minicluster.engine_model.true_steps import TrueSteps, read_true_steps
from minicluster.errors import InputError
from minicluster.plan import Plan, plan_from, to_json
from minicluster.specs.slo import ClassSlo
from minicluster.specs.workload import WorkloadSpec
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.deployment.simulated import simulated_findings, slowed
from serving.protocol.messages import SimulatedEngines
from tests import plans

SLOW = DeployTarget(kind="simulated", slowdown=8.0)
STEPS = ("prefill", "decode", "path", "interference")


def test_a_slowed_plan_says_the_same_in_longer_seconds(plan: Plan) -> None:
    """Every time is longer, every rate lower, no count, share or size another; without, none is."""
    slow = slowed(plan, 8.0)
    assert slow.slo.ttft_s == 8 * plan.slo.ttft_s
    assert slow.workload.requests_per_s == plan.workload.requests_per_s / 8
    assert slow.prediction.ttft.p99_s == 8 * plan.prediction.ttft.p99_s
    assert slow.prediction.ttft_parts_s == {
        name: 8 * seconds for name, seconds in plan.prediction.ttft_parts_s.items()
    }
    assert slow.prediction.capacity_requests_per_s == plan.prediction.capacity_requests_per_s / 8
    assert slow.prediction.utilisation_fraction == plan.prediction.utilisation_fraction
    assert slow.step_model.decode == plan.step_model.decode.scaled(8)
    assert slow.step_model.path == plan.step_model.path.scaled(request=8, transfer=8)
    assert slow.pools == plan.pools
    assert to_json(slowed(plan, 1.0)) == to_json(plan)


def test_classes_are_slowed_and_the_endpoint_keeps_the_loosest_limits(plan: Plan) -> None:
    (part,) = plan.workload.parts
    rate = plan.workload.requests_per_s / 2
    quick = replace(part, name="quick", requests_per_s=rate)
    slow = replace(quick, name="slow", slo=ClassSlo(ttft_s=50.0))
    load = WorkloadSpec(requests_per_s=2 * rate, classes=(quick, slow))
    mix = plan.under(workload=load)
    assert [each.slo.ttft_s for each in slowed(mix, 8.0).workload.classes] == [None, 400.0]
    endpoint = compile_app(mix.deployment, SLOW, plan=mix).endpoint
    assert (endpoint.slo.ttft_s, endpoint.slo.tpot_s) == (400.0, slowed(plan, 8.0).slo.tpot_s)
    assert endpoint.workload.longest_answer_tokens == plan.workload.longest_answer_tokens


def test_tables_of_steps_are_told_and_slowed(plan: Plan) -> None:
    """A table goes to the engines of its pool; a slowed plan and its file hold it, line by line."""
    model = replace(plan.step_model, decode=plans.TABLE)
    plan = replace(plan, step_model=model)
    told = {
        pool.role: pool.simulated.steps.steps.of(pool.role)
        for pool in compile_app(plan.deployment, SLOW, plan=plan).pools
        if pool.simulated
    }
    assert told == {"prefill": model.prefill, "decode": plans.TABLE}
    slow = slowed(plan, 8.0)
    assert slow.step_model.decode == plans.TABLE.scaled(8)
    text = to_json(slow)
    assert "[0.0, 100.0, 400.0]" in text
    assert plan_from(json.loads(text), place="plan.json") == slow


def test_every_replica_is_told_of_the_plan_s_own_seconds(plan: Plan) -> None:
    served = compile_app(plan.deployment, SLOW, plan=plan)
    for pool in served.pools:
        planned, told = plan.pool(pool.role), pool.simulated
        assert told is not None
        assert (told.steps, told.slowdown) == (TrueSteps(steps=plan.step_model), 8.0)
        assert not told.keeps_steps
        assert told.limits.max_num_seqs == planned.max_num_seqs
        assert [each["minicluster-node"] for each in told.places] == [
            place.node for place in planned.placement
        ]
        assert told.facts["tp"] == planned.tp
    assert served.endpoint.simulated == SimulatedEngines(slowdown=8.0, text_tokens="tokenizer.json")
    assert served.endpoint.slo == slowed(plan, 8.0).slo
    assert served.endpoint.prefill_deadline_s == 16 * plan.slo.ttft_s
    assert len(served.nodes) == 1, "one raylet holds them all"
    real = compile_app(plan.deployment, DeployTarget(kind="cpu"), plan=plan)
    assert (real.endpoint.simulated, real.endpoint.slo) == (None, plan.slo)


def test_more_replicas_than_memory_are_refused_with_those_that_fit(plan: Plan) -> None:
    assert [*simulated_findings(plan.deployment, 24e9)] == []
    [found] = simulated_findings(plan.deployment, 1.55e9)
    assert "room for 1 " in found
    [found] = simulated_findings(plan.deployment, 0.1e9)
    assert "room for 0 " in found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"padded_to": [8, 4]}, r"padded_to is \[8, 4\]; it has to be ascending numbers"),
        ({"padding": [4, 8]}, "but there is no such key$"),
    ],
)
def test_step_times_that_are_none(
    plan: Plan, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    """The message names the key, and no list of keys that does not have it."""
    steps = {name: asdict(getattr(plan.step_model, name)) for name in STEPS}
    file = tmp_path / "truth.json"
    file.write_text(json.dumps({"steps": steps, **change}))
    with pytest.raises(InputError, match=says):
        read_true_steps(file)
