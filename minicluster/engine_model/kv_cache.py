"""Bytes of the KV cache on one GPU: of a token, and of a sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minicluster.specs.model import DTYPE_BYTES, draft_layer
from minicluster.specs.slicing import Slicing, stage_layers

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec

INDEX_SCALE_BYTES = 4
"""Bytes of the scale of a key of the index: one fp32 beside its fp8 values (vLLM 0.29.0)."""


def kv_bytes_per_token(model: ModelSpec, *, tp: int = 1, slicing: Slicing | None = None) -> float:
    """
    KV cache of one token on the fullest GPU, in all layers that keep every token.

        b = 2 L max(1, K / tp) H w;  MLA: L ((r + d_rope) w + d_index + 4)
        (docs/model.md, eq. M2)

    Past tp = K every rank still holds one whole head, so a wider TP no longer saves KV memory;
    the latent of MLA and the key of an index have no heads to slice.

    Args:
        model: L layers, K KV heads, H head dimension, w bytes per value; those of a draft head
            count on every stage.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*; a pipeline stage holds its own layers only.

    Returns:
        Bytes per token and GPU.

    Source:
        vLLM: max(1, total_num_kv_heads // tp) heads a rank.

    Ignores:
        Layers with a sliding window, which keep at most a window, and linear ones (eq. M3);
        layouts of the fp8 latent that keep part of it in 16 bits (656 bytes in place of 576).

    """
    sliced = slicing or Slicing(tp=tp)
    full = model.num_full_layers * _fullest_share(model, sliced)
    size = full * _layer_kv_bytes(model.of_full_layers, tp=sliced.tp)
    if model.draft is not None:
        size += model.draft.num_layers * _layer_kv_bytes(draft_layer(model), tp=sliced.tp)
    return size


def state_bytes(
    model: ModelSpec, *, tp: int = 1, slicing: Slicing | None = None, drafts: int = 0
) -> float:
    """
    State of linear attention of one sequence, on the fullest GPU, however long it is.

        M_l = (1 + k) L_l (N_v d_k d_v w / tp + (c - 1) (max(2, 2 N_k / tp) d_k + N_v d_v / tp) a)
        (docs/model.md, eq. M6)

    Args:
        model: shapes.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*.
        drafts: k, tokens verified in a step, each of which leaves a state.

    Source:
        vLLM keeps the recurrent state and the last c - 1 inputs of the convolution, and one more
        of each for every draft (`num_speculative_blocks`).

    Ignores:
        Pages that are padded to the size of attention's.

    """
    spec, sliced = model.linear, slicing or Slicing(tp=tp)
    if spec is None:
        return 0.0
    layer = spec.state_bytes(model.dtype, tp=sliced.tp)
    return (1 + drafts) * spec.num_layers * _fullest_share(model, sliced) * layer


def kv_bytes_per_sequence(
    model: ModelSpec,
    tokens: float,
    *,
    tp: int = 1,
    slicing: Slicing | None = None,
    block_size: int,
    drafts: int = 0,
) -> float:
    """
    KV cache of a sequence of *tokens* tokens, in whole blocks, and its linear state.

        M_s = b c ceil(s / c) + b_window c ceil(min(s, w + c) / c) + M_l    (docs/model.md, eq. M3)

    Args:
        model: shapes.
        tokens: s.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*.
        block_size: c.
        drafts: tokens verified in a step; see `state_bytes`.

    Returns:
        Bytes per GPU.

    Source:
        Paged attention allocates blocks; windowed layers free those that left the window.

    Ignores:
        Prefixes that sequences share.

    """
    sliced = slicing or Slicing(tp=tp)
    kept = block_size * math.ceil(tokens / block_size)
    state = state_bytes(model, slicing=sliced, drafts=drafts)
    size = kept * kv_bytes_per_token(model, slicing=sliced) + state
    if model.num_window_layers:
        window = min(tokens, model.window_tokens + block_size)
        blocks = block_size * math.ceil(window / block_size)
        layers = model.num_window_layers * _fullest_share(model, sliced)
        size += blocks * layers * _layer_kv_bytes(model, tp=sliced.tp)
    return size


def _fullest_share(model: ModelSpec, slicing: Slicing) -> float:
    """Share of the layers that the fullest pipeline stage holds, every kind alike."""
    return max(stage_layers(model.num_layers, slicing.pp)) / model.num_layers


def _layer_kv_bytes(model: ModelSpec, *, tp: int) -> float:
    """Keys and values of one token in one layer, on one GPU."""
    w = DTYPE_BYTES[model.kv_dtype]
    if model.mla:
        index = model.index.head_dim + INDEX_SCALE_BYTES if model.index else 0
        return (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * w + index
    return 2 * max(1.0, model.num_kv_heads / tp) * model.head_dim * w
