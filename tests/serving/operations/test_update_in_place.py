"""A plan laid over a deployment that is up to be measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.errors import InputError
from minicluster.plan import to_json
from serving.cluster.ports import free_port
from serving.cluster.state import State, write_state
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.operations import deploy as operations
from serving.operations.deploy import Site
from tests.serving.plans import make_deployment, make_plan

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.plan import Plan

RUNNING = "0123456789abcdef"


@pytest.fixture
def plan(small_model: Path) -> Plan:
    """Return a plan that could be deployed."""
    return make_plan(make_deployment(small_model))


@pytest.fixture
def running(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Have the plan's deployment up, without a plan behind it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(operations, "is_gone", lambda _state: False)
    file = tmp_path / "deployment.json"
    file.write_text(to_json(plan.deployment))
    state = State(
        cluster_id=RUNNING,
        address="127.0.0.1:1",
        base_url="http://127.0.0.1:1",
        target="cpu",
        plan=str(tmp_path / "plan.json"),
        plan_hash="",
        session="",
        started="",
        deployment=str(file),
        nixl_port=20_100,
        planned=False,
        ready=True,
    )
    write_state(state)
    return state


def laid_over(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Deploy *plan*; return the state that it starts from, and what is to be served."""
    seen: list[Any] = []

    def deploy(served: object, _site: Site, state: State, **_: object) -> None:
        seen.extend([state, served])
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "deploy", deploy)
    site = Site(target="cpu", host="127.0.0.1", port=free_port("127.0.0.1"))
    with pytest.raises(KeyboardInterrupt):
        operations.bring_up(plan.deployment, site, report=lambda _: None, plan=plan)
    return seen


def test_a_plan_takes_over_the_cluster_that_was_measured(
    plan: Plan, running: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cluster and side-channel ports stay those that run; the plan's limits come with it."""
    state, served = laid_over(plan, monkeypatch)

    assert (state.cluster_id, state.address, state.nixl_port) == (
        RUNNING,
        running.address,
        running.nixl_port,
    )
    assert served.endpoint.slo == plan.slo


def test_engines_of_plan_and_measurement_are_the_same(plan: Plan) -> None:
    """A plan changes what bounds queues, and nothing of what an engine is started with."""
    target = DeployTarget(kind="cpu", nixl_port=20_100)
    measured, planned = (
        compile_app(plan.deployment, target, plan=behind).pools for behind in (None, plan)
    )
    bounds = "deployment_config"
    for before, after in zip(measured, planned, strict=True):
        engine = {key: value for key, value in before.llm_config.items() if key != bounds}
        assert engine == {key: value for key, value in after.llm_config.items() if key != bounds}
        assert before.llm_config[bounds] != after.llm_config[bounds]


@pytest.mark.parametrize("change", ["planned", "not ready", "model", "nodes", "routing"])
@pytest.mark.usefixtures("running")
def test_anything_else_that_runs_is_not_replaced(
    plan: Plan, running: State, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment with a plan, or that differs in more than its plan, has to be taken down."""
    other = plan
    if change == "planned":
        write_state(replace(running, planned=True))
    elif change == "not ready":
        write_state(replace(running, ready=False))
    elif change == "model":
        model = replace(plan.model, id="another")
        other = replace(plan, inputs=replace(plan.inputs, model=model))
    elif change == "routing":
        other = replace(plan, routing=replace(plan.routing, policy="round-robin"))
    else:
        pools = tuple(
            replace(
                pool, placement=tuple(replace(each, node="elsewhere") for each in pool.placement)
            )
            for pool in plan.pools
        )
        other = replace(plan, pools=pools)
    monkeypatch.setattr(operations, "deploy", lambda *_, **__: pytest.fail("it was replaced"))
    site = Site(target="cpu", host="127.0.0.1", port=free_port("127.0.0.1"))
    with pytest.raises(InputError, match="serving down"):
        operations.bring_up(other.deployment, site, report=lambda _: None, plan=other)
