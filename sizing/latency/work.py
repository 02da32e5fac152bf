"""Work of one engine step on one GPU: FLOPs and bytes, op by op, no seconds yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.latency.attention import attention_ops
from sizing.latency.feedforward import feedforward_ops
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing
    from sizing.latency.load import StepLoad


def step_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    List the ops that a step meets on its way through the model, collectives left out.

    The way leads through every pipeline stage and over one GPU of each: ops are repeated once
    per layer of the whole model, whatever `slicing.pp` is.

    Args:
        load: what one data-parallel copy of attention holds; arrays of any shape. The experts
            see the tokens of all copies, each taken to hold as much.

    Returns:
        Ops whose work has the shape of *load*; an op is repeated once a layer or once a step.
    """
    logits = model.vocab_size / slicing.tp
    return (
        *attention_ops(model, load, tp=slicing.tp),
        *feedforward_ops(model, load, slicing=slicing),
        *_elementwise_ops(model, load, slicing=slicing),
        # Logits of the last token of each prompt and of each sequence decoded (eq. W7).
        gemm("lm_head", "W7", load.logits, model.hidden_size, logits, dtype=model.dtype, repeats=1),
    )


def _elementwise_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    Norms, rotary embedding and activation: bytes only (docs/model.md, eq. W6).

    A fused norm reads and writes the hidden state and the residual. Rotary, and a norm of queries
    and keys, reads and writes them. The activation reads what `mlp up` wrote and writes half of it
    if gated.
    """
    m, tp, moe = load.tokens, slicing.tp, model.moe
    passes = 3.0 if model.gated_mlp else 2.0
    norms = model.num_mixed_layers + (0 if model.parallel_attention else model.num_ffn_layers)
    per_token = [  # norms of queries and of keys are two kernels
        ("norm", norms, 4.0 * model.hidden_size),
        *_head_passes(model, tp=tp),
        ("activation", model.num_dense_layers, passes * model.ffn_size / tp),
    ]
    if moe:
        # Tokens of dp copies meet k experts each, spread over the tp x dp GPUs of the stage.
        width = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        per_token.append(("expert activation", model.num_expert_layers, passes * width / tp))
    works = (Work(0 * m, m * values * ACTIVATION_BYTES) for *_, values in per_token)
    return tuple(
        Op(name, "W6", "elementwise", model.dtype, repeats, work)
        for (name, repeats, values), work in zip(per_token, works, strict=True)
        if repeats and values
    )


def _head_passes(model: ModelSpec, *, tp: int) -> Iterator[tuple[str, int, float]]:
    """Yield what reads and writes queries and keys: name, repeats, values of a token."""
    for kind, (layers, of) in zip(("", "window "), model.kinds_of_heads, strict=False):
        values = (of.num_heads / tp + max(1.0, of.num_kv_heads / tp)) * of.head_dim
        yield f"{kind}query norm", 2 * layers if model.query_norm else 0, values
        yield f"{kind}rotary", 0 if model.position_rows else layers, 2.0 * values
