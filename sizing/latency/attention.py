"""Attention of all layers: projections and scores, full, windowed, latent or linear."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.kv_cache import INDEX_SCALE_BYTES
from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm, keys_in_reach, pairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.model import IndexSpec, LinearSpec, MlaSpec, ModelSpec
    from sizing.latency.op import StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """
    Work of one attention kernel per pair, query and key, on one GPU.

    Attributes:
        repeats: layers.
        flops_per_pair: of a query and a key, all heads together.
        values_per_query: values read and written per query.
        bytes_per_key: read of the cache.
        window: keys that a query sees at most; 0: all.
        chunked: the window is a chunk of the sequence.
        dtype: that it multiplies in.
        gathers: every query reads keys of its own, those of an index.
    """

    name: str
    equation: str
    repeats: int
    heads: float
    head_dim: float
    flops_per_pair: float
    values_per_query: float
    bytes_per_key: float
    window: int = 0
    chunked: bool = False
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    gathers: bool = False

    def prefill(self, load: StepLoad) -> Op:
        """
        Scores of the prompts among themselves and over what is cached of them.

            F = 4 N H A,  Q = 2 n N H a + (n + p) 2 K' H w      (docs/model.md, eq. W3)
        """
        n, p = load.prompt_tokens, load.cached_tokens
        keys = n + keys_in_reach(p, self.window, chunked=self.chunked)
        seen = pairs(n, p, self.window, chunked=self.chunked) * load.prompts
        moved = n * self.values_per_query * ACTIVATION_BYTES + keys * self.bytes_per_key
        work = Work(self.flops_per_pair * seen, load.prompts * moved)
        return self._op("prefill", work, rows=n, keys=keys)

    def decode(self, load: StepLoad) -> Op:
        """
        Scores of q tokens per sequence, one without drafts, over its KV cache, which is read once.

            F = 4 N H B q s,  Q = B s 2 K' H w + 2 B q N H a      (docs/model.md, eq. W3)
        """
        s = keys_in_reach(load.context_tokens, self.window, chunked=self.chunked)
        met, moved = load.sequences * s, load.sequences * load.queries * self.values_per_query
        pairs = met * load.queries
        read = self.bytes_per_key * (pairs if self.gathers else met)
        work = Work(self.flops_per_pair * pairs, np.asarray(read + moved * ACTIVATION_BYTES))
        return self._op("decode", work, rows=load.sequences, keys=s)

    def _op(
        self, phase: str, work: Work, *, rows: NDArray[np.float64], keys: NDArray[np.float64]
    ) -> Op:
        return Op(
            f"{self.name} {phase}", self.equation, f"{phase} attention", self.dtype, self.repeats,
            work, rows=rows, keys=keys, heads=self.heads, head_dim=self.head_dim,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip


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
    absorbed = Scores(
        name="sparse attention" if model.index else "attention",
        equation="W9" if model.index else "W8",
        repeats=model.num_layers,
        heads=heads,
        head_dim=latent,
        flops_per_pair=2 * heads * (latent + mla.kv_lora_rank),
        values_per_query=heads * (latent + mla.kv_lora_rank),
        bytes_per_key=latent * DTYPE_BYTES[model.kv_dtype],
        window=model.index.top_k if model.index else 0,
        kv_dtype=model.kv_dtype,
        gathers=model.index is not None,
    )
    projections = _latent_projections(model, mla, load, tp=tp)
    if model.index:
        index = _index_ops(model, mla, model.index, load)
        return (*projections, *index, absorbed.prefill(load), absorbed.decode(load))
    expanded = replace(
        absorbed,
        head_dim=qk,
        flops_per_pair=2 * heads * (qk + mla.v_head_dim),
        values_per_query=heads * (qk + mla.v_head_dim),
    )
    return (*projections, expanded.prefill(load), absorbed.decode(load))


def _latent_projections(
    model: ModelSpec, mla: MlaSpec, load: StepLoad, *, tp: int
) -> tuple[Op, ...]:
    """
    Down- and up-projections, sizes as in P3: down on every GPU whole, up sliced.

    The down-projections of queries and of keys and values have one input and are one GEMM.

    Source:
        SGLang 0.5 `fused_qkv_a_proj_with_mqa` (pull request 5619, 2025-04-22: 4.2 % of a step of
        DeepSeek-V3 with one sequence, 3.8 % with 32), vLLM 0.29 `fused_qkv_a_proj`, and
        TensorRT-LLM 1.0 `kv_a_proj_with_mqa`, which is split after it is computed.
    """
    m, h, heads = load.tokens, model.hidden_size, model.num_heads / tp
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    expand = heads * (mla.qk_nope_head_dim + mla.v_head_dim)

    def project(name: str, rows: NDArray[np.float64], inner: float, columns: float) -> Op:
        dtype, layers = model.attention_dtype, model.num_layers
        return gemm(name, "W8", rows, inner, columns, dtype=dtype, repeats=layers)

    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    ops = [project("q", m, h, query), project("kv down", m, h, latent)]
    if mla.q_lora_rank:
        down = project("q and kv down", m, h, mla.q_lora_rank + latent)
        ops = [down, project("q up", m, mla.q_lora_rank, query)]
    ops.append(project("kv up", m, mla.kv_lora_rank, expand))
    if not model.index:
        cached = load.prompts * load.cached_tokens
        ops.append(project("kv up again", cached, mla.kv_lora_rank, expand))
    return *ops, project("o", m, heads * mla.v_head_dim, h)


def _index_ops(model: ModelSpec, mla: MlaSpec, index: IndexSpec, load: StepLoad) -> tuple[Op, ...]:
    """
    Score every key with the small heads of the index, whole on every GPU.

        F = 2 N_i d_i A,  Q = (n + p) (d_i + 4)      (docs/model.md, eq. W9)
    """
    m, layers = load.tokens, model.num_layers
    made_from, made = mla.q_lora_rank or model.hidden_size, index.num_heads * index.head_dim
    keys = index.head_dim + index.num_heads
    scores = Scores(
        name="index",
        equation="W9",
        repeats=layers,
        heads=index.num_heads,
        head_dim=index.head_dim,
        flops_per_pair=2 * made,
        values_per_query=made,
        bytes_per_key=index.head_dim + INDEX_SCALE_BYTES,
        dtype="fp8",
    )
    return (
        gemm("index q", "W9", m, made_from, made, dtype=model.attention_dtype, repeats=layers),
        gemm("index k", "W9", m, model.hidden_size, keys, dtype=model.dtype, repeats=layers),
        scores.prefill(load),
        scores.decode(load),
    )


def linear_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Projections (W1 with the sizes of P6), convolution and state (docs/model.md, eq. W10).

    Empty if the model has no such layers.
    """
    spec = model.linear
    if spec is None:
        return ()
    m, h = load.tokens, model.hidden_size
    values = spec.num_value_heads * spec.value_head_dim
    mixed_values = spec.mixed_values(tp=tp)
    made = mixed_values + (values + spec.scalars * spec.num_value_heads) / tp
    dtype, layers = model.attention_dtype, spec.num_layers
    mixed = m * 2 * mixed_values * bool(spec.conv_kernel) * ACTIVATION_BYTES
    return (
        gemm("linear in", "W10", m, h, made, dtype=dtype, repeats=layers),
        gemm("linear out", "W10", m, values / tp, h, dtype=dtype, repeats=layers),
        Op("linear convolution", "W10", "elementwise", model.dtype, layers, Work(0 * m, mixed)),
        *_state_ops(spec, load, tp=tp),
    )


