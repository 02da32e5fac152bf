"""Autoscaling: the replicas that a plan's pools need at another rate, with hysteresis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.checks import not_negative
from minicluster.specs.scaling import MARGIN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from minicluster.plan.document import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPool:
    """
    One pool of a plan, as autoscaling sees it.

    Attributes:
        most: replicas of the plan, spares included.
        spares: of these, what the SLO does not need.
        busy: replicas that the planned rate keeps busy.
        gpus: of one replica.
    """

    role: str
    most: int
    spares: int
    busy: float
    planned_requests_per_s: float
    gpus: int

    def replicas(self, requests_per_s: float) -> int:
        """
        Return the replicas for a rate: from 1 to the plan's, and the plan's at its own rate.

            N = min(N_p, ceil(a + (N_p - A) sqrt(a / A))), a = A rate / planned rate
            (docs/model.md, eq. E5)

        Source:
            Square-root staffing (Halfin and Whitt 1981): what is kept beside the busy servers, for
            the same chance to wait, grows with the root of their number.
        """
        needed = self.most - self.spares
        share = requests_per_s / self.planned_requests_per_s
        busy = min(self.busy, needed)
        kept = busy * share + (needed - busy) * math.sqrt(share)
        return min(self.most, max(1, math.ceil(kept - 1e-9)) + self.spares)


def scaled_pools(plan: Plan) -> tuple[ScaledPool, ...]:
    """Return the pools of a plan, each with its load at the plan's rate."""
    used = plan.prediction.utilisation_fraction
    return tuple(
        ScaledPool(
            role=pool.role,
            most=pool.replicas,
            spares=pool.spare_replicas,
            busy=used[pool.role] * (pool.replicas - pool.spare_replicas),
            planned_requests_per_s=plan.workload.requests_per_s,
            gpus=pool.slicing.gpus,
        )
        for pool in plan.pools
    )


def wanted_replicas(
    pools: Iterable[ScaledPool],
    rates: Collection[float],
    *,
    margin: float = MARGIN,
    floor: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """
    Decide the replicas of each pool from the rates that were measured during the hold time.

    The highest of them counts (docs/model.md, eq. E5): a rise adds replicas at once, and a replica
    goes only after a whole hold time in which no rate asked for it. That is the stabilisation
    window of Kubernetes' HorizontalPodAutoscaler.

    Args:
        pools: of the plan.
        rates: requests/s of each interval of the hold time; the order does not matter.
        margin: share that the next rate may exceed them by.
        floor: replicas by role that are always there; `None`: 1.
    """
    rate = max(rates) * (1 + margin)
    least = floor or {}
    return {
        pool.role: min(pool.most, max(least.get(pool.role, 1), pool.replicas(rate)))
        for pool in pools
    }


def held_intervals(hold_s: float, interval_s: float, margin: float = MARGIN) -> int:
    """
    Return how many intervals' rates decide together: those of the hold time, the last included.

    Raises:
        InputError: a hold time, an interval or a margin that cannot be.
    """
    not_negative(**{"--hold-seconds": hold_s, "--margin": margin})
    if not 0 < interval_s < math.inf:
        raise InputError("interval", interval_s, "seconds, more than 0")
    return 1 + math.ceil(hold_s / interval_s - 1e-9)
