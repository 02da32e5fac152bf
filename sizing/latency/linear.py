"""Linear attention: projections, and a state that every token updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm

if TYPE_CHECKING:
    from minicluster.specs.model import LinearSpec, ModelSpec
    from sizing.latency.load import StepLoad

CHUNK = 64
"""Tokens that prefill handles at once (flash-linear-attention, used by vLLM and SGLang)."""


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
    made = spec.mixed_size + values + (2 * spec.num_value_heads if spec.delta_rule else 0)
    dtype, layers = model.attention_dtype, spec.num_layers
    convolution = Op(
        name="linear convolution",
        equation="W10",
        kind="elementwise",
        dtype=model.dtype,
        repeats=layers,
        work=Work(
            flops=0 * m,
            hbm_bytes=m * 2 * spec.mixed_size / tp * bool(spec.conv_kernel) * ACTIVATION_BYTES,
        ),
    )
    return (
        gemm("linear in", "W10", rows=m, inner=h, columns=made / tp, dtype=dtype, repeats=layers),
        gemm(
            "linear out", "W10", rows=m, inner=values / tp, columns=h, dtype=dtype, repeats=layers
        ),
        convolution,
        _prefill(spec, load, tp=tp),
        _decode(spec, load, tp=tp),
    )


def _prefill(spec: LinearSpec, load: StepLoad, *, tp: int) -> Op:
    """
    Chunks of C tokens: attention inside, the state between.

        F = n N_v (6 d_k d_v + C (6 d_k + 4 d_v)),  lightning: n N_v (4 d_k d_v + C (d_k + d_v))
        Q = n (2 N_k d_k + 2 N_v d_v) a + 2 (n / C) N_v d_k d_v a      (docs/model.md, eq. W10)
    """
    k, v = spec.key_head_dim, spec.value_head_dim
    heads = spec.num_value_heads / tp
    per_token = 6 * k * v + CHUNK * (6 * k + 4 * v)
    if not spec.delta_rule:
        per_token = 4 * k * v + CHUNK * (k + v)
    tokens = load.prompts * load.prompt_tokens
    moved = (spec.mixed_size + spec.num_value_heads * v) / tp + 2 / CHUNK * heads * k * v
    work = Work(
        flops=tokens * heads * per_token, hbm_bytes=np.asarray(tokens * moved * ACTIVATION_BYTES)
    )
    return _op("prefill", spec, work, rows=load.prompt_tokens, heads=heads)


def _decode(spec: LinearSpec, load: StepLoad, *, tp: int) -> Op:
    """
    Read, update and write the state of each sequence.

        F = B N_v 6 d_k d_v (lightning: 4),  Q = 2 B N_v d_k d_v w      (docs/model.md, eq. W10)
    """
    heads = spec.num_value_heads / tp
    state = load.sequences * heads * spec.key_head_dim * spec.value_head_dim
    work = Work(
        flops=state * (6 if spec.delta_rule else 4),
        hbm_bytes=2 * state * DTYPE_BYTES[spec.state_dtype],
    )
    return _op("decode", spec, work, rows=load.sequences, heads=heads)


def _op(phase: str, spec: LinearSpec, work: Work, *, rows: np.ndarray, heads: float) -> Op:
    """Name the op."""
    return Op(
        name=f"linear {phase}",
        equation="W10",
        kind="linear attention",
        dtype="bf16",
        repeats=spec.num_layers,
        work=work,
        rows=rows,
        heads=heads,
        head_dim=spec.key_head_dim,
    )
