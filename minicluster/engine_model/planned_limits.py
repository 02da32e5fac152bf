"""The scheduler and the KV cache of a replica that a plan describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence, kv_bytes_per_token
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

    Windowed layers get their windows first, one for each sequence that may run; the rest is for
    the layers that see everything (docs/model.md, eq. M2 and M3).

    Raises:
        InputError: no block is left.
    """
    model, size = deployment.model, deployment.engine.block_size
    block_bytes = size * kv_bytes_per_token(model, slicing=pool.slicing)
    longest = size * -(-deployment.engine.max_model_len // size)
    drafts = deployment.engine.speculative_tokens
    whole = kv_bytes_per_sequence(
        model, longest, slicing=pool.slicing, block_size=size, drafts=drafts
    )
    windows = pool.max_num_seqs * (whole - block_bytes * longest / size)
    blocks = int((pool.kv_bytes - windows) / block_bytes / pool.pp)
    if blocks < 1:
        raise InputError(
            f"pools[{pool.role}].kv_bytes", pool.kv_bytes, f"room for a block, {block_bytes:.0f}"
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
