"""How much a replica takes at once, and how long it may take to leave: from the plan's numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from serving.front import DEADLINE_FACTOR

if TYPE_CHECKING:
    from sizing.plan import Plan, Pool

UNPLANNED_REQUESTS = 1_000
"""Requests that a replica takes at once where no plan says how many."""

HEALTH_CHECK_S = 5.0
HEALTH_LIMIT_S = 30.0
"""How often a replica is asked whether it lives, and how long it may take: a full batch is slow."""

DRAIN_FACTOR = 1.5
"""Time to drain, in the longest answers that the plan knows."""

UNPLANNED_DRAIN_S = 60.0


def limits(pool: Pool, plan: Plan | None) -> dict[str, Any]:
    """
    Return Ray Serve's options of one deployment that bound its queues and its end.

    A replica takes its batch and, beyond it, what it can serve until the deadline of the last:
    `capacity x 2 x SLO TTFT` requests (Little's law). The queue is the engine's, first come first
    served; more than that could only be answered too late. The callers may hold as many again.
    """
    health = {"health_check_period_s": HEALTH_CHECK_S, "health_check_timeout_s": HEALTH_LIMIT_S}
    if plan is None:
        return {
            **health,
            "max_ongoing_requests": UNPLANNED_REQUESTS,
            "graceful_shutdown_timeout_s": UNPLANNED_DRAIN_S,
        }
    deadline_s = DEADLINE_FACTOR * plan.slo.ttft_s
    rate = max(plan.prediction.capacity_requests_per_s, plan.workload.requests_per_s)
    waiting = math.ceil(rate / pool.replicas * deadline_s)
    slots = pool.max_batch_size * pool.dp * pool.pp
    # A prefill replica stays until what it prefilled last has been fetched.
    stay = {"graceful_shutdown_wait_loop_s": deadline_s} if pool.role == "prefill" else {}
    return {
        **health,
        **stay,
        "max_ongoing_requests": slots + waiting,
        "max_queued_requests": pool.replicas * (slots + waiting),
        "graceful_shutdown_timeout_s": _drain_s(pool, plan, deadline_s),
    }


def _drain_s(pool: Pool, plan: Plan, deadline_s: float) -> float:
    """Return how long the last request of a leaving replica may take, whole seconds."""
    if pool.role == "prefill":
        return float(math.ceil(2 * DRAIN_FACTOR * deadline_s))
    step_s = plan.slo.tpot_s or plan.slo.itl_s or plan.prediction.tpot.p99_s
    answer_s = 2 * deadline_s + plan.workload.output_tokens.max_tokens * step_s
    return float(math.ceil(DRAIN_FACTOR * answer_s))
