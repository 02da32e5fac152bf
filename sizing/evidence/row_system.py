"""The system that a measured row ran on, as the simulation knows it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import TabulatedStep
from minicluster.routing import ROUND_ROBIN
from sizing.evidence.protocol import protocol_of, recipe_of
from sizing.latency.fit import path_coefficients
from sizing.latency.step_table import step_table
from sizing.simulation.system import Path, SimulatedPool, System

if TYPE_CHECKING:
    from sizing.evidence.row import Group, MeasuredRow
    from sizing.evidence.row_config import RowConfig

REQUEST_S = 7.0e-3
"""An engine's own API server: measured rows have no Ray Serve before it (configs/engines)."""
CROWD = 6, 5
"""Users per decode slot of a replica in recipes that name its slots."""


def row_system(row: MeasuredRow, config: RowConfig, *, spare: float = 1.0) -> System:
    """
    Return the system of a row (docs/model.md, eq. V2 to V4).

    Of an aggregated row, one of the equal queues that share its load: a copy of attention, and a
    batch under way in a pipeline. Of split pools, every queue; requests go to them in turn.

    Args:
        row: the measured row.
        config: its machine.
        spare: factor on the KV cache of an aggregated row.
    """
    if row.load == "static":
        return System(decode=_static_pool(row, config), path=Path())
    if len(row.groups) == 1:
        return System(decode=_mixed_pool(row, config, spare), path=Path(request_s=REQUEST_S))
    prefill, decode = row.groups
    pull = path_coefficients(
        config.machine,
        prefill_tp=prefill.slicing.tp,
        decode_tp=decode.slicing.tp,
        tokens=(1 - row.length_jitter / 2) * row.isl,
    )
    return System(
        prefill=_split_pool(row, config, prefill),
        decode=_split_pool(row, config, decode),
        path=Path(
            request_s=REQUEST_S,
            transfer_base_s=pull.transfer_base_s,
            transfer_per_token_s=pull.transfer_per_token_s,
        ),
        decode_policy=ROUND_ROBIN,
        prefill_policy=ROUND_ROBIN,
    )


def queues_of(row: MeasuredRow) -> int:
    """
    Queues of an aggregated row: copies of attention, and batches under way in a pipeline.

    A static batch is one in all stages.
    """
    slicing = row.groups[0].slicing
    return slicing.dp if row.load == "static" else slicing.dp * slicing.pp


def _static_pool(row: MeasuredRow, config: RowConfig) -> SimulatedPool:
    """One batch that was measured, so that there was room for it; whole prompts share a step."""
    group = row.groups[0]
    batch = math.ceil(row.amount / group.slicing.dp)
    budget = config.token_budget
    if not config.rules.chunked_prefill:
        budget = max(budget, batch * row.isl)
    blocks = batch * -(-(row.isl + row.osl) // config.machine.engine.block_size)
    limits = _limits(config, max_num_seqs=batch, token_budget=max(budget, batch), blocks=blocks)
    return _pool(row, config, group, limits, replicas=1)


def _mixed_pool(row: MeasuredRow, config: RowConfig, spare: float) -> SimulatedPool:
    group = row.groups[0]
    protocol, recipe = protocol_of(row), recipe_of(row)
    limits = _limits(
        config,
        max_num_seqs=protocol.max_batch_size if protocol else config.machine.engine.max_num_seqs,
        token_budget=recipe.token_budget if recipe else config.token_budget,
        blocks=_kv_blocks(row, config, group, spare),
    )
    if recipe is not None:
        limits = replace(limits, wait_steps=recipe.wait_steps, wait_fraction=recipe.wait_fraction)
    return _pool(row, config, group, limits, replicas=1)


def _split_pool(row: MeasuredRow, config: RowConfig, group: Group) -> SimulatedPool:
    seqs = config.machine.engine.max_num_seqs
    if group.role == "decode" and config.rules.recipe_users_exceed_slots:
        slots = recipe_slots(int(row.amount), group.replicas, group.slicing.dp)
        seqs = min(seqs, slots // group.slicing.dp if slots else seqs)
    limits = _limits(
        config,
        max_num_seqs=seqs,
        token_budget=config.token_budget,
        blocks=_kv_blocks(row, config, group, 1.0),
    )
    return _pool(row, config, group, limits, replicas=group.replicas * group.slicing.dp)


def _limits(
    config: RowConfig, *, max_num_seqs: int, token_budget: int, blocks: int
) -> EngineLimits:
    rules = config.rules
    return EngineLimits(
        max_num_seqs=min(max_num_seqs, token_budget),
        max_num_batched_tokens=token_budget,
        kv_blocks=blocks,
        block_size=config.machine.engine.block_size,
        mixed_steps=rules.mixed_steps,
        chunked_prefill=rules.chunked_prefill,
        kv_reserved_fraction=rules.kv_reserved_fraction,
        scheduled_ahead=config.async_scheduling,
    )


def _kv_blocks(row: MeasuredRow, config: RowConfig, group: Group, spare: float) -> int:
    """Blocks of one queue's KV cache; a row that was measured had room for one request."""
    size = config.machine.engine.block_size
    tokens = row.isl + (row.osl / 2 if group.role == "mixed" else row.osl)
    whole = size * math.ceil(tokens / size)
    kept = config.kv_tokens(group.slicing, tokens) * spare / group.slicing.pp
    return max(math.floor(kept / tokens * whole / size), math.ceil((row.isl + row.osl) / size))


def _pool(
    row: MeasuredRow, config: RowConfig, group: Group, limits: EngineLimits, *, replicas: int
) -> SimulatedPool:
    sequences = limits.max_num_seqs
    if row.load != "open":
        sequences = min(sequences, math.ceil(row.amount / (group.replicas * group.slicing.dp)))
    mean = 1 - row.length_jitter / 2
    table = step_table(
        config.machine,
        group.slicing,
        max_sequences=sequences,
        contexts=(mean * row.isl, mean * (row.isl + row.osl)),
        prompt_tokens=max(1.0, mean * row.isl - row.prefix_tokens),
    )
    return SimulatedPool(replicas=replicas, limits=limits, step=TabulatedStep(table))


def recipe_slots(users: int, replicas: int, ranks: int) -> int | None:
    """
    Slots of a decode replica, read off the users that a recipe sends.

        users = replicas ceil(1.2 slots),  slots = ranks 2^k

    Args:
        users: of the whole pool.
        replicas: of decode.
        ranks: attention copies of a replica, with as many slots each.

    Returns:
        The slots; `None`: the number of users is not one that such a recipe has.

    Source:
        NVIDIA srt-slurm, recipes/trtllm/h100-fp8: file names and `max_batch_size` say the slots,
        `concurrencies` the users (2 x 64 slots: 154 users; 3 x 16: 60; 3 x 1: 6). Sweeps over
        powers of two (its H200 recipes) are told apart, but for 2 users a replica.
    """
    each, rest = divmod(users, replicas)
    most, least = CROWD
    slots = each * least // most
    batch, uneven = divmod(slots, ranks)
    if rest or uneven or batch < 1 or batch & (batch - 1):
        return None
    return slots if -(-slots * most // least) == each else None
