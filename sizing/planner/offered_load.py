"""The requests that come, and the steps and limits of the pools that they are offered to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import StepModel
from minicluster.specs.workload import WorkloadSpec
from minicluster.workload.arrivals import EquallyLikely, equally_likely

if TYPE_CHECKING:
    from numpy.typing import NDArray


QUANTILES = 128
"""Equally likely lengths that stand for a distribution."""

NEXT_TO_NONE = 1e-9
"""Share of the prompts that a prefill pool gets which is left with none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """
    Limits of one step.

    Attributes:
        max_batch_size: sequences, memory included; of a prefill pool prompts.
        max_batched_tokens: prompt tokens.
    """

    max_batch_size: int
    max_batched_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class OfferedLoad:
    """
    The requests of a scenario, and the steps of one batch of each pool that serves them.

    Attributes:
        split: whether a prefill pool computes the prompts above the local threshold; else one pool
            does both, and *prefill* is of its steps that hold a prompt.
        local_threshold_tokens: longest prompt that its decode replica computes.
        tokens_per_step: mean tokens per sequence and decode step; above 1 with drafts.
    """

    workload: WorkloadSpec
    step_model: StepModel
    prefill: StepLimits
    decode: StepLimits
    split: bool
    local_threshold_tokens: int
    tokens_per_step: float

    @cached_property
    def all_tokens(self) -> NDArray[np.float64]:
        """Prompt tokens, cached ones included: equally likely lengths, ascending."""
        return self._requests.input_tokens

    @cached_property
    def num_local(self) -> int:
        """Number of those lengths that the decode pool computes."""
        return int(np.searchsorted(self.all_tokens, self.local_threshold_tokens, side="right"))

    @cached_property
    def computed_tokens(self) -> NDArray[np.float64]:
        """Prompt tokens that the prefill pool computes, cached prefix left out: equally likely."""
        return np.maximum(1.0, self.all_tokens[self._remote] - self.cached_tokens)

    @property
    def cached_tokens(self) -> NDArray[np.float64]:
        """Tokens of the cached prefix of each of `computed_tokens`."""
        return self.prefix_tokens[self._remote]

    @property
    def _remote(self) -> slice:
        return slice(min(self.num_local, len(self.all_tokens) - 1), None)

    @cached_property
    def prefix_tokens(self) -> NDArray[np.float64]:
        """Tokens in the prefix cache of each of `all_tokens`."""
        return self._of_class([float(part.prefix_tokens) for part in self.workload.parts])

    @property
    def prefill_requests_per_s(self) -> float:
        """Rate of prompts that the prefill pool computes."""
        share = max(1 - self.num_local / len(self.all_tokens), NEXT_TO_NONE)
        return self.workload.requests_per_s * share

    @cached_property
    def output_tokens(self) -> NDArray[np.float64]:
        """Output lengths, equally likely."""
        return self._requests.output_tokens

    @cached_property
    def answer_moments(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """
        Mean and mean square of the answers to each of `all_tokens`.

        Of lengths that were counted together, those of the answer to it; else those of its class.
        """
        if self.paired:
            return self.output_tokens, self.output_tokens**2
        answers = [each.output_tokens for each in self.by_class]
        means = [float(each.mean()) for each in answers]
        return self._of_class(means), self._of_class([float(np.mean(o**2)) for o in answers])

    @property
    def paired(self) -> bool:
        """Whether each answer belongs to the prompt beside it."""
        return all(part.lengths for part in self.workload.parts)

    def _of_class(self, values: list[float]) -> NDArray[np.float64]:
        return np.array(values)[self._requests.class_of]

    @property
    def _requests(self) -> EquallyLikely:
        return equally_likely(self.workload, QUANTILES)

    @cached_property
    def by_class(self) -> tuple[OfferedLoad, ...]:
        """The same under the requests of each class alone; itself where there are none."""
        if not self.workload.classes:
            return (self,)
        return tuple(replace(self, workload=each) for each in self.workload.apart)

    @cached_property
    def context(self) -> tuple[float, float]:
        """
        Mean and standard deviation of the tokens that a sequence in decode has cached.

            E = E[n o] / E[o] + E[o^2] / (2 E[o])      (docs/model.md, eq. T5)

        A long answer is met more often than it is drawn, and half of it is there on average; of
        several classes each counts as often as its answers are met. Prompts that do not depend on
        answers are met as they are drawn: E[n o] = E[n] E[o].
        """
        if self.workload.classes:
            return self._context_of_classes()
        prompts, out = self.all_tokens, self.output_tokens
        if self.paired:
            mean = float(np.mean(out * (prompts + out / 2)) / np.mean(out))
            # Of a sequence that is met, all of the answer up to its end is equally likely.
            met = float(np.mean(out * (prompts**2 + prompts * out + out**2 / 3)) / np.mean(out))
            return mean, max(0.0, met - mean**2) ** 0.5
        mean = float(np.mean(out**2) / (2 * np.mean(out)))
        square = float(np.mean(out**3) / (3 * np.mean(out)))
        spread = float(np.var(prompts)) + square - mean**2
        return float(np.mean(prompts)) + mean, float(np.sqrt(spread))

    def _context_of_classes(self) -> tuple[float, float]:
        met = [
            each.workload.requests_per_s * float(each.output_tokens.mean())
            for each in self.by_class
        ]
        means, deviations = np.array([each.context for each in self.by_class]).T
        mean = np.average(means, weights=met)
        spread = np.average(deviations**2 + (means - mean) ** 2, weights=met)
        return float(mean), float(np.sqrt(spread))