def _state_ops(spec: LinearSpec, load: StepLoad, *, tp: int) -> tuple[Op, Op]:
    """
    Prefill in chunks of C tokens, attention inside and the state between; decode updates states.

        F = n N_v (6 d_k d_v + C (6 d_k + 4 d_v)),  others: n N_v (4 d_k d_v + C (d_k + d_v)),
        Q = n (2 N_k d_k + 2 N_v d_v) a + 2 (n / C) N_v d_k d_v a;
        F = B q N_v 6 d_k d_v (others: 4),  Q = B (1 + q) N_v d_k d_v w
        (docs/model.md, eq. W10)

    Of q tokens that are verified together each leaves its state, because any may be the last one.
    """
    k, v, heads = spec.key_head_dim, spec.value_head_dim, spec.num_value_heads / tp
    chunk = spec.chunk_tokens
    per_token, per_value = 4 * k * v + chunk * (k + v), 4
    if spec.kind == "delta":
        per_token, per_value = 6 * k * v + chunk * (6 * k + 4 * v), 6
    tokens = load.prompts * load.prompt_tokens
    moved = spec.mixed_values(tp=tp) + heads * v + 2 / chunk * heads * k * v
    prefill = Work(tokens * heads * per_token, np.asarray(tokens * moved * ACTIVATION_BYTES))
    state = load.sequences * heads * k * v
    passes = 1 + load.queries
    decode = Work(state * per_value * load.queries, passes * state * DTYPE_BYTES[spec.state_dtype])
    first, second = (
        Op(
            f"linear {phase}", "W10", "linear attention", "bf16", spec.num_layers, work,
            rows=rows, heads=heads, head_dim=k,
        )
        for phase, work, rows in (
            ("prefill", prefill, load.prompt_tokens), ("decode", decode, load.sequences),
        )
    )  # fmt: skip
    return first, second


