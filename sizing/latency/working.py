"""Working memory of an engine: activations of the largest step, buffers of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.latency.op import ACTIVATION_BYTES

if TYPE_CHECKING:
    from minicluster.specs.engine import EngineProfile
    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing

SAMPLER_BYTES_PER_LOGIT = 38.4
"""
What sampling keeps per logit of a full batch: copies in 16 and 32 bits, sorted with indices.

Source: 7 of the 8 rows of llm-d-planner docs/empirical-vllm-memory-results.md (vLLM, H100,
tests/published/vllm_memory.toml) give 38.2 to 38.6 with 1,024 sequences, vLLM's default there.
"""

EXCHANGE_BYTES = {2: 358_612_992, 4: 411_041_792}
"""
Buffers of NCCL by group size, the largest that is no larger than the group.

Source: aiconfigurator-core 0.12.0, systems/*.yaml, nccl_mem (342 and 392 MiB), read 2026-11-20.
"""


def activation_bytes(model: ModelSpec, engine: EngineProfile, *, slicing: Slicing) -> float:
    """
    Peak of activations in the step that vLLM profiles, on one GPU.

        M_act = max(B V 38.4, T a max((u + 1) f / tp, (u + 1) f_e k dp / (ep t_e) + k dp h / ep))
                + T h a      (docs/model.md, eq. M8)

    Args:
        model: V vocabulary, h hidden size, f and f_e feed-forwards, u 2 if gated, else 1.
        engine: B = max_batch_size, T = max_batched_tokens; an `activation_bytes` of its own, other
            than zero, is taken instead.
        slicing: of one replica, t_e ways of one expert.

    Returns:
        Bytes.

    Source:
        The sampler holds the logits of all sequences, whole on every rank, several times; a layer
        holds what its feed-forward makes.

    Ignores:
        Attention's workspace; towers for images or sound; engines that sample otherwise.

    """
    if engine.activation_bytes:
        return engine.activation_bytes
    tokens, passes = engine.max_batched_tokens, 3 if model.gated_mlp else 2
    width = passes * model.ffn_size / slicing.tp
    if model.moe:
        rows = model.moe.experts_per_token * slicing.dp / slicing.ep
        routed = rows * (passes * model.moe.expert_ffn_size / slicing.moe_tp + model.hidden_size)
        width = max(width, routed)
    sampler = engine.max_batch_size * model.vocab_size * SAMPLER_BYTES_PER_LOGIT
    layer = tokens * width * ACTIVATION_BYTES
    return max(sampler, layer) + tokens * model.hidden_size * ACTIVATION_BYTES


def exchange_bytes(slicing: Slicing) -> float:
    """
    Buffers of collectives on one GPU: by the number of GPUs of the replica (eq. M9).

    M_x of docs/model.md, eq. M9; 0 on a single GPU.
    """
    fitting = [size for group, size in EXCHANGE_BYTES.items() if group <= slicing.gpus]
    return float(fitting[-1]) if fitting else 0.0
