"""What the queues are computed from: the load, the step model, the sizes of the pools."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sizing.arrivals import length_quantiles
from sizing.plan import StepModel
from sizing.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


QUANTILES = 128
"""Equally likely lengths that stand for a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """
    One pool.

    Attributes:
        replicas: engines behind the router.
        max_batch_size: sequences that a step can hold, memory included.
        max_batched_tokens: prompt tokens that a step can hold.
    """

    replicas: int
    max_batch_size: int
    max_batched_tokens: int


@dataclass(frozen=True, kw_only=True)
class Tandem:
    """A prefill pool and a decode pool under a load, in the order in which serving runs them."""

    workload: WorkloadSpec
    step_model: StepModel
    prefill: Stage
    decode: Stage

    @cached_property
    def computed_tokens(self) -> NDArray[np.float64]:
        """Prompt tokens left to compute after the cached prefix: equally likely lengths."""
        lengths = length_quantiles(self.workload.input_tokens, QUANTILES)
        return np.maximum(1.0, lengths - self.workload.prefix_tokens)

    @cached_property
    def output_tokens(self) -> NDArray[np.float64]:
        """Output lengths, equally likely."""
        return length_quantiles(self.workload.output_tokens, QUANTILES)

    @cached_property
    def context(self) -> tuple[float, float]:
        """
        Mean and standard deviation of the tokens that a sequence in decode has cached.

            E = E[n] + E[o^2] / (2 E[o])      (docs/model.md, eq. T7)

        A long answer is met more often than it is drawn, and half of it is there on average.
        """
        prompts = length_quantiles(self.workload.input_tokens, QUANTILES)
        out = self.output_tokens
        mean = float(np.mean(out**2) / (2 * np.mean(out)))
        square = float(np.mean(out**3) / (3 * np.mean(out)))
        spread = float(np.var(prompts)) + max(0.0, square - mean**2)
        return float(np.mean(prompts)) + mean, float(np.sqrt(spread))
