"""Rows of the tables as ops of the step model, so that the fit uses the model's own equations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.op import ACTIVATION_BYTES, Op, Work
from sizing.latency.work import experts_touched

if TYPE_CHECKING:
    from op_tables.tables import Table

CHUNK = 64
LATENT = (576, 512)
"""Latent with position, and without: DeepSeek-V3, which the MLA tables were measured for."""


def gemms(table: Table, dtype: str) -> Op:
    """GEMMs m x k by k x n (docs/model.md, eq. W1)."""
    m, n, k = table["m"], table["n"], table["k"]
    moved = n * k * DTYPE_BYTES[dtype] + m * (n + k) * ACTIVATION_BYTES
    work = Work(flops=2 * m * n * k, hbm_bytes=moved)
    return _op("gemm", dtype, work, rows=m, columns=n, inner=k)


def experts(table: Table, dtype: str, *, even: bool) -> tuple[Op, Op]:
    """Up and down of gated experts, all alike or some popular, sliced over the GPUs (eq. W5)."""
    tokens, h = table["num_tokens"], table["hidden_size"]
    f = table["inter_size"] / table["moe_tp_size"]
    rows = tokens * table["topk"]
    touched = np.minimum(table["num_experts"], rows) if even else _touched(table)
    return tuple(  # type: ignore[return-value]
        _op(
            "grouped gemm",
            dtype,
            Work(
                flops=2 * rows * inner * columns,
                hbm_bytes=touched * inner * columns * DTYPE_BYTES[dtype]
                + rows * (inner + columns) * ACTIVATION_BYTES,
            ),
            rows=rows,
            columns=columns,
            inner=inner,
            groups=touched,
        )
        for inner, columns in ((h, 2 * f), (f, h))
    )


def _touched(table: Table) -> np.ndarray:
    """Experts that a step reads, of models with as many experts and experts per token together."""
    found = np.zeros(len(table["num_tokens"]))
    for experts, per_token in set(zip(table["num_experts"], table["topk"], strict=True)):
        own = (table["num_experts"] == experts) & (table["topk"] == per_token)
        found[own] = experts_touched(float(experts), float(per_token), table["num_tokens"][own])
    return found


def prefills(table: Table) -> Op:
    """Causal attention of prompts among themselves (eq. W3)."""
    b, s, heads, d = (table[key] for key in ("batch_size", "isl", "num_heads", "head_dim"))
    kv = _kv_heads(table)
    work = Work(
        flops=4 * b * heads * d * s * (s + 1) / 2,
        hbm_bytes=b * s * (2 * heads + 2 * kv) * d * ACTIVATION_BYTES,
    )
    return _op("prefill attention", "bf16", work, rows=s, keys=s, heads=heads, head_dim=d)


def decodes(table: Table) -> Op:
    """Attention of one token per sequence over its cache (eq. W3)."""
    b, heads, d = (table[key] for key in ("batch_size", "num_heads", "head_dim"))
    s = table["step"] + 1
    read = b * s * 2 * _kv_heads(table) * d * table["kv_bytes"]
    work = Work(flops=4 * b * heads * d * s, hbm_bytes=read + 2 * b * heads * d * ACTIVATION_BYTES)
    return _op("decode attention", "bf16", work, rows=b, keys=s, heads=heads, head_dim=d)


def latents(table: Table) -> Op:
    """Attention of one token per sequence over its latent (eq. W8)."""
    b, heads, s = table["batch_size"], table["num_heads"], table["step"] + 1
    wide, narrow = LATENT
    work = Work(
        flops=2 * b * heads * s * (wide + narrow),
        hbm_bytes=b * s * wide * table["kv_bytes"] + b * heads * (wide + narrow) * ACTIVATION_BYTES,
    )
    return _op("decode attention", "bf16", work, rows=b, keys=s, heads=heads, head_dim=float(wide))


def recurrences(table: Table) -> Op:
    """Gated delta rule over a prompt, or one step of it (eq. W10)."""
    k, v, heads = table["head_k_dim"], table["head_v_dim"], table["num_v_heads"]
    tokens = table["num_tokens"]
    prompt = table["seq_len"] > 1
    per_token = np.where(prompt, 6 * k * v + CHUNK * (6 * k + 4 * v), 6 * k * v)
    mixed = 2 * table["num_k_heads"] * k + heads * v
    moved = np.where(
        prompt, (mixed + heads * v + 2 / CHUNK * heads * k * v) * 2, 2 * heads * k * v * 4
    )
    work = Work(flops=tokens * heads * per_token, hbm_bytes=tokens * moved)
    rows = np.where(prompt, table["seq_len"], tokens)
    return _op("linear attention", "bf16", work, rows=rows, heads=heads)


def _kv_heads(table: Table) -> np.ndarray:
    """KV heads; the tables write 0 for as many as query heads."""
    kv = table["num_key_value_heads"]
    return np.where(kv == 0, table["num_heads"], kv)


def _op(kind: str, dtype: str, work: Work, **shape: object) -> Op:
    return Op(
        name=kind,
        equation="R1",
        kind=kind,
        dtype=dtype,
        repeats=1,
        work=work,
        **shape,  # type: ignore[arg-type]
    )
