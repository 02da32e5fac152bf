"""Feed-forward of one layer: dense, shared experts, routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm
from sizing.specs.model import DTYPE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sizing.latency.load import StepLoad
    from sizing.specs.model import ModelSpec, MoeSpec
    from sizing.specs.slicing import Slicing


def feedforward_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    Feed-forward of all layers: dense (eq. W4), MoE (eq. W4 and W5, docs/model.md).

    Gated: gate and up are one GEMM of 2 f columns, then down; plain: up and down.
    """
    moe = model.moe
    dense_layers = moe.num_dense_layers if moe else model.num_layers
    ops = list(
        _dense_ops("mlp", model, load, width=model.ffn_size / slicing.tp, repeats=dense_layers)
    )
    if moe:
        layers = model.num_layers - dense_layers
        ops.append(
            gemm(
                "moe router",
                "W5",
                rows=load.tokens,
                inner=model.hidden_size,
                columns=moe.num_experts,
                dtype=model.dtype,
                repeats=layers,
            )
        )
        ops += _expert_ops(model, moe, load, slicing=slicing, layers=layers)
        ops += _dense_ops(
            "shared", model, load, width=moe.shared_ffn_size / slicing.tp, repeats=layers
        )
    return tuple(ops)


def experts_touched(
    num_experts: float, per_token: float, tokens: NDArray[np.float64]
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


def _dense_ops(
    name: str, model: ModelSpec, load: StepLoad, *, width: float, repeats: int
) -> tuple[Op, ...]:
    """Two GEMMs with *width* values between them, on one GPU; none if there is no width."""
    if not width or not repeats:
        return ()
    m, h, dtype = load.tokens, model.hidden_size, model.weight_dtype
    up = (2 if model.gated_mlp else 1) * width
    return (
        gemm(f"{name} up", "W4", rows=m, inner=h, columns=up, dtype=dtype, repeats=repeats),
        gemm(f"{name} down", "W4", rows=m, inner=width, columns=h, dtype=dtype, repeats=repeats),
    )


def _expert_ops(
    model: ModelSpec, moe: MoeSpec, load: StepLoad, *, slicing: Slicing, layers: int
) -> tuple[Op, ...]:
    """
    Grouped GEMMs over the experts that are touched on one GPU (eq. W5).

    The tokens of all copies of attention meet the experts of the stage: E / ep of them on this
    GPU, each sliced.
    """
    tokens = load.tokens * slicing.dp
    touched = experts_touched(moe.num_experts, moe.experts_per_token, tokens) / slicing.ep
    rows = tokens * moe.experts_per_token / slicing.ep
    h = model.hidden_size
    f = moe.expert_ffn_size / slicing.moe_tp
    ops = []
    for name, inner, columns in (
        ("experts up", h, (2 if model.gated_mlp else 1) * f),
        ("experts down", f, h),
    ):
        work = Work(
            flops=2 * rows * inner * columns,
            hbm_bytes=touched * inner * columns * DTYPE_BYTES[model.weight_dtype]
            + rows * (inner + columns) * ACTIVATION_BYTES,
        )
        ops.append(
            Op(
                name=name,
                equation="W5",
                kind="grouped gemm",
                dtype=model.weight_dtype,
                repeats=layers,
                work=work,
                rows=rows,
                columns=columns,
                inner=inner,
                groups=touched,
            )
        )
    return tuple(ops)
