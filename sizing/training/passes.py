"""FLOPs of a training step, and its ops on one GPU: forward, backward, what is run again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.model import DTYPE_BYTES
from minicluster.specs.slicing import Slicing
from sizing.latency.op import ACTIVATION_BYTES, Op, StepLoad, Work, gemm, pairs, prefill_load
from sizing.latency.work import step_ops

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sizing.training.job import TrainingJob, TrainingLayout

FLASH_BACKWARD = 2.5 * 0.73 / 0.63
"""Seconds of flash attention's backward kernel per second forward: five products instead of two,
at 63 % of an A100's peak where the forward kernel reaches 73 %."""
GRADIENT_PASSES = 8.0
"""Bytes per weight and micro-batch: a gradient in 32 bits is read and written."""
LOGIT_PASSES = (14.0, 10.0)
"""Bytes per logit, forward and backward: 16 bits in, 32-bit maximum, exponentials and sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """
    FLOPs of one optimiser step over all GPUs.

    Attributes:
        forward: of one forward pass.
        core: the part of it in scores and values of attention.
        head: the part of it in the output table.
        recompute: what the backward pass runs again.
    """

    forward: float
    core: float
    head: float
    recompute: float

    @property
    def model(self) -> float:
        """Forward and backward, once each: what MFU counts."""
        return 3 * self.forward

    @property
    def executed(self) -> float:
        """With what is run again: what HFU counts."""
        return self.model + self.recompute


def step_flops(job: TrainingJob) -> StepFlops:
    """
    FLOPs of one optimiser step on all GPUs together, multiplication by multiplication.

        F = 3 (sum of GEMMs + core + head) + recompute; core = 4 N H A per layer, A the pairs of
        the causal mask (flash) or all s^2 (materialised); recompute = 0, core, or all but the head
        (docs/model.md, eq. J2)

    Source:
        Megatron (arXiv 2104.04473), appendix: with full recompute, materialised scores and
        f = 4 h this is 96 B s L h^2 (1 + s / 6h + V / 16 L h); a backward pass multiplies twice.

    Ignores:
        Elementwise work; the scores that flash attention makes again inside its backward kernel.
    """
    s, none = np.asarray(float(job.sequence_tokens)), np.zeros(())
    ops = [
        op for op in step_ops(job.model, prefill_load(s), slicing=Slicing()) if op.name != "lm_head"
    ]
    core = sum(float(op.total.flops) for op in ops if op.kind == "prefill attention")
    if job.attention == "materialised":
        core *= float(s * s / pairs(s, none))
    rest = sum(float(op.total.flops) for op in ops if op.kind != "prefill attention")
    head = 2.0 * job.sequence_tokens * job.model.hidden_size * job.model.vocab_size
    again = {"none": 0.0, "selective": core, "full": core + rest}[job.recompute]
    n = job.batch_sequences
    return StepFlops(
        forward=n * (core + rest + head), core=n * core, head=n * head, recompute=n * again
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """
    Ops of one micro-batch, each repeated once per layer of the whole model.

    Attributes:
        forward: ops of the layers.
        backward: their gradients.
        core: the part of `forward` in the core of attention, which `selective` runs again.
        head: ops of the output table, forward and backward.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    core: tuple[Op, ...]
    head: tuple[Op, ...]

    def again(self, recompute: str) -> tuple[Op, ...]:
        """Return the ops that the backward pass runs a second time."""
        return {"none": (), "selective": self.core, "full": self.forward}[recompute]


def passes(job: TrainingJob, layout: TrainingLayout) -> Passes:
    """
    List the ops of one micro-batch.

        A GEMM of m x k with k x n: backward m x n with n x k, and k x m with m x n, whose result is
        added to 32-bit gradients; Q of elementwise ops by tensor (docs/model.md, eq. J7)

    They are those of one GPU, for all layers of the model; stages are shared out later.

    Source:
        The layers' definitions; kernels of Megatron-LM, which fuses bias, dropout and residual,
        and scale, mask and softmax; FlashAttention-2 (arXiv 2307.08691), abstract and section 3,
        for its backward kernel.

    Ignores:
        Lookups of the embedding; gradients of biases and norms' scales; experts that see more
        tokens than others, which an auxiliary loss evens out.
    """
    zero = np.zeros(())
    load = StepLoad(
        prompts=np.asarray(layout.micro_batch / layout.cp),
        prompt_tokens=np.asarray(float(job.sequence_tokens)),
        cached_tokens=zero,
        sequences=zero,
        context_tokens=zero,
    )
    every = [
        _shared_out(op, layout.ep)
        for op in step_ops(job.model, load, slicing=Slicing(tp=layout.tp))
    ]
    # Nothing is cached: latents of earlier tokens are not expanded again.
    gemms = [op for op in every if "gemm" in op.kind and op.name != "lm_head" and np.any(op.rows)]
    scores = [op for op in every if op.kind == "prefill attention"]
    core, core_backward = _core(job, layout, scores)
    outer, outer_backward = _elementwise(job, layout, load.tokens)
    return Passes(
        forward=(*gemms, *core, outer),
        backward=(*(back for op in gemms for back in _gradients(op)), *core_backward,
                  outer_backward),
        core=core,
        head=_head(job, layout, load.tokens),
    )  # fmt: skip


