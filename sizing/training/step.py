"""Seconds of one optimiser step: compute, exchanges, what hides what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.latency.roofline import op_time
from sizing.training.exchanges import TrainingLinks, exchanges
from sizing.training.memory import STAGES, stage_parameters
from sizing.training.passes import passes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.gpu import GpuSpec
    from sizing.latency.communication import Exchange
    from sizing.latency.op import Op
    from sizing.training.job import TrainingJob
    from sizing.training.layout import TrainingLayout

OPTIMISER_PASSES = 38.0
"""Bytes per parameter: norm and zeroing of 32-bit gradients (4 + 4), Adam reads gradient, weight
and two moments (16) and writes three (12) and the 16-bit weight (2)."""
BUSY_FRACTION = 0.95
"""Share of a step in which GPUs do what is modelled; the rest are gaps between kernels, waits for
the slowest GPU, data. The geometric mean of modelled over published step times, one number for the
21 rows of korthikanti, megatron and llama in tests/published/training.toml (2026-11-20)."""


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
    job: TrainingJob, layout: TrainingLayout, gpu: GpuSpec, links: TrainingLinks
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

    Args:
        job: what is trained.
        layout: how.
        gpu: peaks and efficiencies.
        links: seconds of exchanges between GPUs.

    Returns:
        Seconds and what they are made of; the parts add up to `step_s`.

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
    times = _micro_batch(job, layout, gpu, links)
    n, v, stages = layout.micro_batches(job), layout.interleave, layout.pp
    layer = times.forward_s + times.backward_s + times.recompute_s + times.slices_s
    layers = layout.stage_layers(job)
    last = layout.end_layers(job) * layer + times.head_s
    slowest = max(layers * layer if stages > 1 else 0.0, last) + times.send_s
    everything = job.model.num_layers * layer + stages * times.send_s + times.head_s
    bubble = max(0.0, everything - slowest) / v
    replica, exposed = _replica_s(job, layout, links, times)
    optimiser = _optimiser_s(job, layout, gpu)
    tensor = n * layers * times.slices_s
    modelled = n * slowest + bubble + exposed + optimiser
    return TrainingStep(
        step_s=modelled / BUSY_FRACTION,
        compute_s=n * (slowest - times.send_s) - tensor,
        recompute_s=n * layers * times.recompute_s,
        tensor_s=tensor,
        stage_s=n * times.send_s,
        bubble_s=bubble,
        replica_s=replica,
        exposed_replica_s=exposed,
        optimiser_s=optimiser,
        gaps_s=modelled / BUSY_FRACTION - modelled,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """Seconds of one micro-batch: per average layer, of the head, of the sends of a stage."""

    forward_s: float
    backward_s: float
    recompute_s: float
    slices_s: float
    head_s: float
    send_s: float


def _micro_batch(
    job: TrainingJob, layout: TrainingLayout, gpu: GpuSpec, links: TrainingLinks
) -> _MicroBatch:
    layers = job.model.num_layers
    ops = passes(job, layout)
    sent = exchanges(job, layout)
    forward, backward, again = (
        _seconds(each, gpu) for each in (ops.forward, ops.backward, ops.again(job.recompute))
    )
    experts = _sent_s(sent.experts, links)
    if job.overlap_experts:
        experts = max(0.0, experts - forward - backward - again)
    return _MicroBatch(
        forward_s=forward / layers,
        backward_s=backward / layers,
        recompute_s=again / layers,
        slices_s=(_sent_s(sent.slices, links) + experts) / layers,
        head_s=_seconds(ops.head, gpu),
        send_s=_sent_s(sent.stages, links),
    )


def _sent_s(sent: Iterable[Exchange], links: TrainingLinks) -> float:
    return sum(links.exchange_s(each) * each.repeats for each in sent)


def _seconds(ops: Iterable[Op], gpu: GpuSpec) -> float:
    return float(sum(op_time(op, gpu).seconds for op in ops))


def _replica_s(
    job: TrainingJob, layout: TrainingLayout, links: TrainingLinks, times: _MicroBatch
) -> tuple[float, float]:
    """
    Time what replicas exchange, and what of it is exposed.

        max(0, t_weights - L t_f) + max(0, t_gradients - L t_b), L layers of the stage
        (docs/model.md, eq. J9)
    """
    sent = exchanges(job, layout)
    weights, gradients = _sent_s(sent.weights, links), _sent_s(sent.gradients, links)
    if job.zero < 2:  # noqa: PLR2004  (stages of ZeRO)
        return weights + gradients, weights + gradients
    layers = layout.stage_layers(job)
    passes_s = layout.micro_batches(job) if job.zero == 3 else 1  # noqa: PLR2004
    hidden = layers * times.forward_s * passes_s
    again = layers * (times.backward_s + times.recompute_s)
    exposed = max(0.0, weights - hidden) + max(0.0, gradients - again)
    return weights + gradients, exposed


def _optimiser_s(job: TrainingJob, layout: TrainingLayout, gpu: GpuSpec) -> float:
    """Stream gradients, weights and moments once."""
    parameters = max(stage_parameters(job, layout, stage) for stage in STAGES)
    if job.zero:
        parameters /= layout.copies
    hbm = gpu.require("hbm_bytes_per_s")
    fraction = gpu.efficiency.elementwise.memory_fraction if gpu.efficiency else 1.0
    return parameters * OPTIMISER_PASSES / (hbm * fraction)
