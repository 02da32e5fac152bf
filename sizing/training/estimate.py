"""A training run: step, memory, days, energy and failures of a job in a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minicluster.errors import InputError
from minicluster.specs.checks import NotNegative, Positive, Spec, positive
from sizing.latency.roofline import multiply_dtype
from sizing.network.spares import checkpoint_interval_s, effective_fraction
from sizing.training.job import TrainingJob, TrainingLayout
from sizing.training.memory import TrainingMemory, trained_parameters, training_memory
from sizing.training.passes import StepFlops, step_flops
from sizing.training.step import TrainingMachine, TrainingStep, training_step

NEVER_RESTARTED = 100
"""Times between failures that no restart outlasts: the job would progress 1 part in e^100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions(Spec):
    """
    Interruptions of a run by failures.

    Attributes:
        gpu_mtbf_s: mean time between failures of one GPU, of any kind that stops the job.
        checkpoint_s: time that a checkpoint stops the job.
        restart_s: time from a failure until the last checkpoint runs again.
    """

    gpu_mtbf_s: Positive
    checkpoint_s: Positive
    restart_s: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEstimate:
    """
    Time that failures cost a run (eq. U1, U2, U3).

    Attributes:
        effective_fraction: share of the wall clock in which the job makes progress.
        days: duration with failures; `None` without a number of tokens.
        interruptions: expected number in that time.
    """

    job_mtbf_s: float
    checkpoint_interval_s: float
    effective_fraction: float
    days: float | None
    interruptions: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """
    Everything about one layout of a job.

    Attributes:
        step_s: one optimiser step.
        flops_per_gpu_per_s: executed, with what is recomputed: what publications call achieved.
        model_flops_per_gpu_per_s: without recompute.
        hfu_fraction: executed FLOPs over the dense peak; `mfu_fraction` without recompute.
        days: duration of all tokens without failures; `None` without a number of tokens.
        gpu_hours: the same on all GPUs.
        energy_j: energy of the GPUs at their power limit; no hosts, switches or cooling.
        memory_bytes: memory of the fullest GPU; `fits` compares it with the GPU's memory.
        scale_factor: tokens/s over those of a single replica times replicas; with experts, of as
            few replicas as share them out.
    """

    gpus: int
    layout: TrainingLayout
    parameters: int
    tokens_per_step: int
    step_s: float
    tokens_per_s: float
    flops_per_step: float
    flops_per_gpu_per_s: float
    model_flops_per_gpu_per_s: float
    hfu_fraction: float
    mfu_fraction: float
    memory_bytes: float
    hbm_bytes: float
    fits: bool
    scale_factor: float
    tokens: float | None
    days: float | None
    gpu_hours: float | None
    energy_j: float | None
    step: TrainingStep
    memory: TrainingMemory
    flops: StepFlops
    failures: FailureEstimate | None


def estimate(
    job: TrainingJob,
    layout: TrainingLayout,
    machine: TrainingMachine,
    *,
    tokens: float | None = None,
    interruptions: Interruptions | None = None,
) -> TrainingEstimate:
    """
    Estimate a training run; a layout that does not fit memory is estimated, too, and says so.

    Args:
        tokens: tokens of the whole run; `None`: only the step.
        interruptions: MTBF and checkpoint; `None`: no failures.

    Raises:
        InputError: a layout that does not fit the job, a number that the catalog lacks.
    """
    step = training_step(job, layout, machine)
    memory, flops = training_memory(job, layout), step_flops(job)
    per_gpu = 1 / (layout.gpus * step.step_s)
    peak = machine.gpu.peak_flops_per_s[multiply_dtype(job.model.weight_dtype, machine.gpu)]
    seconds = None if tokens is None else tokens / job.tokens_per_step * step.step_s
    gpu_seconds = None if seconds is None else seconds * layout.gpus
    hbm = machine.gpu.require("hbm_bytes")
    return TrainingEstimate(
        gpus=layout.gpus,
        layout=layout,
        parameters=trained_parameters(job),
        tokens_per_step=job.tokens_per_step,
        step_s=step.step_s,
        tokens_per_s=job.tokens_per_step / step.step_s,
        flops_per_step=flops.executed,
        flops_per_gpu_per_s=flops.executed * per_gpu,
        model_flops_per_gpu_per_s=flops.model * per_gpu,
        hfu_fraction=flops.executed * per_gpu / peak,
        mfu_fraction=flops.model * per_gpu / peak,
        memory_bytes=memory.total,
        hbm_bytes=hbm,
        fits=memory.total <= hbm,
        scale_factor=_scale_factor(job, layout, machine, step),
        tokens=tokens,
        days=None if seconds is None else seconds / SECONDS_PER_DAY,
        gpu_hours=None if gpu_seconds is None else gpu_seconds / 3600,
        energy_j=None if gpu_seconds is None else gpu_seconds * machine.gpu.require("power_w"),
        step=step,
        memory=memory,
        flops=flops,
        failures=None if interruptions is None else _failures(layout.gpus, interruptions, seconds),
    )