def _shared_out(op: Op, ep: int) -> Op:
    """Leave a GPU 1/ep of the experts, and as many rows as before: those of ep GPUs come to it."""
    if op.groups is None or ep == 1:
        return op
    weights = op.groups * np.asarray(op.inner) * np.asarray(op.columns) * DTYPE_BYTES[op.dtype]
    fewer = op.work.hbm_bytes - weights * (1 - 1 / ep)
    return replace(op, groups=op.groups / ep, work=replace(op.work, hbm_bytes=fewer))


def _gradients(op: Op) -> tuple[Op, Op]:
    """Gradients of a GEMM: by its activations, and by its weights (eq. J7)."""
    m, k, n = (np.asarray(x, np.float64) for x in (op.rows, op.inner, op.columns))
    groups: NDArray[np.float64] = np.ones(()) if op.groups is None else op.groups
    moved = (m * (k + n) + groups * k * n) * ACTIVATION_BYTES
    by_input = replace(op, name=f"{op.name} dgrad", columns=k, inner=n,
                       work=Work(flops=op.work.flops, hbm_bytes=moved))  # fmt: skip
    # Rows of the second are the weight's; its bytes of weights are gradients and what came back.
    weights = m * n * ACTIVATION_BYTES + groups * k * n * GRADIENT_PASSES
    activations = groups * k * (m / groups + n) * ACTIVATION_BYTES
    by_weight = replace(
        op, name=f"{op.name} wgrad", rows=groups * k, inner=m / groups, columns=n,
        work=Work(flops=op.work.flops, hbm_bytes=weights + activations),
    )  # fmt: skip
    return by_input, by_weight


def _core(
    job: TrainingJob, layout: TrainingLayout, scores: list[Op]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Scores, softmax, dropout and values, forward and backward."""
    if job.attention == "flash":
        back = [
            replace(op, name=f"{op.name} backward", work=op.work * FLASH_BACKWARD) for op in scores
        ]
        return tuple(scores), tuple(back)
    model, s = job.model, float(job.sequence_tokens)
    rows = np.asarray(layout.micro_batch * model.num_heads / layout.tp * s / layout.cp)
    products = [
        gemm(name, "J7", rows=rows, inner=inner, columns=columns, dtype=model.dtype,
             repeats=model.num_layers)
        for name, inner, columns in (
            ("scores", float(model.head_dim), s), ("values", s, float(model.head_dim)),
        )
    ]  # fmt: skip
    # softmax: read, write; dropout: read, write, mask; backward: three tensors, two and a mask
    forward, backward = (9.0, 11.0) if job.family == "gpt" else (4.0, 6.0)
    weights = [
        _bytes(job, name, float(rows) * s * each)
        for name, each in (("softmax", forward), ("softmax backward", backward))
    ]
    back = [replace(op, name=f"{op.name} backward", repeats=2 * op.repeats) for op in products]
    return (*products, weights[0]), (*back, weights[1])


def _elementwise(
    job: TrainingJob, layout: TrainingLayout, tokens: NDArray[np.float64]
) -> tuple[Op, Op]:
    """Everything else of a layer, forward and backward, by bytes a token."""
    model, t = job.model, layout.tp
    h, f = model.hidden_size, float(model.ffn_size)
    if model.moe:
        moe, dense = model.moe, model.num_dense_layers / model.num_layers
        f = dense * f + (1 - dense) * (
            moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        )
    queries, keys = model.num_heads * model.head_dim, max(t, model.num_kv_heads) * model.head_dim
    if model.mla:
        queries = keys = model.num_heads * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim)
    turned = 4.0 * (queries + keys)  # rotary positions, or heads brought together
    if job.family == "gpt":  # two norms (4), two of bias, dropout and residual (7); GeLU
        outer, inner = (2 * (4 + 7) * h, 4 * f + turned)
        outer_back, inner_back = (2 * (10 + 7) * h, 6 * f + turned)
    else:  # two norms (4) with residual (6); SwiGLU
        outer, inner = (2 * (4 + 6) * h, (6 if model.gated_mlp else 4) * f + turned)
        outer_back, inner_back = (2 * (6 + 6) * h, (10 if model.gated_mlp else 6) * f + turned)
    slices = t if job.sequence_parallel else 1
    m = float(tokens)
    return (
        _bytes(job, "elementwise", m * (outer / slices + inner / t)),
        _bytes(job, "elementwise backward", m * (outer_back / slices + inner_back / t)),
    )


def _head(job: TrainingJob, layout: TrainingLayout, tokens: NDArray[np.float64]) -> tuple[Op, ...]:
    columns = job.model.vocab_size / layout.tp
    logits = gemm(
        "lm_head", "W7", rows=tokens, inner=job.model.hidden_size, columns=columns,
        dtype=job.model.dtype, repeats=1,
    )  # fmt: skip
    loss = _bytes(job, "loss", float(tokens) * columns * sum(LOGIT_PASSES))
    return logits, *_gradients(logits), replace(loss, repeats=1)


def _bytes(job: TrainingJob, name: str, hbm_bytes: float) -> Op:
    return Op(
        name=name,
        equation="J7",
        kind="elementwise",
        dtype=job.model.dtype,
        repeats=job.model.num_layers,
        work=Work(flops=np.zeros(()), hbm_bytes=np.asarray(hbm_bytes)),
    )
