"""What bounds a deployment's queue and its end, from the plan and what the operator sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence, kv_bytes_per_token
from minicluster.engine_model.planned_limits import kv_blocks
from minicluster.plan import Deployment, Plan
from serving.cli.inspect import bounds
from serving.deployment.compile import compile_app, limits
from serving.deployment.engine_args import DeployTarget
from sizing.catalog import find_model
from tests.serving.plans import deployed, make_pool, places


@pytest.mark.parametrize(
    ("role", "deadlines_s", "token_limit", "longest_s"),
    [
        ("prefill", (None, None), None, 60 + 2 + 60),
        ("prefill", (None, 300.0), 1, 60 + 2 + 300),
        ("prefill", (5.0, 7.0), None, 5 + 2 + 7),
        ("decode", (None, None), None, 60 + 2 + 60 + 2.0 * 2048),
        ("decode", (None, 300.0), 5000, 60 + 2 + 300 + 2.0 * 2048),
        ("decode", (None, None), 1000, 60 + 2 + 60 + 2.0 * 1000),
        ("decode", (5.0, None), 1, 5 + 2 + 60 + 2.0),
    ],
)
def test_a_replica_that_leaves_may_end_what_it_has(
    plan: Plan,
    role: str,
    deadlines_s: tuple[float | None, float | None],
    token_limit: int | None,
    longest_s: float,
) -> None:
    """
    Twice the longest time: both deadlines, the plan's or the operator's, and 2 s between looks.

    Decode has besides the time of all tokens that limit and context allow, planned or not.
    """
    pool = plan.deployment.pool(role)
    found = limits(pool, plan, deadlines_s=deadlines_s, token_limit=token_limit)
    assert found["graceful_shutdown_timeout_s"] == 2 * longest_s


@pytest.mark.parametrize(
    ("role", "replicas", "rate", "deadline_s", "ongoing"),
    [
        ("prefill", 1, 1.0, 7.0, 4 + 14),
        ("prefill", 2, 1.0, 7.0, 4 + 7),
        ("prefill", 3, 1.0, 7.0, 4 + 5),
        ("prefill", 1, 5.0, 7.0, 4 + 35),  # a load beyond the capacity bounds the queue
        ("prefill", 1, 1.0, None, 4 + 120),  # twice the TTFT of 30 s
        ("decode", 1, 1.0, None, 16 + 120),
    ],
)
def test_the_queue_ends_where_the_deadline_does(
    plan: Plan,
    role: str,
    replicas: int,
    rate: float,
    deadline_s: float | None,
    ongoing: int,
) -> None:
    """Of two requests a second a replica takes its share until the deadline, beyond its batch."""
    placement = places(("laptop", tuple(range(replicas))))
    pool = replace(plan.deployment.pool(role), replicas=replicas, placement=placement)
    loaded = plan.under(workload=replace(plan.workload, requests_per_s=rate))
    found = limits(pool, loaded, deadlines_s=(deadline_s, None))
    assert found["max_ongoing_requests"] == ongoing


def test_without_a_plan_the_queue_has_an_end(plan: Plan) -> None:
    assert limits(plan.deployment.pool("decode"), None)["max_ongoing_requests"] == 1_000


def test_verify_expects_what_was_compiled(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines, limits of tokens and requests of `serving up` are those that `verify` expects."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"deadlines_s": (None, 300.0), "token_limit": 1000}
    found = bounds(deployed(plan, **given))
    app = compile_app(plan.deployment, DeployTarget(kind="cpu", **given), plan=plan)
    for pool, told in zip(app.pools, app.endpoint.pools, strict=True):
        assert found[pool.role].items() <= pool.llm_config["deployment_config"].items()
        assert told.max_ongoing_requests == found[pool.role]["max_ongoing_requests"]
    slow = {**given, "target": "simulated", "slowdown": 8.0}
    app_slow = compile_app(
        plan.deployment, DeployTarget(kind="simulated", slowdown=8.0, **given), plan=plan
    )
    slowed_bounds = bounds(deployed(plan, **slow))
    for pool in app_slow.pools:
        assert slowed_bounds[pool.role].items() <= pool.llm_config["deployment_config"].items()
    assert slowed_bounds["decode"] != found["decode"]
    # What is not given stays the plan's: twice the TTFT.
    assert (app.endpoint.prefill_deadline_s, app.endpoint.kv_wait_deadline_s) == (60.0, 300.0)


def test_windows_of_all_sequences_come_first(deployment: Deployment) -> None:
    """Blocks of layers that see everything share what the windows of sliding layers leave (M3)."""
    model = find_model("gpt-oss-120b")
    pool = make_pool("mixed", max_num_seqs=40, kv_bytes=30e9)
    planned = replace(deployment, model=model, pools=(pool,))
    size, longest = planned.engine.block_size, planned.engine.max_model_len
    block_bytes = size * kv_bytes_per_token(model, tp=1)
    whole = kv_bytes_per_sequence(model, longest, tp=1, block_size=size)
    window = whole - block_bytes * (longest // size)
    assert window > 0
    assert kv_blocks(planned, pool) == int((30e9 - 40 * window) / block_bytes) - 1  # the null block
