"""Multi-head latent attention, dense or read through an index."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import INDEX_SCALE_BYTES
from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.op import Op, gemm
from sizing.latency.scores import Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from minicluster.specs.model import IndexSpec, MlaSpec, ModelSpec
    from sizing.latency.load import StepLoad

SPARSE_HEADS = 64
"""FlashMLA's sparse kernels pad heads to a multiple of it on Hopper (vLLM 0.29.0, SGLang 0.5)."""


def latent_ops(model: ModelSpec, mla: MlaSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Multi-head latent attention (docs/model.md, eq. W8).

    Prefill expands the latent into heads and attends in qk + v dimensions; what is cached of a
    prompt is expanded again. Decode absorbs the expansion into the query and the output, and
    attends over the latent itself, which every tensor-parallel rank reads whole. With an index
    (eq. W9) both attend over the latents of the best keys, absorbed, in kernels that know no
    fewer than 64 heads.
    """
    heads = model.num_heads / tp
    if model.index:
        heads = SPARSE_HEADS * math.ceil(heads / SPARSE_HEADS)
    qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    common = {
        "repeats": model.num_layers,
        "heads": heads,
        "bytes_per_key": latent * DTYPE_BYTES[model.kv_dtype],
        "window": model.index.top_k if model.index else 0,
        "kv_dtype": model.kv_dtype,
    }
    absorbed = Scores(
        name="sparse attention" if model.index else "attention",
        equation="W9" if model.index else "W8",
        head_dim=latent,
        flops_per_pair=2 * heads * (latent + mla.kv_lora_rank),
        values_per_query=heads * (latent + mla.kv_lora_rank),
        **common,  # type: ignore[arg-type]
    )
    projections = _projections(model, mla, load, tp=tp)
    if model.index:
        index = _index_ops(model, mla, model.index, load)
        return (*projections, *index, absorbed.prefill(load), absorbed.decode(load))
    expanded = Scores(
        name="attention",
        equation="W8",
        head_dim=qk,
        flops_per_pair=2 * heads * (qk + mla.v_head_dim),
        values_per_query=heads * (qk + mla.v_head_dim),
        **common,  # type: ignore[arg-type]
    )
    return (*projections, expanded.prefill(load), absorbed.decode(load))


def _projections(model: ModelSpec, mla: MlaSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """Down- and up-projections, sizes as in P3: down on every GPU whole, up sliced."""
    m, h, heads = load.tokens, model.hidden_size, model.num_heads / tp
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    expand = heads * (mla.qk_nope_head_dim + mla.v_head_dim)

    def project(name: str, rows: NDArray[np.float64], inner: float, columns: float) -> Op:
        return gemm(
            name,
            "W8",
            rows=rows,
            inner=inner,
            columns=columns,
            dtype=model.attention_dtype,
            repeats=model.num_layers,
        )

    if mla.q_lora_rank:
        queries = [project("q down", m, h, mla.q_lora_rank)]
        queries.append(project("q up", m, mla.q_lora_rank, query))
    else:
        queries = [project("q", m, h, query)]
    again = () if model.index else (load.prompts * load.cached_tokens,)
    return (
        *queries,
        project("kv down", m, h, mla.kv_lora_rank + mla.qk_rope_head_dim),
        project("kv up", m, mla.kv_lora_rank, expand),
        *(project("kv up again", rows, mla.kv_lora_rank, expand) for rows in again),
        project("o", m, heads * mla.v_head_dim, h),
    )


def _index_ops(model: ModelSpec, mla: MlaSpec, index: IndexSpec, load: StepLoad) -> tuple[Op, ...]:
    """
    Score every key with the small heads of the index, whole on every GPU.

        F = 2 N_i d_i A,  Q = (n + p) (d_i + 4)      (docs/model.md, eq. W9)
    """
    m, layers = load.tokens, model.num_layers
    scores = Scores(
        name="index",
        equation="W9",
        repeats=layers,
        heads=index.num_heads,
        head_dim=index.head_dim,
        flops_per_pair=2 * index.num_heads * index.head_dim,
        values_per_query=index.num_heads * index.head_dim,
        bytes_per_key=index.head_dim + INDEX_SCALE_BYTES,
        dtype="fp8",
    )
    return (
        gemm(
            "index q",
            "W9",
            rows=m,
            inner=mla.q_lora_rank or model.hidden_size,
            columns=index.num_heads * index.head_dim,
            dtype=model.attention_dtype,
            repeats=layers,
        ),
        gemm(
            "index k",
            "W9",
            rows=m,
            inner=model.hidden_size,
            columns=index.head_dim + index.num_heads,
            dtype=model.dtype,
            repeats=layers,
        ),
        scores.prefill(load),
        scores.decode(load),
    )
