"""The scheduler and the KV cache of a replica that a plan describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import (
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    state_bytes,
)
from minicluster.engine_model.limits import EngineLimits, LoraLimits, OffloadLimits
from minicluster.errors import InputError
from minicluster.specs.lora import adapter_bytes
from minicluster.specs.slicing import stage_layers

if TYPE_CHECKING:
    from minicluster.plan import Deployment, Pool


def planned_limits(deployment: Deployment, pool: Pool) -> EngineLimits:
    """
    Return the settings of each of a pool's `lanes`: stages of a pipeline share a replica's batch.

    Raises:
        InputError: its KV cache has no room for a block.
    """
    engine = deployment.engine
    each = 1 + engine.speculative_tokens
    return EngineLimits(
        max_num_seqs=max(1, pool.max_num_seqs // pool.pp),
        max_num_batched_tokens=max(pool.max_num_batched_tokens, each * pool.max_num_seqs),
        kv_blocks=kv_blocks(deployment, pool),
        block_size=engine.block_size,
        long_prefill_token_threshold=engine.chunked_prefill_tokens,
        speculative_tokens=engine.speculative_tokens,
        mean_accepted_tokens=engine.mean_accepted_tokens,
    )


def kv_blocks(deployment: Deployment, pool: Pool) -> int:
    """
    Blocks of KV cache for one batch: of a copy of attention, shared by its pipeline stages.

        N = max((M - R M_l) / (b + b_window), (M - R (M_l + M_window)) / b) / c
            (docs/model.md, eq. M11)

    Both hold for any R sequences: the first as if none were longer than its window, the second as
    if every window were full. Where all layers have windows (b = 0) the second is no bound.

    Raises:
        InputError: no block is left.
    """
    model, size = deployment.model, deployment.engine.block_size
    slicing, drafts = pool.slicing, deployment.engine.speculative_tokens
    longest = -(-deployment.engine.max_model_len // size)
    state = state_bytes(model, slicing=slicing, drafts=drafts)

    def attention_bytes(blocks: int) -> float:
        tokens = blocks * size
        return kv_bytes_per_sequence(model, tokens, slicing=slicing, block_size=size, drafts=drafts)

    every = attention_bytes(1) - state
    unwindowed = size * kv_bytes_per_token(model, slicing=slicing)
    windows = attention_bytes(longest) - state - longest * unwindowed
    space = pool.kv_bytes - pool.max_num_seqs * state
    left = space - pool.max_num_seqs * windows
    full = left / unwindowed if unwindowed else pool.max_num_seqs * longest * (left >= 0)
    blocks = int(max(space / every, full) / pool.pp)
    if blocks < 1:
        raise InputError(
            f"pools[{pool.role}].kv_bytes", pool.kv_bytes, f"room for a block, {every:.0f}"
        )
    return blocks


def planned_offload(deployment: Deployment, pool: Pool) -> OffloadLimits | None:
    """
    Return the tiers behind each batch of a pool that computes prompts (docs/model.md, eq. Q14).

    Ignores: windowed layers and linear states, which are not counted among a token's bytes.
    """
    offload = deployment.engine.kv_offload
    if offload is None or pool.role == "decode":
        return None
    token_bytes = kv_bytes_per_token(deployment.model, slicing=pool.slicing) * pool.pp
    disk_rate = offload.disk_bytes_per_s
    return OffloadLimits(
        host_tokens=int(offload.host_bytes / token_bytes),
        host_token_s=token_bytes / offload.host_bytes_per_s[pool.gpu],
        disk_tokens=int(offload.disk_bytes / token_bytes),
        disk_token_s=token_bytes / disk_rate if disk_rate else 0.0,
    )


def planned_lora(deployment: Deployment, pool: Pool) -> LoraLimits | None:
    """
    Return the slots for adapters of each replica of a pool, and the copy of one (eq. Q15).

        t_a = M_ad / B_host, of the pipeline's longest stage      (docs/model.md, eq. Q15)
    """
    lora = deployment.engine.lora
    if lora is None:
        return None
    layers = max(stage_layers(deployment.model.num_layers, pool.pp))
    size = adapter_bytes(lora, deployment.model, tp=pool.tp, layers=layers)
    return LoraLimits(slots=lora.max_loras, load_s=size / lora.host_bytes_per_s[pool.gpu])
