"""Training by rules of thumb: what can be said before there is a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.checks import positive
from sizing.training.flops import training_flops

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

FP32_BYTES = 4.0
SECONDS_PER_DAY = 86_400.0
MEMORY_MULTIPLE = 8.0
"""Weights, gradients, two moments and activations over 32-bit weights: 7 to 8."""


def training_s(
    flops: ArrayLike, gpus: ArrayLike, flops_per_gpu_per_s: ArrayLike
) -> NDArray[np.float64]:
    """
    Seconds that a run takes.

        t = C / (n X)      (docs/model.md, eq. J12)

    Args:
        flops: C of the whole run (`training_flops`).
        gpus: n.
        flops_per_gpu_per_s: X that each achieves: peak times utilisation.

    Returns:
        Seconds, broadcast. One GPU (n = 1) gives GPU-seconds.

    Source:
        Narayanan et al. (arXiv 2104.04473), section 5.1: 8 T P / (n X).

    Ignores:
        Restarts; `effective_fraction`.

    """
    work = np.asarray(flops, np.float64)
    return np.asarray(work / (np.asarray(gpus) * np.asarray(flops_per_gpu_per_s)))


def achieved_flops_per_s(
    flops: ArrayLike, gpus: ArrayLike, seconds: ArrayLike
) -> NDArray[np.float64]:
    """Return X of eq. J12 from the time that a run took: FLOP/s of each GPU."""
    return training_s(flops, gpus, seconds)


def scale_factor(
    throughput: ArrayLike, gpus: ArrayLike, throughput_of_one: ArrayLike
) -> NDArray[np.float64]:
    """
    Share of linear scaling that n devices reach.

        T_n / (n T)      (docs/model.md, eq. J13)

    Args:
        throughput: T_n, of all together.
        gpus: n.
        throughput_of_one: T.

    Returns:
        1 where nothing is lost.

    Source:
        The definition; the seed talk's slide leaves out the parentheses.

    Ignores:
        Nothing.

    """
    return np.asarray(
        np.asarray(throughput, np.float64) / (np.asarray(gpus) * np.asarray(throughput_of_one))
    )


def weight_set_bytes(
    parameters: ArrayLike, *, value_bytes: float = FP32_BYTES, multiple: float = 1.0
) -> NDArray[np.float64]:
    """
    Bytes of the weights, or of a training job by the rule of 7 to 8 times its 32-bit weights.

        M = c w P      (docs/model.md, eq. J14)

    Args:
        parameters: P.
        value_bytes: w, of one weight.
        multiple: c; 1: the weights alone, 7 to 8: with gradients, optimiser and activations.

    Returns:
        Bytes, over all GPUs together.

    Source:
        Rule of thumb of the seed talks.

    Ignores:
        The layout and the batch, which `training_memory` counts.

    """
    return np.asarray(multiple * value_bytes * np.asarray(parameters, np.float64))


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
    flops = float(training_flops(parameters, tokens, recompute=recompute))
    seconds = float(training_s(flops, gpus, flops_per_gpu_per_s))
    return RuleOfThumb(
        parameters=parameters,
        tokens=tokens,
        gpus=gpus,
        flops_per_gpu_per_s=flops_per_gpu_per_s,
        flops=flops,
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=seconds * gpus / 3600,
        weight_bytes=float(weight_set_bytes(parameters)),
        memory_bytes=float(weight_set_bytes(parameters, multiple=MEMORY_MULTIPLE)),
    )
