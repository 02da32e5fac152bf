"""Bytes that the GPUs of a training job send one another in a step; no seconds yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.latency.communication import Exchange
from sizing.latency.op import ACTIVATION_BYTES
from sizing.training.memory import GRADIENT_BYTES, WEIGHT_BYTES, stage_parameters

if TYPE_CHECKING:
    from sizing.training.job import TrainingJob, TrainingLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """
    Exchanges of one GPU: three kinds of one micro-batch, over all layers, and two of a step.

    Attributes:
        slices: among tensor slices and slices of sequences.
        stages: those of one pipeline stage.
        weights: over replicas, as gradients are.
    """

    slices: tuple[Exchange, ...]
    experts: tuple[Exchange, ...]
    stages: tuple[Exchange, ...]
    weights: tuple[Exchange, ...]
    gradients: tuple[Exchange, ...]


def exchanges(job: TrainingJob, layout: TrainingLayout) -> Exchanges:
    """List what one GPU exchanges: nothing for a degree of 1."""
    stages: tuple[Exchange, ...] = ()
    if layout.pp > 1:  # the hidden state on and its gradient back: S = m h a / tp (eq. J10)
        size, stride = _hidden_bytes(job, layout) / layout.tp, layout.tp * layout.cp
        times = 2 * layout.interleave
        stages = (Exchange("stage send", "J10", "point-to-point", 2, times, size, stride),)
    return Exchanges(
        slices=(*_tensor(job, layout), *_sequence(job, layout)),
        experts=_experts(job, layout),
        stages=stages,
        **_copies(job, layout),
    )


def _hidden_bytes(job: TrainingJob, layout: TrainingLayout) -> float:
    tokens = layout.tokens_per_micro_batch(job)
    return tokens * job.model.hidden_size * ACTIVATION_BYTES


def _tensor(job: TrainingJob, layout: TrainingLayout) -> tuple[Exchange, ...]:
    """
    Sum partial results over tensor slices.

        S = m h a: two all-reduces forward, two backward, two more if every layer is run again;
        sequence parallel: an all-gather and a reduce-scatter in place of each
        (docs/model.md, eq. J10)
    """
    if layout.tp == 1:
        return ()
    size = _hidden_bytes(job, layout)
    times = job.model.num_layers * (6 if job.recompute == "full" else 4)
    patterns = ("all-gather", "reduce-scatter") if job.sequence_parallel else ("all-reduce",)
    return tuple(
        Exchange(f"tensor {pattern}", "J10", pattern, layout.tp, times, size)
        for pattern in patterns
    )


def _sequence(job: TrainingJob, layout: TrainingLayout) -> tuple[Exchange, ...]:
    """
    Gather keys and values of the whole sequence, and scatter their gradients.

        S = b s 2 K H a / tp, once forward, once (gather and scatter) backward
        (docs/model.md, eq. J10)
    """
    if layout.cp == 1:
        return ()
    model = job.model
    keys = 2 * max(model.num_kv_heads, layout.tp) * model.head_dim / layout.tp
    size = layout.micro_batch * job.sequence_tokens * keys * ACTIVATION_BYTES
    gathers = 2 if job.recompute == "none" else 3
    return tuple(
        Exchange(f"sequence {pattern}", "J10", pattern, layout.cp, times * model.num_layers, size,
                 stride=layout.tp)
        for pattern, times in (("all-gather", gathers), ("reduce-scatter", 1))
    )  # fmt: skip


def _experts(job: TrainingJob, layout: TrainingLayout) -> tuple[Exchange, ...]:
    """
    Send tokens to their experts and back.

        S = m k h a / tp (1 - 1/ep), out and back, forward and backward (and again if full)
        (docs/model.md, eq. J10)
    """
    moe = job.model.moe
    if layout.ep == 1 or moe is None:
        return ()
    layers = job.model.num_layers - moe.num_dense_layers
    size = _hidden_bytes(job, layout) * moe.experts_per_token / layout.tp * (1 - 1 / layout.ep)
    times = layers * (6 if job.recompute == "full" else 4)
    stride = layout.tp if layout.cp >= layout.ep else layout.tp * layout.cp * layout.pp
    return (Exchange("expert all-to-all", "J10", "all-to-all", layout.ep, times, size, stride),)


def _copies(job: TrainingJob, layout: TrainingLayout) -> dict[str, tuple[Exchange, ...]]:
    """
    Gather sharded weights from the dp cp copies of them, and sum gradients over the copies.

        weights: S = 2 p, once a step (zero 1, 2), twice a micro-batch (zero 3);
        gradients: S = 4 p: an all-reduce, or a reduce-scatter where the optimiser is sharded
        (docs/model.md, eq. J11)

    Slices of a sequence lie nearer than replicas: the stride is the mean of both.
    """
    if layout.copies == 1:
        return {"weights": (), "gradients": ()}
    near = layout.dp == 1 or layout.pp == 1
    stride = layout.tp if near else layout.tp * layout.pp
    parameters = stage_parameters(job, layout)
    pattern = "reduce-scatter" if job.zero else "all-reduce"
    times = 2 * layout.micro_batches(job) if job.zero == 3 else 1  # noqa: PLR2004
    weights, gradients = (
        Exchange(f"{what} {how}", "J11", how, layout.copies, runs, bytes_each * parameters, stride)
        for what, how, runs, bytes_each in (
            ("weight", "all-gather", times, WEIGHT_BYTES),
            ("gradient", pattern, 1, GRADIENT_BYTES),
        )
    )
    return {"weights": (weights,) if job.zero else (), "gradients": (gradients,)}
