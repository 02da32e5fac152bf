"""Bytes on one GPU: weights, working memory, and the KV cache that they leave room for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from minicluster.specs.lora import adapter_bytes
from minicluster.specs.model import DTYPE_BYTES, draft_layer, weight_value_bytes
from minicluster.specs.parameters import parameters
from minicluster.specs.slicing import Slicing, stage_layers
from sizing.latency.op import ACTIVATION_BYTES

if TYPE_CHECKING:
    from minicluster.specs.engine import EngineProfile
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.model import ModelSpec


FP4_MULTIPLE = 256
"""To a multiple of this vLLM 0.29.0 pads the hidden size of fp4 experts (Marlin, TensorRT-LLM)."""


def weight_bytes(model: ModelSpec, *, slicing: Slicing) -> float:
    """Weights on the fullest GPU: the largest of `stage_weight_bytes` (docs/model.md, eq. M1)."""
    return max(stage_weight_bytes(model, slicing))


def stage_weight_bytes(model: ModelSpec, slicing: Slicing) -> tuple[float, ...]:
    """
    Weights on one GPU of each pipeline stage.

        M_w = (M_att + M_dense + M_shared) / tp + M_experts pad c / (tp dp) + M_whole
              + 2 L D H max(0, 1 - K / tp) w, of the stage's layers; tables / tp on the first
              and last stage, a draft head on the last      (docs/model.md, eq. M1)

    M_whole, on every GPU: norms, routers, the down-projections of latent attention, its index.
    c: experts with their copies over experts, where ep > 1 (`redundant_experts`).

    Args:
        slicing: of one replica; experts lie on all tp x dp GPUs of a stage.

    Source:
        vLLM slices every projection by columns or rows, keeps a whole KV head per rank, and deals
        out layers by `get_pp_indices`.

    Ignores:
        Padding of the vocabulary; 16-bit copies of the up-projection of latent attention (2 GB of
        DeepSeek-V3 over all ranks); kinds of attention are taken as evenly spread over stages.
    """
    counts, layers = parameters(model), stage_layers(model.num_layers, slicing.pp)
    a = DTYPE_BYTES[model.dtype]
    attention = _attention_bytes(model, slicing.tp) / model.num_layers
    norms = counts.norms * a / model.num_layers
    dense = _per_layer(counts.dense_ffn, model.num_dense_layers) / slicing.tp
    moe_layers = model.num_expert_layers
    copied = model.moe.num_copies / model.moe.num_experts if model.moe and slicing.ep > 1 else 1.0
    expert_value = _size(model, model.weight_dtype)
    if model.weight_dtype == "fp4":
        padded = FP4_MULTIPLE * math.ceil(model.expert_width / FP4_MULTIPLE)
        expert_value *= padded / model.expert_width
    experts = (
        _per_layer(counts.experts, moe_layers) * expert_value * copied
        / (slicing.tp * slicing.dp)
        + _per_layer(counts.shared_experts, moe_layers) * _size(model, model.shared_dtype)
        / slicing.tp
        + _per_layer(counts.router, moe_layers) * a
    )  # fmt: skip
    stages, left = [], float(model.num_dense_layers)
    with_ffn = model.num_ffn_layers / model.num_layers
    for number in layers:
        num_dense = min(left, number * with_ffn)
        left -= num_dense
        dense_bytes = num_dense * dense * _size(model, model.dense_dtype)
        feedforward = dense_bytes + (number * with_ffn - num_dense) * experts
        stages.append(number * (attention + norms) + feedforward)
    head = 0 if model.tied_embeddings and slicing.pp == 1 else model.vocab_size * model.hidden_size
    stages[0] += counts.embedding * a / slicing.tp
    stages[-1] += head * a / slicing.tp + _draft_bytes(model, slicing)
    return tuple(stages)


def _draft_bytes(model: ModelSpec, slicing: Slicing) -> float:
    """
    Weights of the draft head on one GPU of the last stage: its layers, and what joins their inputs.

    The input table is the model's; so is the output projection of an `mtp` head.
    """
    if model.draft is None:
        return 0.0
    layer, a = draft_layer(model), DTYPE_BYTES[model.dtype]
    counts = parameters(layer)
    own = stage_weight_bytes(layer, replace(slicing, pp=1))[0]
    own -= (counts.embedding + counts.lm_head) * a / slicing.tp
    joined = 2 * model.hidden_size**2 * _size(layer, layer.attention_dtype)
    output = counts.lm_head * a / slicing.tp if model.draft.method == "eagle3" else 0.0
    return model.draft.num_layers * (own + joined) + output


def _per_layer(count: int, layers: int) -> float:
    return count / layers if layers else 0.0


def _size(model: ModelSpec, dtype: str) -> float:
    return weight_value_bytes(dtype, model.weight_group)


def _attention_bytes(model: ModelSpec, tp: int) -> float:
    w = _size(model, model.attention_dtype)
    whole = copied = 0.0
    if model.mla:
        latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim + model.mla.q_lora_rank
        whole = latent * model.hidden_size
        if model.index:
            index = model.index.num_heads * model.index.head_dim
            whole += (model.mla.q_lora_rank or model.hidden_size) * index
            whole += (model.index.head_dim + model.index.num_heads) * model.hidden_size
    else:
        for layers, of in model.kinds_of_heads:
            keys = 1 if of.shared_values else 2
            missing = keys * of.head_dim * max(0.0, 1 - of.num_kv_heads / tp)
            copied += layers * model.hidden_size * missing
    whole *= model.num_attention_layers
    return w * ((parameters(model).attention - whole) / tp + whole + copied)


DRAFT_BYTES_PER_LOGIT = 6.0
"""Bytes per logit while a draft is verified: a copy in 16 bits, one in 32 (assumed)."""

EXCHANGE_BYTES = {2: 358_612_992, 4: 411_041_792}
"""
Buffers of NCCL by group size, the largest that is no larger than the group.

