"""Bytes on one GPU: weights, KV cache, working memory; how many sequences fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sizing.specs.model import DTYPE_BYTES
from sizing.specs.parameters import parameters
from sizing.specs.parameters import weight_bytes as all_weight_bytes

if TYPE_CHECKING:
    from sizing.specs.engine import EngineProfile
    from sizing.specs.gpu import GpuSpec
    from sizing.specs.model import ModelSpec


def weight_bytes(model: ModelSpec, *, tp: int) -> float:
    """
    Weights on the fullest of *tp* GPUs.

        M_w = M / tp + (1 - 1 / tp) M_whole + 2 L D H max(0, 1 - K / tp) w
        (docs/model.md, eq. M1)

    M_whole, on every GPU: norms, routers, and the down-projections of latent attention.

    Args:
        model: shapes and dtypes.
        tp: tensor-parallel degree.

    Returns:
        Bytes.

    Source:
        vLLM slices every projection by columns or rows and keeps a whole KV head per rank.

    Ignores:
        Block scales (at most 6 %), vision towers, padding of the vocabulary.

    """
    counts = parameters(model)
    w = DTYPE_BYTES[model.weight_dtype if model.attention_quantised else model.dtype]
    whole = (counts.norms + counts.router) * DTYPE_BYTES[model.dtype]
    copied = 0.0
    if model.mla:
        latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim + model.mla.q_lora_rank
        whole += model.num_layers * model.hidden_size * latent * w
    else:
        head = model.num_layers * model.hidden_size * model.head_dim * w
        copied = 2 * head * max(0.0, 1 - model.num_kv_heads / tp)
    return all_weight_bytes(model) / tp + (1 - 1 / tp) * whole + copied


def kv_bytes_per_token(model: ModelSpec, *, tp: int) -> float:
    """
    KV cache of one token on the fullest GPU, in all layers that keep every token.

        b = 2 L max(1, K / tp) H w;  MLA: L (r + d_rope) w      (docs/model.md, eq. M2)

    Past tp = K every rank still holds one whole head, so a wider TP no longer saves KV memory;
    the latent of MLA has no heads to slice.

    Args:
        model: L layers, K KV heads, H head dimension, w bytes per value.
        tp: tensor-parallel degree.

    Returns:
        Bytes per token and GPU.

    Source:
        vLLM: max(1, total_num_kv_heads // tp) heads a rank.

    Ignores:
        Layers with a sliding window: they keep at most a window (eq. M3).

    """
    return (model.num_layers - model.num_window_layers) * _layer_kv_bytes(model, tp=tp)


def kv_bytes_per_sequence(model: ModelSpec, tokens: float, *, tp: int, block_size: int) -> float:
    """
    KV cache of a sequence of *tokens* tokens, in whole blocks.

        M_s = b c ceil(s / c) + b_window c ceil(min(s, w + c) / c)      (docs/model.md, eq. M3)

    Args:
        model: shapes.
        tokens: s.
        tp: tensor-parallel degree.
        block_size: c.

    Returns:
        Bytes per GPU.

    Source:
        Paged attention allocates blocks; windowed layers free those that left the window.

    Ignores:
        Prefixes that sequences share.

    """
    kept = block_size * math.ceil(tokens / block_size)
    size = kept * kv_bytes_per_token(model, tp=tp)
    if model.num_window_layers:
        window = min(tokens, model.window_tokens + block_size)
        blocks = block_size * math.ceil(window / block_size)
        size += blocks * model.num_window_layers * _layer_kv_bytes(model, tp=tp)
    return size


def kv_space_bytes(model: ModelSpec, gpu: GpuSpec, engine: EngineProfile, *, tp: int) -> float:
    """
    What a GPU has left for the KV cache; negative if the weights do not fit.

        M_kv = f M - M_w - M_act - M_run      (docs/model.md, eq. M4)

    Args:
        model: shapes.
        gpu: M, its memory.
        engine: f, activation and runtime bytes.
        tp: tensor-parallel degree.

    Returns:
        Bytes.

    Source:
        vLLM profiles a step of `max_batched_tokens` and gives the rest to the KV cache.

    Ignores:
        Fragmentation; how activations grow with model and token budget.

    """
    usable = gpu.require("hbm_bytes") * engine.memory_fraction
    return usable - weight_bytes(model, tp=tp) - engine.activation_bytes - engine.runtime_bytes


def _layer_kv_bytes(model: ModelSpec, *, tp: int) -> float:
    """Keys and values of one token in one layer, on one GPU."""
    w = DTYPE_BYTES[model.kv_dtype]
    if model.mla:
        return (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * w
    return 2 * max(1.0, model.num_kv_heads / tp) * model.head_dim * w
