"""Seconds of one engine step, by what is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from minicluster.specs.step import StepSpec


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


class PlannedStep:
    """
    The step of a plan (docs/model.md, eq. S1 or S9).

    Ignores: nothing of them; see there.
    """

    __slots__ = ("_beside", "_lines", "spec")

    join_delay_s = 0.0

    def __init__(self, spec: StepSpec) -> None:
        """Keep what the plan carries, and by the batch what is made of it."""
        self.spec = spec
        self._lines: dict[int, tuple[float, float]] = {}
        self._beside: dict[int, Callable[[float, float], float]] = {}

    def decode_line(self, batch: int) -> tuple[float, float]:
        """See `StepTime`."""
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = self.spec.decode_line(batch)
        return line

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`."""
        tokens, pairs = 0, 0.0
        for new, cached in chunks:
            tokens += new
            pairs += new * (cached + (new + 1) * 0.5)
        if not tokens:
            return self.spec.step_s(0, 0, batch, context)
        beside = self._beside.get(batch)
        if beside is None:
            beside = self._beside[batch] = self.spec.beside(batch)
            self._lines[batch] = self.spec.decode_line(batch)
        return beside(tokens, pairs) + self._lines[batch][1] * context
