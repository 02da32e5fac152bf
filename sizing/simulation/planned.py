"""A plan's deployment, simulated."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from minicluster.engine_model.interference import DecodeWithInterference, PrefillWithInterference
from minicluster.engine_model.planned_limits import planned_limits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.routing import ANSWER_POLICY
from sizing.simulation.outcome import simulate
from sizing.simulation.system import Path, SimulatedPool, System

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Deployment, Plan, Pool, StepModel
    from minicluster.workload.arrivals import Arrivals
    from sizing.simulation.outcome import Outcome


def deployed_system(
    deployment: Deployment, model: StepModel, *, handshake_s: float = 0.0
) -> System:
    """
    Return what a plan deploys.

    Args:
        deployment: pools and routing.
        model: step times and the path between the pools.
        handshake_s: of two replicas that meet for the first time; no plan has measured it.

    Raises:
        InputError: a pool without room, or with steps that take no time.
    """
    roles = {pool.role: pool for pool in deployment.pools}
    path, policy = model.path, deployment.routing.policy
    last = roles.get("mixed") or deployment.pool("decode")
    first = roles.get("prefill")
    prefill, decode = PlannedStep(model.prefill), PlannedStep(model.decode)
    if any(asdict(model.interference).values()):
        prefill = PrefillWithInterference(model.prefill, model.interference)
        decode = DecodeWithInterference(model.decode, model.interference)
    return System(
        decode=_pool(deployment, last, decode),
        prefill=None if first is None else _pool(deployment, first, prefill),
        path=Path(
            request_s=path.request_s,
            transfer_base_s=path.transfer_base_s,
            transfer_per_token_s=path.transfer_per_token_s,
            handshake_s=handshake_s,
        ),
        decode_policy=ANSWER_POLICY,
        prefill_policy=policy,
        local_threshold_tokens=deployment.routing.local_threshold_tokens,
    )


def simulate_plan(
    plan: Plan,
    arrivals: Arrivals,
    *,
    seed: int,
    handshake_s: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """
    Simulate a plan under *arrivals*.

    Where its pools share a machine, each step is as slow as what the other pool does when it
    begins makes it (docs/model.md, eq. Q9).

    Raises:
        InputError: a request that the plan cannot serve, or a plan that cannot be simulated.
    """
    _check_context(plan, arrivals)
    system = deployed_system(plan.deployment, plan.step_model, handshake_s=handshake_s)
    return simulate(system, arrivals, seed=seed, progress=progress)


def _check_context(plan: Plan, arrivals: Arrivals) -> None:
    tokens = arrivals.input_tokens + arrivals.output_tokens
    if len(tokens) and tokens.max() > plan.engine.max_model_len:
        at = int(tokens.argmax())
        raise InputError(
            f"request {at}",
            f"{arrivals.input_tokens[at]:,} + {arrivals.output_tokens[at]:,} tokens",
            f"at most engine.max_model_len, {plan.engine.max_model_len:,}",
            "plan with a longer model.max_context_tokens",
        )


def _pool(deployment: Deployment, pool: Pool, step: PlannedStep) -> SimulatedPool:
    """Return one pool, a queue for each of its batches; vLLM caches prefixes by default."""
    return SimulatedPool(
        replicas=pool.lanes,
        limits=planned_limits(deployment, pool),
        step=step,
        group=pool.dp,
        prefix_cache=True,
    )
