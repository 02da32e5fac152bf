"""Simulations of a plan without one of its replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.error_model import missed_limits
from sizing.planner.simulated_check import limits_of
from sizing.simulation.planned import simulate_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Placement, Plan, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """
    The plan as it is, or without one replica.

    Attributes:
        lost: role of the pool that lost a replica; `None` where none is lost.
        ttft_s: at the SLO's percentile; `None` where no replica of the pool is left.
        tpot_s: at the SLO's percentile; `None` where no replica of the pool is left.
        holds: whether every limit is kept in the simulation, and latencies do not grow with time.
        misses: limits that are not kept, one phrase each.
    """

    lost: str | None
    replicas: dict[str, int]
    ttft_s: float | None
    tpot_s: float | None
    holds: bool
    misses: tuple[str, ...]


def losses(plan: Plan, *, requests: int, seed: int) -> Iterator[Loss]:
    """
    Simulate the plan whole, then with one replica less in each pool.

    Steps take as long as in the simulations that the plan passed, which is longer than predicted
    where the plan holds with some confidence. The failure is long past: requests lost with the
    replica, and the time until routing noticed, are not simulated.

    Args:
        requests: requests per run, drawn from the plan's load.
        seed: seed of arrivals, lengths and routing; the same in every run.
    """
    plan = as_confident(plan)
    yield _simulated(plan, None, requests, seed)
    for pool in plan.pools:
        if pool.replicas == 1:
            yield Loss(
                lost=pool.role,
                replicas={each.role: each.replicas for each in plan.pools} | {pool.role: 0},
                ttft_s=None,
                tpot_s=None,
                holds=False,
                misses=(f"the only {pool.role} replica is lost",),
            )
        else:
            yield _simulated(without_one(plan, pool.role), pool.role, requests, seed)


def as_confident(plan: Plan) -> Plan:
    """Return the plan with steps that take as long as its confidence allows for."""
    sure = plan.confidence
    if sure is None:
        return plan
    model = plan.step_model.slowed(
        prefill=sure.prefill_factor, decode=sure.decode_factor, mixed=plan.pools[0].role == "mixed"
    )
    return replace(plan, step_model=model)


def without_one(plan: Plan, role: str) -> Plan:
    """Return the plan without the last replica of a pool."""
    pools = [*plan.pools]
    for at, pool in enumerate(plan.pools):
        if pool.role == role:
            kept = pool.replicas - 1
            placed = tuple(spot for replica, spot in placed_replicas(pool) if replica < kept)
            pools[at] = replace(pool, replicas=kept, placement=placed)
    return replace(plan, pools=tuple(pools))


def placed_replicas(pool: Pool) -> Iterator[tuple[int, Placement]]:
    """Yield every placement of a pool with the number of its replica."""
    each, seen = pool.gpus // pool.replicas, 0
    for placement in pool.placement:
        yield seen // each, placement
        seen += len(placement.gpus)


def _simulated(plan: Plan, lost: str | None, requests: int, seed: int) -> Loss:
    arrivals = drawn(plan.workload, RequestSource(), count=requests, seed=seed)
    outcome = simulate_plan(plan, arrivals, seed=seed)
    at = plan.slo.percentile
    found_s = {name: each[at].value_s for name, each in outcome.latencies().items()}
    limits = limits_of(outcome, plan.inputs.scenario.promises)
    misses = missed_limits(check for check, _ in limits)
    if not outcome.settled:
        misses += ("latencies grow without end",)
    return Loss(
        lost=lost,
        replicas={pool.role: pool.replicas for pool in plan.pools},
        ttft_s=found_s["ttft"],
        tpot_s=found_s.get("tpot"),
        holds=not misses,
        misses=misses,
    )
