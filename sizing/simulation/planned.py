"""A plan's deployment, simulated."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.interference import DecodeWithInterference, PrefillWithInterference
from minicluster.engine_model.planned_limits import planned_limits, planned_lora, planned_offload
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.routing import pool_policy
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.sources import RequestSource, drawn
from sizing.simulation.outcome import simulate_system
from sizing.simulation.system import Path, SimulatedPool, System

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Deployment, Plan, Pool, StepModel
    from sizing.simulation.outcome import Outcome

POISSON = RequestSource()
"""Independent requests at the load's rate."""


def deployed_system(
    deployment: Deployment, model: StepModel, *, handshake_s: float = 0.0
) -> System:
    """
    Return what a plan deploys.

    Args:
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
            request_spread_s=path.request_spread_s,
            transfer_base_s=path.transfer_base_s,
            transfer_per_token_s=path.transfer_per_token_s,
            uplink_per_token_s=path.uplink_per_token_s,
            handshake_s=handshake_s,
        ),
        decode_policy=pool_policy(last.role, policy),
        prefill_policy=policy,
        local_threshold_tokens=deployment.routing.local_threshold_tokens,
    )


def simulate(  # noqa: PLR0913  (what a run is made of)
    plan: Plan,
    source: RequestSource | Arrivals = POISSON,
    *,
    requests: int = 20_000,
    requests_per_s: float | None = None,
    seed: int = 0,
    handshake_s: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """
    Simulate a plan request by request (docs/model.md, eq. Q5).

    Args:
        source: where requests come from: gaps or users, with the plan's lengths; or the requests
            themselves (`read_trace(path).arrivals`).
        requests: how many are drawn; not used with requests themselves.
        requests_per_s: in place of the plan's rate; requests themselves are stretched to it.
        seed: of arrivals, lengths and routing; equal arguments give equal outcomes.
        handshake_s: seconds of the first KV transfer between two replicas.
        progress: called with the number of requests that have arrived, and of all.

    Returns:
        Seconds of every request, in arrays of shape (requests,), and pools over time.

    Raises:
        InputError: a request that the plan cannot serve, or a plan that cannot be simulated.
    """
    if isinstance(source, Arrivals):
        coming = source if requests_per_s is None else source.at_rate(requests_per_s)
    else:
        load = plan.workload
        if requests_per_s is not None:
            load = load.at_rate(requests_per_s)
        coming = drawn(load, source, count=requests, seed=seed)
    said = None if progress is None else partial(_say, progress, len(coming))
    return simulate_plan(plan, coming, seed=seed, handshake_s=handshake_s, progress=said)


def _say(progress: Callable[[int, int], None], total: int, done: int) -> None:
    progress(done, total)


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
    # Those of a trace have none.
    arrivals = arrivals.with_adapters(plan.workload, np.random.default_rng(seed))
    system = deployed_system(plan.deployment, plan.step_model, handshake_s=handshake_s)
    return simulate_system(system, arrivals, seed=seed, progress=progress)


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
        gpus=pool.gpus // pool.lanes,
        group=pool.dp,
        prefix_cache=True,
        offload=planned_offload(deployment, pool),
        lora=planned_lora(deployment, pool),
    )
