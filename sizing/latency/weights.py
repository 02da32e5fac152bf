"""Weights on one GPU of each pipeline stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minicluster.specs.model import DTYPE_BYTES, weight_value_bytes
from minicluster.specs.parameters import parameters
from minicluster.specs.slicing import Slicing, stage_layers

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec

FP4_MULTIPLE = 256
"""To a multiple of this vLLM 0.29.0 pads the hidden size of fp4 experts (Marlin, TensorRT-LLM)."""


def weight_bytes(model: ModelSpec, *, tp: int = 1, slicing: Slicing | None = None) -> float:
    """
    Weights on the fullest GPU: the largest of `stage_weight_bytes` (docs/model.md, eq. M1).

    Args:
        model: shapes and dtypes.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*.

    Returns:
        Bytes.

    """
    return max(stage_weight_bytes(model, slicing or Slicing(tp=tp)))


def stage_weight_bytes(model: ModelSpec, slicing: Slicing) -> tuple[float, ...]:
    """
    Weights on one GPU of each pipeline stage.

        M_w = (M_att + M_dense + M_shared) / tp + M_experts pad / (tp dp) + M_whole
              + 2 L D H max(0, 1 - K / tp) w, of the stage's layers; tables / tp on the first
              and last stage      (docs/model.md, eq. M1)

    M_whole, on every GPU: norms, routers, the down-projections of latent attention, its index.

    Args:
        model: shapes and dtypes.
        slicing: of one replica; experts lie on all tp x dp GPUs of a stage.

    Returns:
        Bytes, first stage first.

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
    moe_layers = model.num_layers - model.num_dense_layers
    experts = (
        _per_layer(counts.experts, moe_layers) * _expert_value_bytes(model)
        / (slicing.tp * slicing.dp)
        + _per_layer(counts.shared_experts, moe_layers) * _size(model, model.shared_dtype)
        / slicing.tp
        + _per_layer(counts.router, moe_layers) * a
    )  # fmt: skip
    stages, left = [], model.num_dense_layers
    for number in layers:
        here = min(left, number)
        left -= here
        feedforward = here * dense * _size(model, model.dense_dtype) + (number - here) * experts
        stages.append(number * (attention + norms) + feedforward)
    head = counts.lm_head if counts.lm_head or slicing.pp == 1 else counts.embedding
    stages[0] += counts.embedding * a / slicing.tp
    stages[-1] += head * a / slicing.tp
    return tuple(stages)


def _per_layer(count: int, layers: int) -> float:
    """Parameters of one of *layers* layers."""
    return count / layers if layers else 0.0


def _size(model: ModelSpec, dtype: str) -> float:
    """Bytes of one weight of *dtype*, scales included."""
    return weight_value_bytes(dtype, model.weight_group)


def _expert_value_bytes(model: ModelSpec) -> float:
    """Bytes of one weight of an expert, scales and padding included."""
    size = _size(model, model.weight_dtype)
    if model.weight_dtype == "fp4":
        size *= FP4_MULTIPLE * math.ceil(model.hidden_size / FP4_MULTIPLE) / model.hidden_size
    return size


def _attention_bytes(model: ModelSpec, tp: int) -> float:
    """Attention of all layers on one of *tp* GPUs."""
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
        copied = 2 * model.hidden_size * model.head_dim * max(0.0, 1 - model.num_kv_heads / tp)
    attending = model.num_layers - model.num_linear_layers
    sliced = parameters(model).attention - attending * whole
    return w * (sliced / tp + attending * (whole + copied))
