"""A plan's deployment, simulated."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from sizing.errors import InputError
from sizing.latency.memory import kv_bytes_per_sequence, kv_bytes_per_token
from sizing.simulation.limits import EngineLimits
from sizing.simulation.outcome import simulate
from sizing.simulation.sharing import SharedDecode, SharedPrefill
from sizing.simulation.step import FittedStep
from sizing.simulation.system import Path, SimulatedPool, System

if TYPE_CHECKING:
    from collections.abc import Callable

    from sizing.arrivals import Arrivals
    from sizing.plan import Plan, Pool
    from sizing.simulation.outcome import Outcome


def kv_blocks(plan: Plan, pool: Pool) -> int:
    """
    Blocks of one replica's KV cache.

    Windowed layers get their windows first, one for each sequence that may run; the rest is for
    the layers that see everything (docs/model.md, eq. M2 and M3).

    Raises:
        InputError: no block is left.
    """
    model, size = plan.inputs.model, plan.engine.block_size
    block_bytes = size * kv_bytes_per_token(model, tp=pool.tp) / pool.pp
    longest = size * -(-plan.engine.max_model_len // size)
    whole = kv_bytes_per_sequence(model, longest, tp=pool.tp, block_size=size) / pool.pp
    windows = pool.max_batch_size * (whole - block_bytes * longest / size)
    blocks = int((pool.kv_bytes - windows) / block_bytes)
    if blocks < 1:
        raise InputError(
            f"pools[{pool.role}].kv_bytes", pool.kv_bytes, f"room for a block, {block_bytes:.0f}"
        )
    return blocks


def planned_system(plan: Plan, *, handshake_s: float = 0.0) -> System:
    """
    Return what a plan deploys.

    Args:
        plan: pools, routing, step times.
        handshake_s: of two replicas that meet for the first time; no plan has measured it.

    Raises:
        InputError: a pool without room, or with steps that take no time.
    """
    roles = {pool.role: pool for pool in plan.pools}
    path, policy = plan.step_model.path, plan.routing.policy
    last = roles.get("mixed") or plan.pool("decode")
    first = roles.get("prefill")
    model = plan.step_model
    prefill, decode = FittedStep(model.prefill), FittedStep(model.decode)
    if any(asdict(model.interference).values()):
        prefill = SharedPrefill(model.prefill, model.interference)
        decode = SharedDecode(model.decode, model.interference)
    return System(
        decode=_pool(plan, last, decode),
        prefill=None if first is None else _pool(plan, first, prefill),
        path=Path(
            request_s=path.request_s,
            transfer_base_s=path.transfer_base_s,
            transfer_per_token_s=path.transfer_per_token_s,
            handshake_s=handshake_s,
        ),
        # Requests meet the decode pool by Ray Serve's own router; the plan's policy chooses
        # among the prefill replicas.
        decode_policy="power-of-two",
        prefill_policy=policy,
        local_threshold_tokens=plan.routing.local_threshold_tokens,
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
    system = planned_system(plan, handshake_s=handshake_s)
    return simulate(system, arrivals, seed=seed, progress=progress)


def _check_context(plan: Plan, arrivals: Arrivals) -> None:
    """Refuse requests longer than the context."""
    tokens = arrivals.input_tokens + arrivals.output_tokens
    if len(tokens) and tokens.max() > plan.engine.max_model_len:
        at = int(tokens.argmax())
        raise InputError(
            f"request {at}",
            f"{arrivals.input_tokens[at]:,} + {arrivals.output_tokens[at]:,} tokens",
            f"at most engine.max_model_len, {plan.engine.max_model_len:,}",
            "plan with a longer model.max_context_tokens",
        )


def _pool(plan: Plan, pool: Pool, step: FittedStep) -> SimulatedPool:
    """Return one pool; vLLM caches prefixes unless told otherwise."""
    return SimulatedPool(
        replicas=pool.replicas,
        limits=EngineLimits(
            max_num_seqs=pool.max_batch_size,
            max_num_batched_tokens=max(pool.max_batched_tokens, pool.max_batch_size),
            kv_blocks=kv_blocks(plan, pool),
            block_size=plan.engine.block_size,
        ),
        step=step,
        prefix_cache=True,
    )
