"""Attention of one layer: projections, scores over the prompt, scores over the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.load import pairs
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm
from sizing.specs.model import DTYPE_BYTES

if TYPE_CHECKING:
    from sizing.latency.load import StepLoad
    from sizing.specs.model import MlaSpec, ModelSpec


def attention_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """Projections and scores of all layers, on one of *tp* GPUs."""
    if model.mla:
        return _latent_ops(model, model.mla, load, tp=tp)
    head = model.head_dim
    kv_heads = max(1.0, model.num_kv_heads / tp)
    heads = model.num_heads / tp
    m, h, layers = load.tokens, model.hidden_size, model.num_layers
    dtype = model.weight_dtype if model.attention_quantised else model.dtype
    full = model.num_layers - model.num_window_layers
    ops = [
        gemm(
            "qkv",
            "W1",
            rows=m,
            inner=h,
            columns=(heads + 2 * kv_heads) * head,
            dtype=dtype,
            repeats=layers,
        ),
        gemm("o", "W1", rows=m, inner=heads * head, columns=h, dtype=dtype, repeats=layers),
    ]
    for layers, window in ((full, 0), (model.num_window_layers, model.window_tokens)):
        if not layers:
            continue
        name = " window" if window else ""
        ops += [
            _prefill(
                f"attention prefill{name}",
                load,
                window=window,
                repeats=layers,
                heads=heads,
                head_dim=head,
                per_pair=4 * heads * head,
                per_query=2 * heads * head,
                per_key=2 * kv_heads * head * DTYPE_BYTES[model.kv_dtype],
            ),
            _decode(
                f"attention decode{name}",
                load,
                window=window,
                repeats=layers,
                heads=heads,
                head_dim=head,
                per_pair=4 * heads * head,
                per_key=2 * kv_heads * head * DTYPE_BYTES[model.kv_dtype],
            ),
        ]
    return tuple(ops)


def _latent_ops(model: ModelSpec, mla: MlaSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Multi-head latent attention (docs/model.md, eq. W8).

    Prefill expands the latent into heads and attends in qk + v dimensions. Decode absorbs the
    expansion into the query and the output, and attends over the latent itself, which every
    tensor-parallel rank reads whole.
    """
    m, h, layers = load.tokens, model.hidden_size, model.num_layers
    dtype = model.weight_dtype if model.attention_quantised else model.dtype
    heads = model.num_heads / tp
    rank = mla.kv_lora_rank
    qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = rank + mla.qk_rope_head_dim
    expand = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.q_lora_rank:
        query = [
            gemm(
                "q down",
                "W8",
                rows=m,
                inner=h,
                columns=mla.q_lora_rank,
                dtype=dtype,
                repeats=layers,
            ),
            gemm(
                "q up",
                "W8",
                rows=m,
                inner=mla.q_lora_rank,
                columns=heads * qk,
                dtype=dtype,
                repeats=layers,
            ),
        ]
    else:
        query = [gemm("q", "W8", rows=m, inner=h, columns=heads * qk, dtype=dtype, repeats=layers)]
    kv_bytes = DTYPE_BYTES[model.kv_dtype]
    return (
        *query,
        gemm("kv down", "W8", rows=m, inner=h, columns=latent, dtype=dtype, repeats=layers),
        gemm("kv up", "W8", rows=m, inner=rank, columns=expand, dtype=dtype, repeats=layers),
        gemm(
            "o", "W8", rows=m, inner=heads * mla.v_head_dim, columns=h, dtype=dtype, repeats=layers
        ),
        _prefill(
            "attention prefill",
            load,
            window=0,
            repeats=layers,
            heads=heads,
            head_dim=qk,
            per_pair=2 * heads * (qk + mla.v_head_dim),
            per_query=heads * (qk + mla.v_head_dim),
            per_key=latent * kv_bytes,
        ),
        _decode(
            "attention decode",
            load,
            window=0,
            repeats=layers,
            heads=heads,
            head_dim=latent,
            per_pair=2 * heads * (latent + rank),
            per_key=latent * kv_bytes,
        ),
    )


def _prefill(  # noqa: PLR0913  (three counts per pair, query and key, and where they apply)
    name: str,
    load: StepLoad,
    *,
    window: int,
    repeats: int,
    heads: float,
    head_dim: float,
    per_pair: float,
    per_query: float,
    per_key: float,
) -> Op:
    """
    Scores of the prompts among themselves and over what is cached of them.

        F = 4 N H A,  Q = 2 n N H a + (n + p) 2 K' H w      (docs/model.md, eq. W3)
    """
    n, p = load.prompt_tokens, load.cached_tokens
    seen = np.minimum(p, window) if window else p
    work = Work(
        flops=per_pair * pairs(n, p, window) * load.prompts,
        hbm_bytes=load.prompts * (n * per_query * ACTIVATION_BYTES + (n + seen) * per_key),
    )
    return Op(
        name=name,
        equation="W3",
        kind="prefill attention",
        dtype="bf16",
        repeats=repeats,
        work=work,
        rows=n,
        keys=n + seen,
        heads=heads,
        head_dim=head_dim,
    )


def _decode(  # noqa: PLR0913  (two counts per pair and key, and where they apply)
    name: str,
    load: StepLoad,
    *,
    window: int,
    repeats: int,
    heads: float,
    head_dim: float,
    per_pair: float,
    per_key: float,
) -> Op:
    """
    Scores of one token per sequence over its KV cache.

        F = 4 N H B s,  Q = B s 2 K' H w      (docs/model.md, eq. W3)
    """
    s = np.minimum(load.context_tokens, window) if window else load.context_tokens
    read = load.sequences * s
    work = Work(flops=per_pair * read, hbm_bytes=per_key * read)
    return Op(
        name=name,
        equation="W3",
        kind="decode attention",
        dtype="bf16",
        repeats=repeats,
        work=work,
        rows=load.sequences,
        keys=s,
        heads=heads,
        head_dim=head_dim,
    )
