"""A training run by rules of thumb: what can be said before there is a layout."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import positive

FP32_BYTES = 4.0
SECONDS_PER_DAY = 86_400.0
MEMORY_MULTIPLE = 8.0
"""Weights, gradients, two moments and activations over 32-bit weights: 7 to 8."""


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
