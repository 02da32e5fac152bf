"""Attention of all layers: projections and scores, full, windowed, latent or linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.latent import latent_ops
from sizing.latency.linear import linear_ops
from sizing.latency.op import Op, gemm
from sizing.latency.scores import Scores

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec
    from sizing.latency.load import StepLoad


def attention_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """Projections and scores of all layers, on one of *tp* GPUs."""
    linear = linear_ops(model, load, tp=tp)
    if model.mla:
        return (*linear, *latent_ops(model, model.mla, load, tp=tp))
    return (*linear, *_projections(model, load, tp=tp), *_scores(model, load, tp=tp))


def _projections(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """Queries, keys and values in one GEMM, and the output: W1 with the sizes of P2."""
    layers = model.num_layers - model.num_linear_layers
    m, h, head = load.tokens, model.hidden_size, model.head_dim
    heads, kv_heads = model.num_heads / tp, max(1.0, model.num_kv_heads / tp)
    made = (heads * (2 if model.gated_attention else 1) + 2 * kv_heads) * head
    dtype = model.attention_dtype
    if not layers:
        return ()
    return (
        gemm("qkv", "W1", rows=m, inner=h, columns=made, dtype=dtype, repeats=layers),
        gemm("o", "W1", rows=m, inner=heads * head, columns=h, dtype=dtype, repeats=layers),
    )


def _scores(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """Scores of full layers and of windowed ones (eq. W3)."""
    heads, kv_heads = model.num_heads / tp, max(1.0, model.num_kv_heads / tp)
    ops = []
    for layers, window in (
        (model.num_full_layers, 0),
        (model.num_window_layers, model.window_tokens),
    ):
        if layers:
            scores = Scores(
                name="window attention" if window else "attention",
                equation="W3",
                repeats=layers,
                heads=heads,
                head_dim=model.head_dim,
                flops_per_pair=4 * heads * model.head_dim,
                values_per_query=2 * heads * model.head_dim,
                bytes_per_key=2 * kv_heads * model.head_dim * DTYPE_BYTES[model.kv_dtype],
                window=window,
                chunked=model.chunked_window,
                kv_dtype=model.kv_dtype,
            )
            ops += [scores.prefill(load), scores.decode(load)]
    return tuple(ops)
