"""What bounds a deployment's queue and its end, from the plan and what the operator sets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import Placement, to_json
from serving.cli.inspect import bounds
from serving.cluster.state import State
from serving.deployment.compile import compile_app, limits
from serving.deployment.engine_args import DeployTarget

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from minicluster.plan import Plan
    from tests.serving.conftest import DeploymentMaker, PlanMaker


@pytest.fixture
def plan(small_model: Path, make_deployment: DeploymentMaker, make_plan: PlanMaker) -> Plan:
    """Return a plan: TTFT 30 s, TPOT 2 s, answers of 10 tokens in a context of 2,048."""
    return make_plan(make_deployment(small_model))


def _drain_s(plan: Plan, role: str, **given: Any) -> float:  # noqa: ANN401
    """Return when a replica that leaves is killed."""
    found = limits(plan.deployment.pool(role), plan, **given)["graceful_shutdown_timeout_s"]
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize(
    ("given", "longest_s"),
    [((None, None), 60 + 2 + 60), ((None, 300.0), 60 + 2 + 300), ((5.0, 7.0), 5 + 2 + 7)],
)
def test_prefill_stays_until_its_last_kv_cache_is_fetched(
    plan: Plan, given: tuple[float | None, float | None], longest_s: float
) -> None:
    """Twice both deadlines that hold, the plan's or the operator's, and the 2 s between looks."""
    assert _drain_s(plan, "prefill", deadlines_s=given) == 2 * longest_s
    assert _drain_s(plan, "prefill", deadlines_s=given, token_limit=1) == 2 * longest_s


@pytest.mark.parametrize(
    ("token_limit", "tokens"), [(None, 2048), (5000, 2048), (1000, 1000), (1, 1)]
)
def test_decode_stays_for_what_clients_may_ask(
    plan: Plan, token_limit: int | None, tokens: int
) -> None:
    """Not only for the longest answer that was planned: for all that limit and context allow."""
    longest_s = 60 + 2 + 60 + 2.0 * tokens
    assert _drain_s(plan, "decode", token_limit=token_limit) == 2 * longest_s
    longer_s = _drain_s(plan, "decode", token_limit=token_limit, deadlines_s=(None, 300.0))
    assert longer_s == 2 * (longest_s + 240)


@pytest.mark.parametrize(
    ("replicas", "ongoing", "queued"), [(1, 4 + 14, 4 + 14), (2, 4 + 7, 22), (3, 4 + 5, 27)]
)
def test_the_queue_ends_where_the_deadline_does(
    plan: Plan, replicas: int, ongoing: int, queued: int
) -> None:
    """Of two requests a second a replica takes its share of 7 s, beyond the four of its batch."""
    pool = replace(
        plan.deployment.pool("prefill"),
        replicas=replicas,
        placement=(Placement(node="laptop", gpus=tuple(range(replicas))),),
    )
    found = limits(pool, plan, deadlines_s=(7.0, None))
    assert (found["max_ongoing_requests"], found["max_queued_requests"]) == (ongoing, queued)


def test_a_load_beyond_the_capacity_bounds_the_queue(plan: Plan) -> None:
    """Of a plan for five requests a second, which saturates at two, 35 come in 7 s."""
    busier = plan.under(workload=replace(plan.workload, requests_per_s=5.0))
    found = limits(plan.deployment.pool("prefill"), busier, deadlines_s=(7.0, None))
    assert found["max_ongoing_requests"] == 4 + 35


def test_verify_expects_what_was_compiled(tmp_path: Path, plan: Plan) -> None:
    """Deadlines and token limit of `serving up` are kept for `serving verify`."""
    file, given = tmp_path / "plan.json", (None, 300.0)
    file.write_text(to_json(plan))
    target = DeployTarget(kind="cpu", deadlines_s=given, token_limit=1000)
    state = State(
        cluster_id="",
        address="127.0.0.2:1",
        base_url="http://127.0.0.1:1",
        target="cpu",
        plan=str(file),
        plan_hash="0" * 16,
        session="",
        started="",
        deployment=str(file),
        deadlines_s=given,
        token_limit=1000,
    )
    for pool in compile_app(plan.deployment, target, plan=plan).pools:
        options = pool.llm_config["deployment_config"]
        assert bounds(state)[pool.role].items() <= options.items()
