"""How much a replica takes at once, and how long it may take to leave: from the plan's numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from serving.protocol.endpoint_config import deadlines

if TYPE_CHECKING:
    from minicluster.plan import Plan, Pool

UNPLANNED_REQUESTS = 1_000
"""Requests that a replica takes at once where no plan says how many."""

HEALTH_CHECK_S = 5.0
HEALTH_LIMIT_S = 30.0
"""How often a replica is asked whether it lives, and how long it may take: a full batch is slow."""

LOOK_S = 2.0
"""How often a replica that leaves looks whether its last request has ended."""

DRAIN_FACTOR = 2.0
"""Time to drain, in the longest that the plan knows: machines are slower than planned."""

UNPLANNED_DRAIN_S = 60.0


def limits(
    pool: Pool,
    plan: Plan | None,
    *,
    deadlines_s: tuple[float | None, float | None] = (None, None),
    token_limit: int | None = None,
) -> dict[str, Any]:
    """
    Return Ray Serve's options of one deployment that bound its queues and its end.

    A replica takes its batch and, beyond it, what it can serve until the deadline of the last:
    `capacity x deadline of prefill` requests (Little's law). The queue is the engine's, first come
    first served; more than that could only be answered too late. The callers may hold as many
    again.

    Args:
        pool: of the deployment.
        plan: the plan behind it, if there is one.
        deadlines_s: of prefill and of the KV hand-off; `None`: the plan's.
        token_limit: most tokens of one answer; `None`: what the context leaves.
    """
    alike = {
        "health_check_period_s": HEALTH_CHECK_S,
        "health_check_timeout_s": HEALTH_LIMIT_S,
        "graceful_shutdown_wait_loop_s": LOOK_S,
    }
    if plan is None:
        return {
            **alike,
            "max_ongoing_requests": UNPLANNED_REQUESTS,
            "graceful_shutdown_timeout_s": UNPLANNED_DRAIN_S,
        }
    prefill_s, handoff_s = deadlines(plan, deadlines_s)
    rate = max(plan.prediction.capacity_requests_per_s, plan.workload.requests_per_s)
    waiting = math.ceil(rate / pool.replicas * prefill_s)
    slots = pool.max_batch_size * pool.dp * pool.pp
    # Prefill's last KV cache may be fetched until its deadline; until then the replica stays.
    longest_s = prefill_s + LOOK_S + handoff_s
    if pool.role != "prefill":
        longest_s += _answer_s(plan, token_limit)
    return {
        **alike,
        "max_ongoing_requests": slots + waiting,
        "max_queued_requests": pool.replicas * (slots + waiting),
        "graceful_shutdown_timeout_s": float(math.ceil(DRAIN_FACTOR * longest_s)),
    }


def _answer_s(plan: Plan, token_limit: int | None) -> float:
    """Return how long the longest answer takes that a client may ask for, planned or not."""
    step_s = plan.slo.per_token_s or plan.prediction.tpot.p99_s
    context = plan.engine.max_model_len
    return min(token_limit or context, context) * step_s
