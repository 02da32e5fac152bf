"""The scheduler and the KV cache of a replica that a plan describes."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import KvPages, kv_bytes_per_token, kv_pages
from minicluster.engine_model.limits import (
    VLLM_RULES,
    EngineLimits,
    LoraLimits,
    OffloadLimits,
)
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
    sequence_tokens = 1 + deployment.engine.speculative_tokens
    return EngineLimits(
        max_num_seqs=max(1, pool.max_num_seqs // pool.pp),
        max_num_batched_tokens=max(
            pool.max_num_batched_tokens, sequence_tokens * pool.max_num_seqs
        ),
        kv_blocks=kv_blocks(deployment, pool),
        block_size=pool_pages(deployment, pool).block_tokens,
        options=deployment.engine.options,
        rules=deployment.engine.rules or VLLM_RULES,
    )


def pool_pages(deployment: Deployment, pool: Pool) -> KvPages:
    """Return the blocks of a pool's KV cache, as its engines divide it (eq. M12)."""
    engine = deployment.engine
    return kv_pages(
        deployment.model,
        slicing=pool.slicing,
        block_size=engine.block_size,
        drafts=engine.speculative_tokens,
        one_pool=(engine.rules or VLLM_RULES).one_kv_pool,
    )


def kv_blocks(deployment: Deployment, pool: Pool) -> int:
    """
    Blocks of KV cache for one batch: of a copy of attention, shared by its pipeline stages.

    The scheduler counts a block of all layers that keep every token as one; states of linear layers
    and full windows of all sequences are set aside.

        N = max((U - R n_l) / (g + g_window), (U - R (n_l + n_window)) / g)
            (docs/model.md, eq. M11)

    Both hold for any R sequences: the first as if none were longer than its window, the second as
    if every window were full. Where all layers have windows (g = 0) the second is no bound.

    Raises:
        InputError: no block is left.
    """
    pages, sequences = pool_pages(deployment, pool), pool.max_num_seqs
    size, grows = pages.block_tokens, pages.growing_blocks
    longest, windows = _windows(deployment, pages)
    every = pages.blocks(size) - pages.fixed_blocks
    space = pages.usable_blocks(pool.kv_bytes) - sequences * pages.fixed_blocks
    left = space - sequences * windows
    full = left / grows if grows else sequences * longest * (left >= 0)
    blocks = int(max(space / every, full) / pool.pp)
    if blocks < 1:
        needed = (1 + every + sequences * pages.fixed_blocks) * pages.block_bytes
        expected = f"room for a block, {needed:.0f}"
        raise InputError(f"pools[{pool.role}].kv_bytes", pool.kv_bytes, expected)
    return blocks


def kv_bytes_for(deployment: Deployment, pool: Pool, blocks: int) -> float:
    """Return the least KV cache per GPU of which each batch has so many blocks (eq. M11)."""
    pages = pool_pages(deployment, pool)
    _, windows = _windows(deployment, pages)
    held = pool.max_num_seqs * (pages.fixed_blocks + windows)
    return pages.block_bytes * (1 + ceil(held + blocks * pool.pp * pages.growing_blocks))


def _windows(deployment: Deployment, pages: KvPages) -> tuple[int, float]:
    size = pages.block_tokens
    longest = -(-deployment.engine.max_model_len // size)
    growing = longest * pages.growing_blocks
    return longest, pages.blocks(longest * size) - pages.fixed_blocks - growing


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
