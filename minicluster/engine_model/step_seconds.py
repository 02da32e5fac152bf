"""Seconds of one engine step, by what is in it."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

from minicluster.specs.step import StepTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
            table = self._table
            at, share = _place(table.sequences, batch)
            fixed_s = _between([column[0] for column in table.plain_s], at, share)
            fixed_s += _between(table.attention_s, at, share)
            line = (fixed_s, _between(table.per_context_token_s, at, share))
            self._lines[batch] = line
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
        table = self._table
        column = self._columns.get(batch) or self._column(batch)
        at, share = _place(table.tokens, tokens)
        per_cached_s = table.per_cached_s
        return (
            column[at] + share * (column[at + 1] - column[at])
            + (pairs / tokens - min(tokens, table.prompt_tokens) * 0.5)
            * (per_cached_s[at] + share * (per_cached_s[at + 1] - per_cached_s[at]))
            + per_token_s * context
        )  # fmt: skip

    def _column(self, batch: int) -> list[float]:
        """Return the seconds without context of one number of sequences, for each n."""
        table = self._table
        at, share = _place(table.sequences, batch)
        attention_s = _between(table.attention_s, at, share)
        low, high = table.plain_s[at], table.plain_s[at + 1]
        column = [a + share * (b - a) + attention_s for a, b in zip(low, high, strict=True)]
        self._columns[batch] = column
        return column


def simulated_step(step: StepCoefficients | StepTable) -> StepTime:
    """Return the steps that a plan says of a pool."""
    return TabulatedStep(step) if isinstance(step, StepTable) else FittedStep(step)


def _place(grid: Sequence[float], value: float) -> tuple[int, float]:
    """Interval of a grid that holds *value*, or the nearest one, and how far along it."""
    at = min(max(bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return at, (value - grid[at]) / (grid[at + 1] - grid[at])


def _between(values: Sequence[float], at: int, share: float) -> float:
    """Interpolate in an interval of a grid."""
    low = values[at]
    return low + share * (values[at + 1] - low)