def attention_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """Projections and scores of all layers, on one of *tp* GPUs."""
    linear = linear_ops(model, load, tp=tp)
    if model.mla:
        return (*linear, *latent_ops(model, model.mla, load, tp=tp))
    return (*linear, *_head_ops(model, load, tp=tp))


def _head_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Queries, keys and values in one GEMM, the output, scores: of full and of windowed layers.

    GEMMs are those of W1 with the sizes of P2, the scores follow eq. W3. Layers whose heads are
    alike share their GEMMs.
    """
    full, windowed = model.num_full_layers, model.num_window_layers
    alike = windowed if model.full_heads is None else 0
    projections = (
        *_projections("", model.of_full_layers, load, tp=tp, repeats=full + alike),
        *_projections("window ", model, load, tp=tp, repeats=windowed - alike),
    )
    scores = (
        _scores("attention", model.of_full_layers, tp=tp, repeats=full),
        _scores("window attention", model, tp=tp, repeats=windowed, window=model.window_tokens),
    )
    ops = (op for each in scores for op in (each.prefill(load), each.decode(load)))
    return tuple(op for op in (*projections, *ops) if op.repeats)


def _projections(
    name: str, model: ModelSpec, load: StepLoad, *, tp: int, repeats: int
) -> tuple[Op, Op]:
    """Queries, keys and values in one GEMM, and the output."""
    m, h, dtype = load.tokens, model.hidden_size, model.attention_dtype
    heads, kv_heads = model.num_heads / tp, max(1.0, model.num_kv_heads / tp)
    keys = kv_heads * (1 if model.shared_values else 2)
    made = (heads * (2 if model.gated_attention else 1) + keys) * model.head_dim
    return (
        gemm(f"{name}qkv", "W1", m, h, made, dtype=dtype, repeats=repeats),
        gemm(f"{name}o", "W1", m, heads * model.head_dim, h, dtype=dtype, repeats=repeats),
    )


def _scores(name: str, model: ModelSpec, *, tp: int, repeats: int, window: int = 0) -> Scores:
    """Return the scores of layers whose heads the model has."""
    heads, kv_heads = model.num_heads / tp, max(1.0, model.num_kv_heads / tp)
    return Scores(
        name=name,
        equation="W3",
        repeats=repeats,
        heads=heads,
        head_dim=model.head_dim,
        flops_per_pair=4 * heads * model.head_dim,
        values_per_query=2 * heads * model.head_dim,
        bytes_per_key=2 * kv_heads * model.head_dim * DTYPE_BYTES[model.kv_dtype],
        window=window,
        chunked=model.chunked_window,
        kv_dtype=model.kv_dtype,
    )
