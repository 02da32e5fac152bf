"""Requests in flight in each pool: of the run, and of its simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run.schedule import Window
    from loadtest.verdict.resimulation import Resimulation
    from minicluster.plan import Plan
    from minicluster.workload.samples import Sample

Times = tuple[float, float, float]
"""Of one request: when it comes, its first token and its end."""

STAYS = {"prefill": (0, 1), "decode": (1, 2), "mixed": (0, 2)}
"""The two of `Times` between which a request is in a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """
    Load of one pool.

    Attributes:
        predicted_utilisation_fraction: mean share of the run in which a replica computes, as
            simulated; without a simulation the plan's, at its own load. No client can see it.
        predicted_concurrent, measured_concurrent: mean number of requests in the pool over the
            window; without a simulation the former by Little's law at the plan's load.
    """

    role: str
    replicas: int
    predicted_utilisation_fraction: float | None
    predicted_concurrent: float
    measured_concurrent: float


def pool_loads(
    plan: Plan, samples: Sequence[Sample], window: Window, resimulation: Resimulation | None
) -> tuple[PoolLoad, ...]:
    """
    Return the load of each pool of the plan.

    Ignores:
        The phases before the first token: the client cannot separate prefill's queue, prefill and
        KV transfer, so all of them count for the prefill pool, measured and predicted.
    """
    utilisation = (
        resimulation.busy_fraction if resimulation else plan.prediction.utilisation_fraction
    )
    measured = [(s.send_s, s.chunk_s[0] if s.chunk_s else s.end_s, s.end_s) for s in samples]
    seen = _mean_concurrent(measured, window)
    if resimulation:
        known = [(s.due_s, resimulation.requests.get(s.index)) for s in samples]
        simulated = [(due_s, due_s + r.ttft_s, due_s + r.e2e_s) for due_s, r in known if r]
        predicted = _mean_concurrent(simulated, window)
    else:
        rate, planned = plan.workload.requests_per_s, plan.prediction
        times = (0.0, planned.ttft.mean_s, planned.e2e.mean_s)
        predicted = {role: rate * (times[end] - times[at]) for role, (at, end) in STAYS.items()}
    return tuple(
        PoolLoad(
            role=pool.role,
            replicas=pool.replicas,
            predicted_utilisation_fraction=utilisation.get(pool.role),
            predicted_concurrent=predicted[pool.role],
            measured_concurrent=seen[pool.role],
        )
        for pool in plan.pools
    )


def _mean_concurrent(times: Sequence[Times], window: Window) -> dict[str, float]:
    """Return the number of requests in each pool, averaged over the window."""

    def inside_s(at: Times, start: int, end: int) -> float:
        return max(0.0, min(at[end], window.end_s) - max(at[start], window.start_s))

    return {
        role: sum(inside_s(at, start, end) for at in times) / window.length_s
        for role, (start, end) in STAYS.items()
    }
