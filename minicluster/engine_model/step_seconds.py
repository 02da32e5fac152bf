"""Seconds of one engine step, by what is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.step import StepCoefficients


class StepTime(Protocol):
    """
    Any model of a step that is linear in the context of the sequences decoded.

    Linear, because a stretch of decode steps is then one formula (docs/model.md, eq. Q2).

    Attributes:
        join_delay_s: delay of the sequences in a batch for each request that is to join it.
    """

    join_delay_s: float

    def decode_line(self, batch: int) -> tuple[float, float]:
        """Seconds of a decode step of *batch* sequences: without context, and per token of it."""

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """
        Seconds of a step with prompt tokens in it.

        Args:
            chunks: per prompt, tokens computed in this step and tokens cached before them.
            batch: sequences decoded in the same step.
            context: cached tokens that those read, all together.
        """


class FittedStep:
    """
    The step of a plan's coefficients (docs/model.md, eq. S1).

    Ignores: nothing of S1; see there.
    """

    __slots__ = ("_lines", "coefficients")

    join_delay_s = 0.0

    def __init__(self, coefficients: StepCoefficients) -> None:
        """Keep the coefficients."""
        self.coefficients = coefficients
        self._lines: dict[int, tuple[float, float]] = {}

    def decode_line(self, batch: int) -> tuple[float, float]:
        """See `StepTime`."""
        line = self._lines.get(batch)
        if line is None:
            fixed = self.step_s((), batch, 0)
            line = (fixed, self.coefficients.per_context_token_s)
            self._lines[batch] = line
        return line

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`."""
        step = self.coefficients
        tokens, pairs = 0, 0.0
        for new, cached in chunks:
            tokens += new
            pairs += new * (cached + (new + 1) * 0.5)
        seconds = (
            step.base_s
            + max(step.stream_s, step.per_prefill_token_s * tokens + step.per_sequence_s * batch)
            + step.per_pair_s * pairs
            + step.per_context_token_s * context
        )
        if step.experts_s:
            seconds += step.experts_s * (1 - step.expert_miss_fraction ** (tokens + batch))
        return seconds