def _scale_factor(
    job: TrainingJob, layout: TrainingLayout, machine: TrainingMachine, step: TrainingStep
) -> float:
    """
    Compare with the fewest replicas that share out the experts, and their batch.

        T_n / (n T)      (docs/model.md, eq. J13)
    """
    least = max(1, layout.ep // layout.cp)
    if layout.dp == least:
        return 1.0
    alone = replace(job, batch_sequences=job.batch_sequences * least // layout.dp)
    one = training_step(alone, replace(layout, dp=least), machine)
    throughput, of_one = job.tokens_per_step / step.step_s, alone.tokens_per_step / one.step_s
    return throughput / (layout.dp / least * of_one)


def _failures(gpus: int, interruptions: Interruptions, seconds: float | None) -> FailureEstimate:
    """
    Take the best checkpoint interval and what it leaves.

        M = m / n: mean time between failures of a job that each of n GPUs stops
        (docs/model.md, eq. U1); Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected
        interruptions in 54 days on 16,384 GPUs
    """
    mtbf, checkpoint_s = interruptions.gpu_mtbf_s / gpus, interruptions.checkpoint_s
    if checkpoint_s >= 2 * mtbf:
        raise InputError("checkpoint_s", checkpoint_s, f"below the job's MTBF of {mtbf:.3g} s")
    if interruptions.restart_s >= NEVER_RESTARTED * mtbf:
        raise InputError(
            "restart_s",
            interruptions.restart_s,
            f"below {NEVER_RESTARTED} times the job's MTBF of {mtbf:.3g} s: it never restarts else",
        )
    interval = checkpoint_interval_s(checkpoint_s, mtbf)
    fraction = effective_fraction(
        mtbf, interval_s=interval, checkpoint_s=checkpoint_s, restart_s=interruptions.restart_s
    )
    wall = None if seconds is None else seconds / fraction
    return FailureEstimate(
        job_mtbf_s=mtbf,
        checkpoint_interval_s=interval,
        effective_fraction=fraction,
        days=None if wall is None else wall / SECONDS_PER_DAY,
        interruptions=None if wall is None else wall / mtbf,
    )


FP32_BYTES = 4.0
SECONDS_PER_DAY = 86_400.0
MEMORY_MULTIPLE = 8.0
"""Weights, gradients, two moments and activations over 32-bit weights: 7 to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """
    A training run by rules of thumb.

    Attributes:
        flops: FLOPs of the run (eq. J1).
        days: duration on all GPUs at the given rate (eq. J12), `gpu_hours` on one.
        weight_bytes: 32-bit weights (eq. J14).
        memory_bytes: 8 times that, over all GPUs together.
    """

    parameters: float
    tokens: float
    gpus: int
    flops_per_gpu_per_s: float
    flops: float
    days: float
    gpu_hours: float
    weight_bytes: float
    memory_bytes: float


def rule_of_thumb(
    parameters: float,
    tokens: float,
    *,
    gpus: int,
    flops_per_gpu_per_s: float,
    recompute: bool = False,
) -> RuleOfThumb:
    """
    Return what can be said without a layout.

        C = 6 P T, with full recompute 8 P T;  t = C / (n X);  M = c w P
        (docs/model.md, eq. J1, J12 and J14)

    P are the parameters that a token is multiplied with, X is what each of n GPUs achieves, w the
    bytes of a 32-bit number, c = 1 for the weights and 8 for the whole job.

    Raises:
        InputError: a number that is not positive.

    Source:
        Kaplan et al. (arXiv 2001.08361); Megatron (arXiv 2104.04473), section 5.1, for 8 and t;
        the seed talks for M.

    Ignores:
        Scores of attention, restarts, the layout and the batch.
    """
    positive(parameters=parameters, tokens=tokens, gpus=gpus,
             flops_per_gpu_per_s=flops_per_gpu_per_s)  # fmt: skip
    flops = (8 if recompute else 6) * parameters * tokens
    seconds = flops / (gpus * flops_per_gpu_per_s)
    weight_bytes = FP32_BYTES * parameters
    return RuleOfThumb(
        parameters=parameters,
        tokens=tokens,
        gpus=gpus,
        flops_per_gpu_per_s=flops_per_gpu_per_s,
        flops=flops,
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=seconds * gpus / 3600,
        weight_bytes=weight_bytes,
        memory_bytes=MEMORY_MULTIPLE * weight_bytes,
    )
