"""Feed-forward of one layer: dense, shared experts, routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.experts import busiest_share, experts_touched
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec, MoeSpec
    from minicluster.specs.slicing import Slicing
    from sizing.latency.load import StepLoad


def feedforward_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    Feed-forward of all layers: dense (eq. W4), MoE (eq. W4 and W5, docs/model.md).

    Gated: gate and up are one GEMM of 2 f columns, then down; plain: up and down.
    """
    moe, dense_layers = model.moe, model.num_dense_layers
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


def _dense_ops(
    name: str, model: ModelSpec, load: StepLoad, *, width: float, repeats: int
) -> tuple[Op, ...]:
    """Two GEMMs with *width* values between them, on one GPU; none if there is no width."""
    if not width or not repeats:
        return ()
    m, h = load.tokens, model.hidden_size
    dtype = model.shared_dtype if name == "shared" else model.dense_dtype
    up = (2 if model.gated_mlp else 1) * width
    return (
        gemm(f"{name} up", "W4", rows=m, inner=h, columns=up, dtype=dtype, repeats=repeats),
        gemm(f"{name} down", "W4", rows=m, inner=width, columns=h, dtype=dtype, repeats=repeats),
    )


def _expert_ops(
    model: ModelSpec, moe: MoeSpec, load: StepLoad, *, slicing: Slicing, layers: int
) -> tuple[Op, ...]:
    """
    Grouped GEMMs over the experts that are touched on the busiest GPU (eq. W5 and W11).

    The tokens of all copies of attention meet the experts of the stage: E / ep of them on this
    GPU, each sliced.
    """
    tokens = load.tokens * slicing.dp
    experts, k = moe.num_experts, moe.experts_per_token
    busiest = busiest_share(experts, k, tokens, groups=slicing.ep)
    rows = tokens * k / slicing.ep * busiest
    touched = experts_touched(experts / slicing.ep, k / slicing.ep * busiest, tokens)
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
