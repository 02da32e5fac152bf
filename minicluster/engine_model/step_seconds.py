"""Seconds of one engine step, by what is in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """
    Steps of n prompt tokens and B sequences, on a grid (docs/model.md, eq. S9).

    Attributes:
        tokens: n of the grid, ascending from 0.
        sequences: B of the grid, ascending from 0.
        plain: seconds without context, M, a list over n for each B.
        prompt_tokens: length of the prompts of which n are in M.
        per_cached: seconds per token before each prompt token, a, beyond those in M, for each n.
        attention: seconds of attention to short contexts, A, for each B.
        per_context_token: seconds per token of the sequences' contexts, d, for each B.
    """

    tokens: Sequence[float]
    sequences: Sequence[float]
    plain: Sequence[Sequence[float]]
    prompt_tokens: float
    per_cached: Sequence[float]
    attention: Sequence[float]
    per_context_token: Sequence[float]


class TabulatedStep:
    """
    The step of a table, linear between the points of its grid.

        t = M(n, B) + p a(n) + A(B) + d(B) context      (docs/model.md, eq. S9)
    """

    __slots__ = ("_columns", "_lines", "_table")

    join_delay_s = 0.0

    def __init__(self, table: StepTable) -> None:
        """Keep the table."""
        self._table = table
        self._columns: dict[int, list[float]] = {}
        self._lines: dict[int, tuple[float, float]] = {}

    def decode_line(self, batch: int) -> tuple[float, float]:
        """See `StepTime`."""
        line = self._lines.get(batch)
        if line is None:
            self._interpolate(batch)
            line = self._lines[batch]
        return line

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`; chunks count by their tokens and by their pairs of query and key."""
        fixed_s, per_token_s = self.decode_line(batch)
        tokens, pairs = 0, 0.0
        for new, cached in chunks:
            tokens += new
            pairs += new * (cached + new * 0.5)
        if not tokens:
            return fixed_s + per_token_s * context
        table, column = self._table, self._columns[batch]
        at, share = _place(table.tokens, tokens)
        per_cached = table.per_cached
        return (
            column[at] + share * (column[at + 1] - column[at])
            + (pairs / tokens - min(tokens, table.prompt_tokens) * 0.5)
            * (per_cached[at] + share * (per_cached[at + 1] - per_cached[at]))
            + per_token_s * context
        )  # fmt: skip

    def _interpolate(self, batch: int) -> None:
        """Make the column and the line of one number of sequences."""
        table = self._table
        at, share = _place(table.sequences, batch)

        def between(values: Sequence[float]) -> float:
            return values[at] + share * (values[at + 1] - values[at])

        attention = between(table.attention)
        low, high = table.plain[at], table.plain[at + 1]
        column = [a + share * (b - a) + attention for a, b in zip(low, high, strict=True)]
        self._columns[batch] = column
        self._lines[batch] = (column[0], between(table.per_context_token))


def _place(grid: Sequence[float], value: float) -> tuple[int, float]:
    """Interval of a grid that holds *value*, or the nearest one, and how far along it."""
    at = min(max(bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return at, (value - grid[at]) / (grid[at + 1] - grid[at])
