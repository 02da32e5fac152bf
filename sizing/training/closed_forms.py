"""Training by rules of thumb: what can be said before there is a layout."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import positive

FP32_BYTES = 4.0
SECONDS_PER_DAY = 86_400.0
MEMORY_MULTIPLE = 8.0
"""Weights, gradients, two moments and activations over 32-bit weights: 7 to 8."""


def training_flops(parameters: float, tokens: float, *, recompute: bool = False) -> float:
    """
    FLOPs of a whole training run by the rule of thumb.

        C = 6 P T,  with full recompute 8 P T      (docs/model.md, eq. J1)

    P are the parameters that a token is multiplied with; full recompute runs every forward pass
    twice.

    Source:
        Kaplan et al. (arXiv 2001.08361); Megatron (arXiv 2104.04473), section 5.1, for 8.

    Ignores:
        Scores of attention; `step_flops` counts them.
    """
    return (8 if recompute else 6) * parameters * tokens


def training_s(flops: float, gpus: float, flops_per_gpu_per_s: float) -> float:
    """
    Seconds that a run takes.

        t = C / (n X)      (docs/model.md, eq. J12)

    C is that of the whole run (`training_flops`), X what each of n GPUs achieves: its peak times
    utilisation.

    Source:
        Narayanan et al. (arXiv 2104.04473), section 5.1: 8 T P / (n X).

    Ignores:
        Restarts; `effective_fraction`.
    """
    return flops / (gpus * flops_per_gpu_per_s)


def scale_factor(throughput: float, gpus: float, throughput_of_one: float) -> float:
    """
    Share of linear scaling that n devices reach; 1 where nothing is lost.

        T_n / (n T)      (docs/model.md, eq. J13)

    Source:
        The definition; the seed talk's slide leaves out the parentheses.
    """
    return throughput / (gpus * throughput_of_one)


def weight_set_bytes(parameters: float, *, multiple: float = 1.0) -> float:
    """
    Bytes of 32-bit weights, or of a training job by the rule of 7 to 8 times these.

        M = c w P      (docs/model.md, eq. J14)

    c = 1: the weights alone, 7 to 8: with gradients, optimiser and activations; over all GPUs
    together.

    Source:
        Rule of thumb of the seed talks.

    Ignores:
        The layout and the batch, which `training_memory` counts.
    """
    return multiple * FP32_BYTES * parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """
    A training run by rules of thumb.

    Attributes:
        flops: of the run (eq. J1).
        days: on all GPUs at the given rate (eq. J12), `gpu_hours` on one.
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
    Return what can be said without a layout (docs/model.md, eq. J1, J12 and J14).

    Raises:
        InputError: a number that is not positive.
    """
    positive(parameters=parameters, tokens=tokens, gpus=gpus,
             flops_per_gpu_per_s=flops_per_gpu_per_s)  # fmt: skip
    flops = training_flops(parameters, tokens, recompute=recompute)
    seconds = training_s(flops, gpus, flops_per_gpu_per_s)
    return RuleOfThumb(
        parameters=parameters,
        tokens=tokens,
        gpus=gpus,
        flops_per_gpu_per_s=flops_per_gpu_per_s,
        flops=flops,
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=seconds * gpus / 3600,
        weight_bytes=weight_set_bytes(parameters),
        memory_bytes=weight_set_bytes(parameters, multiple=MEMORY_MULTIPLE),
    )
