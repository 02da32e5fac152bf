"""Whether prefill and decode are in balance: a pure decision from what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.specs.slo import SloSpec

FEWEST = 100
"""Requests below which an attainment says nothing of a p99."""

LONG_QUEUE = 0.25
"""Share of the TTFT limit that prefill's queue takes where prefill is what is short."""

SHORT_QUEUE = 0.05
"""Share below which the pool can do with less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """
    What the endpoint measured over a while.

    Attributes:
        requests: answered.
        ttft_fraction: of them, within the TTFT limit.
        tpot_fraction: of them, within the TPOT limit; 1 where there is no such limit.
        prefill_queue_s: mean wait of a prompt before it is prefilled.
        tpot_s: mean.
    """

    requests: int
    ttft_fraction: float
    tpot_fraction: float
    prefill_queue_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """
    What a pool has of the plan's devices.

    Attributes:
        replicas: that run now.
        width: devices of one replica.
    """

    replicas: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    Replicas that each pool should have, and why.

    Attributes:
        holds: nothing needs to change.
        conclusive: enough requests were seen to say so.
    """

    replicas: dict[str, int]
    reason: str
    holds: bool
    conclusive: bool = True


def advise(seen: Seen, shares: Mapping[str, Share], slo: SloSpec) -> Advice:
    """
    Move a replica towards the pool whose promise breaks, if the other can spare it.

    The devices are those of the plan: what one pool gets the other gives, and none goes below
    one replica. A pool gives only while its own promise holds with room: prefill while its queue
    is short, decode while its mean TPOT, grown by the share it loses, stays within the limit.

    Args:
        seen: what was measured.
        shares: of `prefill` and `decode`.
        slo: the promise.
    """
    now = {role: share.replicas for role, share in shares.items()}
    if seen.requests < FEWEST:
        reason = f"{seen.requests} requests seen; {FEWEST} are needed to judge"
        return Advice(replicas=now, reason=reason, holds=True, conclusive=False)
    wanted = slo.level
    late, slow = seen.ttft_fraction < wanted, seen.tpot_fraction < wanted
    told = f"TTFT met by {seen.ttft_fraction:.1%}, TPOT by {seen.tpot_fraction:.1%} of requests"
    if not late and not slow:
        return Advice(replicas=now, reason=f"{told}: the SLO holds", holds=True)
    if late and slow:
        return Advice(replicas=now, reason=f"{told}: both pools are short; plan again", holds=False)
    queue = seen.prefill_queue_s / slo.ttft_s
    if late and queue < LONG_QUEUE:
        reason = f"{told}, but prefill's queue takes {queue:.0%} of the TTFT limit: not its doing"
        return Advice(replicas=now, reason=reason, holds=False)
    to, source = ("prefill", "decode") if late else ("decode", "prefill")
    moved = moved_replicas(shares, to=to, source=source)
    if moved is None:
        reason = f"{told}: {to} is short and {source} has no replica to give; plan again"
        return Advice(replicas=now, reason=reason, holds=False)
    if source == "prefill" and queue > SHORT_QUEUE:
        reason = f"{told}: decode is short and prefill queues too; plan again"
        return Advice(replicas=now, reason=reason, holds=False)
    limit_s = slo.per_token_s or math.inf
    if source == "decode" and seen.tpot_s * now["decode"] / moved["decode"] > limit_s:
        reason = f"{told}: prefill is short and decode has no TPOT to spare; plan again"
        return Advice(replicas=now, reason=reason, holds=False)
    return Advice(replicas=moved, reason=f"{told}: {to} is short, {source} can spare", holds=False)


def moved_replicas(shares: Mapping[str, Share], *, to: str, source: str) -> dict[str, int] | None:
    """Return the replicas after *to* got one more of *source*'s devices; `None`: it has none."""
    given = math.ceil(shares[to].width / shares[source].width)
    left = shares[source].replicas - given
    return {to: shares[to].replicas + 1, source: left} if left >= 1 else None
