"""What bounds a deployment's queue and its end, from the plan and what the operator sets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.plan import to_json
from serving.cli.inspect import bounds
from serving.deployment.compile import compile_app, limits
from serving.deployment.engine_args import DeployTarget
from tests.serving.plans import make_state, places

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.plan import Plan


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
    ("role", "replicas", "rate", "deadline_s", "ongoing", "queued"),
    [
        ("prefill", 1, 1.0, 7.0, 4 + 14, 18),
        ("prefill", 2, 1.0, 7.0, 4 + 7, 22),
        ("prefill", 3, 1.0, 7.0, 4 + 5, 27),
        ("prefill", 1, 5.0, 7.0, 4 + 35, 39),  # a load beyond the capacity bounds the queue
        ("prefill", 1, 1.0, None, 4 + 120, 124),  # twice the TTFT of 30 s
        ("decode", 1, 1.0, None, 16 + 120, 136),
    ],
)
def test_the_queue_ends_where_the_deadline_does(  # noqa: PLR0913, PLR0917  (a table)
    plan: Plan,
    role: str,
    replicas: int,
    rate: float,
    deadline_s: float | None,
    ongoing: int,
    queued: int,
) -> None:
    """Of two requests a second a replica takes its share until the deadline, beyond its batch."""
    placement = places(("laptop", tuple(range(replicas))))
    pool = replace(plan.deployment.pool(role), replicas=replicas, placement=placement)
    loaded = plan.under(workload=replace(plan.workload, requests_per_s=rate))
    found = limits(pool, loaded, deadlines_s=(deadline_s, None))
    assert (found["max_ongoing_requests"], found["max_queued_requests"]) == (ongoing, queued)


def test_verify_expects_what_was_compiled(tmp_path: Path, plan: Plan) -> None:
    """Deadlines and token limit of `serving up` are kept for `serving verify`."""
    file = tmp_path / "plan.json"
    file.write_text(to_json(plan))
    given: dict[str, Any] = {"deadlines_s": (None, 300.0), "token_limit": 1000}
    found = bounds(make_state(plan=str(file), deployment=str(file), **given))
    for pool in compile_app(plan.deployment, DeployTarget(kind="cpu", **given), plan=plan).pools:
        assert found[pool.role].items() <= pool.llm_config["deployment_config"].items()