Source: aiconfigurator-core 0.12.0, systems/*.yaml, nccl_mem (342 and 392 MiB), read 2026-11-20.
"""


def activation_bytes(model: ModelSpec, engine: EngineProfile, *, slicing: Slicing) -> float:
    """
    Peak of activations in the step that vLLM profiles, on one GPU.

        M_act = max(B V (s + 6 k_d),
                    T a max((u + 1) f / tp, (u + 1) f_e k dp / (ep t_e) + k dp h / ep)) + T h a
            (docs/model.md, eq. M8)

    Args:
        model: V vocabulary, h hidden size, f and f_e feed-forwards, u 2 if gated, else 1.
        engine: B = max_num_seqs, s = logit_bytes, k_d drafts, T = max_num_batched_tokens; an
            `activation_bytes` of its own, other than zero, is taken instead.
        slicing: of one replica, t_e ways of one expert.

    Source:
        The sampler holds the logits of all sequences, whole on every rank, several times; a layer
        holds what its feed-forward makes.

    Ignores:
        Attention's workspace; towers for images or sound; engines that sample otherwise.
    """
    if engine.activation_bytes:
        return engine.activation_bytes
    tokens, passes = engine.max_num_batched_tokens, 3 if model.gated_mlp else 2
    width = passes * model.ffn_size / slicing.tp
    if model.moe:
        rows = model.moe.experts_per_token * slicing.dp / slicing.ep
        routed = rows * (passes * model.moe.expert_ffn_size / slicing.moe_tp + model.expert_width)
        width = max(width, routed)
    per_logit = engine.logit_bytes + DRAFT_BYTES_PER_LOGIT * engine.speculative_tokens
    sampler = engine.max_num_seqs * model.vocab_size * per_logit
    layer = tokens * width * ACTIVATION_BYTES
    return max(sampler, layer) + tokens * model.hidden_size * ACTIVATION_BYTES


def exchange_bytes(slicing: Slicing) -> float:
    """
    Buffers of collectives on one GPU: by the number of GPUs of the replica (eq. M7).

    M_x of docs/model.md, eq. M7; 0 on a single GPU.
    """
    fitting = [size for group, size in EXCHANGE_BYTES.items() if group <= slicing.gpus]
    return float(fitting[-1]) if fitting else 0.0


LIBRARY_BYTES = 2 * 2**30
"""
Buffers of DeepEP's normal kernels, 1 GiB for NVLink and as much for RDMA.

Source: vLLM 0.29.0 envs.py, VLLM_DEEPEP_BUFFER_SIZE_MB, read 2026-11-26.
"""


def library_bytes(model: ModelSpec, engine: EngineProfile, *, slicing: Slicing) -> float:
    """
    Buffers of a library that sends tokens to their experts, on one GPU.

        M_a = 2 GiB + 4 E T h (a + 1/32)      (docs/model.md, eq. M9)

    Args:
        model: E experts of a layer with their copies, h hidden size.
        engine: T tokens of a decode step at most: max_num_seqs, each with its drafts.
        slicing: 0 where ranks send no tokens to experts.

    Source:
        DeepEP csrc/config.hpp, LowLatencyLayout: two send and two receive buffers, each with room
        for all tokens of a rank at every expert; vLLM 0.29.0
        distributed/device_communicators/all2all.py.
    """
    if engine.all_to_all is None or model.moe is None or not slicing.routes_tokens:
        return 0.0
    tokens = engine.max_num_seqs * (1 + engine.speculative_tokens)
    message = model.expert_width * (ACTIVATION_BYTES + 1 / 32)
    return LIBRARY_BYTES + 4 * model.moe.num_copies * tokens * message


def kv_space_bytes(
    model: ModelSpec, gpu: GpuSpec, engine: EngineProfile, *, slicing: Slicing
) -> float:
    """
    Bytes that a GPU has left for the KV cache; negative if the weights do not fit.

        M_kv = f M - M_w - M_lora - M_act - M_run - M_x - M_a      (docs/model.md, eq. M4)

    Args:
        gpu: M, its memory.
        engine: f, M_run (context and CUDA graphs), limits of a step.

    Source:
        vLLM profiles a step of `max_num_batched_tokens` and gives the rest to the KV cache.

    Ignores:
        Fragmentation; towers for images or sound.
    """
    usable = gpu.require("hbm_bytes") * engine.gpu_memory_utilization
    working = activation_bytes(model, engine, slicing=slicing) + exchange_bytes(slicing)
    working += library_bytes(model, engine, slicing=slicing)
    weights = weight_bytes(model, slicing=slicing) + slot_bytes(model, engine, slicing=slicing)
    return usable - weights - working - engine.runtime_bytes


def slot_bytes(model: ModelSpec, engine: EngineProfile, *, slicing: Slicing) -> float:
    """
    Slots for adapters on one GPU of the longest pipeline stage; 0 without adapters.

        M_lora = max_loras M_ad      (docs/model.md, eq. M10)

    Source:
        vLLM 0.29.0, lora/layers/base_linear.py: every slot has the largest rank, and is allocated
        with the model.
    """
    lora = engine.lora
    if lora is None:
        return 0.0
    layers = max(stage_layers(model.num_layers, slicing.pp))
    return lora.max_loras * adapter_bytes(lora, model, tp=slicing.tp, layers=layers)
