"""What one engine step has to do on one GPU: FLOPs and bytes, op by op, no seconds yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.attention import attention_ops
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm
from sizing.specs.model import DTYPE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sizing.latency.load import StepLoad
    from sizing.specs.model import ModelSpec


def step_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    List the ops of one step on one of *tp* GPUs, collectives left out.

    Args:
        model: shapes and dtypes.
        load: what the step holds; arrays of any shape.
        tp: tensor-parallel degree; divides the heads.

    Returns:
        Ops whose work has the shape of *load*; an op is repeated once a layer or once a step.

    Ignores:
        Expert imbalance (every expert gets the same share), multi-token prediction, LoRA.

    """
    return (
        *attention_ops(model, load, tp=tp),
        *_mlp_ops(model, load, tp=tp),
        *_elementwise_ops(model, load, tp=tp),
        _lm_head(model, load, tp=tp),
    )


def experts_touched(
    num_experts: int, per_token: int, tokens: NDArray[np.float64]
) -> NDArray[np.float64]:
    """
    Experts that a step reads, if routing is uniform and independent.

        E' = E (1 - (1 - k / E)^m)      (docs/model.md, eq. W5)

    Args:
        num_experts: E.
        per_token: k.
        tokens: m, any shape.

    Returns:
        Expected count, between k (one token) and E.

    Source:
        Occupancy: an expert stays untouched by m tokens with probability (1 - k / E)^m.

    Ignores:
        Imbalance: popular experts make fewer of them touched, and the busiest one slower.

    """
    return np.asarray(num_experts * (1 - (1 - per_token / num_experts) ** tokens))


def _mlp_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Feed-forward: dense layers (eq. W4), MoE layers (eq. W5, docs/model.md).

    Gated: gate and up are one GEMM of 2 f columns, then down; plain: up and down.
    """
    m = load.tokens
    dtype = model.weight_dtype
    h = model.hidden_size
    up = 2 if model.gated_mlp else 1
    dense_layers = model.moe.num_dense_layers if model.moe else model.num_layers
    ops: list[Op] = []
    if dense_layers and model.ffn_size:
        f = model.ffn_size / tp
        ops += [
            gemm(
                "mlp up", "W4", rows=m, inner=h, columns=up * f, dtype=dtype, repeats=dense_layers
            ),
            gemm("mlp down", "W4", rows=m, inner=f, columns=h, dtype=dtype, repeats=dense_layers),
        ]
    if model.moe:
        layers = model.num_layers - dense_layers
        ops.append(
            gemm(
                "moe router",
                "W5",
                rows=m,
                inner=h,
                columns=model.moe.num_experts,
                dtype=model.dtype,
                repeats=layers,
            )
        )
        ops += _expert_ops(model, m, layers=layers, tp=tp)
        if model.moe.shared_ffn_size:
            f = model.moe.shared_ffn_size / tp
            ops += [
                gemm(
                    "shared up", "W4", rows=m, inner=h, columns=up * f, dtype=dtype, repeats=layers
                ),
                gemm("shared down", "W4", rows=m, inner=f, columns=h, dtype=dtype, repeats=layers),
            ]
    return tuple(ops)


def _expert_ops(
    model: ModelSpec, m: NDArray[np.float64], *, layers: int, tp: int
) -> tuple[Op, ...]:
    """Grouped GEMMs over the experts touched, each sliced over the tp GPUs (eq. W5)."""
    if model.moe is None:
        return ()
    k = model.moe.experts_per_token
    touched = experts_touched(model.moe.num_experts, k, m)
    h = model.hidden_size
    f = model.moe.expert_ffn_size / tp
    ops = []
    for name, inner, columns in (
        ("experts up", h, (2 if model.gated_mlp else 1) * f),
        ("experts down", f, h),
    ):
        work = Work(
            flops=2 * m * k * inner * columns,
            hbm_bytes=touched * inner * columns * DTYPE_BYTES[model.weight_dtype]
            + m * k * (inner + columns) * ACTIVATION_BYTES,
        )
        ops.append(
            Op(
                name=name,
                equation="W5",
                kind="gemm",
                dtype=model.weight_dtype,
                repeats=layers,
                work=work,
                rows=m * k / np.maximum(touched, 1),
                columns=touched * columns,
            )
        )
    return tuple(ops)


def _elementwise_ops(model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Norms, rotary embedding and activation: bytes only (docs/model.md, eq. W6).

    A fused norm reads and writes the hidden state and the residual. Rotary reads and writes
    queries and keys. The activation reads what `mlp up` wrote and writes half of it if gated.
    """
    m = load.tokens
    heads = model.num_heads / tp + max(1.0, model.num_kv_heads / tp)
    if model.moe:
        share = model.moe.num_dense_layers / model.num_layers
        width = share * model.ffn_size + (1 - share) * (
            model.moe.experts_per_token * model.moe.expert_ffn_size + model.moe.shared_ffn_size
        )
    else:
        width = float(model.ffn_size)
    per_token = {
        "norm": 4.0 * model.hidden_size,
        "rotary": 2.0 * heads * model.head_dim,
        "activation": (3.0 if model.gated_mlp else 2.0) * width / tp,
    }
    return tuple(
        Op(
            name=name,
            equation="W6",
            kind="elementwise",
            dtype=model.dtype,
            repeats=model.num_layers * (2 if name == "norm" else 1),
            work=Work(flops=0 * m, hbm_bytes=m * values * ACTIVATION_BYTES),
        )
        for name, values in per_token.items()
    )


def _lm_head(model: ModelSpec, load: StepLoad, *, tp: int) -> Op:
    """Logits of the last token of each prompt and of each sequence decoded (eq. W7)."""
    return gemm(
        "lm_head",
        "W7",
        rows=load.prompts + load.sequences,
        inner=model.hidden_size,
        columns=model.vocab_size / tp,
        dtype=model.dtype,
        repeats=1,
    )
