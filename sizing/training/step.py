"""Seconds of one optimiser step: compute, exchanges, what hides what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.gpu import GpuSpec
from sizing.latency.collectives import exchange_s
from sizing.latency.roofline import op_time
from sizing.training.exchanges import exchanges
from sizing.training.memory import STAGES, stage_parameters
from sizing.training.passes import passes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sizing.latency.communication import Exchange
    from sizing.latency.op import Op
    from sizing.training.job import TrainingJob, TrainingLayout

OPTIMISER_PASSES = 38.0
"""Bytes per parameter: norm and zeroing of 32-bit gradients (4 + 4), Adam reads gradient, weight
and two moments (16) and writes three (12) and the 16-bit weight (2)."""
BUSY_FRACTION = 0.95
"""Share of a step in which GPUs do what is modelled; the rest are gaps between kernels, waits for
the slowest GPU, data. The geometric mean of modelled over published step times, one number for the
21 rows of korthikanti, megatron and llama in tests/published/training.toml (2026-11-20)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMachine:
    """GPUs and the links between them."""

    gpu: GpuSpec
    cluster: ClusterSpec

    def sent_s(self, sent: Iterable[Exchange]) -> float:
        """Seconds of all runs of exchanges (eq. N1, N2, N5)."""
        return sum(float(exchange_s(each, self.gpu, self.cluster)) * each.repeats for each in sent)

    def computed_s(self, ops: Iterable[Op]) -> float:
        """Seconds of ops, one after the other (eq. R1)."""
        return float(sum(op_time(op, self.gpu).seconds for op in ops))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """
    Seconds of one optimiser step on the critical path.

    Attributes:
        step_s: all of it.
        compute_s: ops of all micro-batches on the fullest stage.
        recompute_s: the part of `compute_s` that is run a second time.
        tensor_s: exchanges among tensor slices, slices of sequences and experts, not hidden.
        stage_s: sends between pipeline stages: not hidden.
        bubble_s: stages that wait for the first and the last micro-batch.
        replica_s: gradients and weights exchanged over replicas, hidden or not.
        exposed_replica_s: what of that no compute hides.
        optimiser_s: weights updated.
        gaps_s: what is not modelled, as a share of all.
    """

    step_s: float
    compute_s: float
    recompute_s: float
    tensor_s: float
    stage_s: float
    bubble_s: float
    replica_s: float
    exposed_replica_s: float
    optimiser_s: float
    gaps_s: float


def training_step(
    job: TrainingJob, layout: TrainingLayout, machine: TrainingMachine
) -> TrainingStep:
    """
    Time one optimiser step.

        t = (n t_max + (sum_i t_i - t_max) / v + exposed + Q_opt / (BW e)) / busy
        (docs/model.md, eq. J8)

    with t_i seconds of a micro-batch on stage i (forward, backward, recompute, exchanges among
    slices, what no compute hides of those among experts, sends), n micro-batches, v chunks of
    layers per stage. Replicas' exchanges are hidden behind the forward pass of the first
    micro-batch (weights) and the backward pass of the last (gradients) with zero 2 and 3, and not
    at all below (eq. J9).

    Raises:
        InputError: the layout does not fit the job, or the catalog lacks a number.

    Source:
        Narayanan et al. (arXiv 2104.04473), section 2.2, for the bubble of interleaved stages;
        overlap: FSDP prefetches, tensor slices wait (Llama 3, arXiv 2407.21783, section 3.3).

    Ignores:
        Stragglers and data loading beyond the one share `BUSY_FRACTION`, checkpoints
        (`effective_fraction`), exchanges that slow down kernels beside them.
    """
    refused = layout.refusal(job)
    if refused is not None:
        raise refused
    times = _micro_batch(job, layout, machine)
    n, v, stages = layout.micro_batches(job), layout.interleave, layout.pp
    layer = times.forward_s + times.backward_s + times.recompute_s + times.slices_s
    layers = layout.stage_layers(job)
    last = layout.layers_of(job, "last") * layer + times.head_s
    slowest = max(layers * layer if stages > 1 else 0.0, last) + times.send_s
    everything = job.model.num_layers * layer + stages * times.send_s + times.head_s
    bubble = max(0.0, everything - slowest) / v
    exposed = _exposed_s(job, layout, times)
    optimiser = _optimiser_s(job, layout, machine.gpu)
    tensor = n * layers * times.slices_s
    modelled = n * slowest + bubble + exposed + optimiser
    return TrainingStep(
        step_s=modelled / BUSY_FRACTION,
        compute_s=n * (slowest - times.send_s) - tensor,
        recompute_s=n * layers * times.recompute_s,
        tensor_s=tensor,
        stage_s=n * times.send_s,
        bubble_s=bubble,
        replica_s=times.weights_s + times.gradients_s,
        exposed_replica_s=exposed,
        optimiser_s=optimiser,
        gaps_s=modelled / BUSY_FRACTION - modelled,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """
    Seconds of one micro-batch: per average layer, of the head, of the sends of a stage.

    What replicas exchange, weights and gradients, is that of a whole step.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    slices_s: float
    head_s: float
    send_s: float
    weights_s: float
    gradients_s: float


def _micro_batch(job: TrainingJob, layout: TrainingLayout, machine: TrainingMachine) -> _MicroBatch:
    layers = job.model.num_layers
    ops = passes(job, layout)
    sent = exchanges(job, layout)
    forward, backward, again = (
        machine.computed_s(each) for each in (ops.forward, ops.backward, ops.again(job.recompute))
    )
    experts = machine.sent_s(sent.experts)
    if job.overlap_experts:
        experts = max(0.0, experts - forward - backward - again)
    return _MicroBatch(
        forward_s=forward / layers,
        backward_s=backward / layers,
        recompute_s=again / layers,
        slices_s=(machine.sent_s(sent.slices) + experts) / layers,
        head_s=machine.computed_s(ops.head),
        send_s=machine.sent_s(sent.stages),
        weights_s=machine.sent_s(sent.weights),
        gradients_s=machine.sent_s(sent.gradients),
    )


def _exposed_s(job: TrainingJob, layout: TrainingLayout, times: _MicroBatch) -> float:
    """
    Return what no compute hides of the exchanges over replicas.

        max(0, t_weights - L t_f) + max(0, t_gradients - L t_b), L layers of the stage
        (docs/model.md, eq. J9)
    """
    if job.zero < 2:  # noqa: PLR2004  (stages of ZeRO)
        return times.weights_s + times.gradients_s
    layers = layout.stage_layers(job)
    gathers = layout.micro_batches(job) if job.zero == 3 else 1  # noqa: PLR2004
    forward = layers * times.forward_s * gathers
    backward = layers * (times.backward_s + times.recompute_s)
    return max(0.0, times.weights_s - forward) + max(0.0, times.gradients_s - backward)


def _optimiser_s(job: TrainingJob, layout: TrainingLayout, gpu: GpuSpec) -> float:
    parameters = max(stage_parameters(job, layout, stage) for stage in STAGES)
    if job.zero:
        parameters /= layout.copies
    hbm = gpu.require("hbm_bytes_per_s")
    fraction = gpu.efficiency.elementwise.memory_fraction if gpu.efficiency else 1.0
    return parameters * OPTIMISER_PASSES / (hbm * fraction)
