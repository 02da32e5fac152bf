"""
The balance of prefill and decode: a pure decision within the plan's devices, from measurements.

How many replicas a rate needs is another question: `minicluster.plan.scaling` answers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Pool
    from minicluster.specs.slo import SloSpec

MIN_REQUESTS = 100
"""Fewest requests from which SLO attainment at p99 can be judged."""

LONG_QUEUE = 0.25
"""Prefill queue, as a share of the TTFT limit, from which on prefill counts as overloaded."""

SHORT_QUEUE = 0.05
"""Prefill queue, as a share of the TTFT limit, up to which the pool can give a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMetrics:
    """
    The endpoint's metrics over a time window.

    Attributes:
        requests: number of answered requests.
        ttft_fraction: share of them within the TTFT limit.
        tpot_fraction: share of them within the TPOT limit; 1 where there is no such limit.
        prefill_queue_s: mean wait of a prompt before its prefill.
        tpot_s: mean time per output token.
    """

    requests: int
    ttft_fraction: float
    tpot_fraction: float
    prefill_queue_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    The recommended replicas of each pool, and the reason.

    Attributes:
        conclusive: there were enough requests for a judgement.
    """

    replicas: dict[str, int]
    reason: str
    conclusive: bool = True


def advise(seen: WindowMetrics, pools: Mapping[str, Pool], slo: SloSpec) -> Advice:
    """
    Move a replica to the pool whose SLO is missed, if the other pool can give it.

    The devices stay those of the plan: one pool gives what the other gets, and none goes below one
    replica. A pool gives only while its own SLO holds with room: prefill while its queue is short,
    decode while its mean TPOT, scaled by the replicas it loses, stays within the limit.

    Args:
        seen: the metrics of the window.
        pools: `prefill` and `decode`, as they run.
        slo: the limits.
    """
    now = {role: pool.replicas for role, pool in pools.items()}
    if seen.requests < MIN_REQUESTS:
        reason = f"{seen.requests} requests measured; {MIN_REQUESTS} are needed"
        return Advice(replicas=now, reason=reason, conclusive=False)
    late, slow = seen.ttft_fraction < slo.level, seen.tpot_fraction < slo.level
    attainment = (
        f"TTFT met by {seen.ttft_fraction:.1%}, TPOT by {seen.tpot_fraction:.1%} of requests"
    )
    if not late and not slow:
        return Advice(replicas=now, reason=f"{attainment}: the SLO holds")
    if late and slow:
        return Advice(replicas=now, reason=f"{attainment}: both pools are short; plan again")
    moved, reason = _move(seen, pools, slo, to="prefill" if late else "decode")
    return Advice(replicas=moved or now, reason=attainment + reason)


def _move(
    seen: WindowMetrics, pools: Mapping[str, Pool], slo: SloSpec, *, to: str
) -> tuple[dict[str, int] | None, str]:
    """Return the replicas after *to* gets one more, if it may, and why or why not."""
    queue = seen.prefill_queue_s / slo.ttft_s
    if to == "prefill" and queue < LONG_QUEUE:
        return None, f", but prefill's queue takes only {queue:.0%} of the TTFT limit"
    source = "decode" if to == "prefill" else "prefill"
    moved = moved_replicas(pools, to=to, source=source)
    if moved is None:
        return None, f": {to} is short and {source} has no replica to give; plan again"
    if source == "prefill" and queue > SHORT_QUEUE:
        return None, ": decode is short and prefill queues too; plan again"
    limit_s = slo.per_token_s or math.inf
    if source == "decode" and seen.tpot_s * pools[source].replicas / moved[source] > limit_s:
        return None, ": prefill is short and decode has no TPOT to spare; plan again"
    return moved, f": {to} is short, {source} can spare"


def moved_replicas(pools: Mapping[str, Pool], *, to: str, source: str) -> dict[str, int] | None:
    """Return the replicas after *to* gets one more from *source*; `None`: *source* has too few."""
    freed = math.ceil(pools[to].slicing.gpus / pools[source].slicing.gpus)
    left = pools[source].replicas - freed
    return {to: pools[to].replicas + 1, source: left} if left >= 1 else None
