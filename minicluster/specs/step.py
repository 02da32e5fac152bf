"""The time of one engine step: coefficients fitted to a machine, or a table of the step model."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Spec
from minicluster.units import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients(Spec):
    """
    One pool's step time as measured, eq. S1 of docs/model.md.

        t = base + max(stream, a n + b B) + sum of r max(0, n - k) + c pairs + d context

    n: prompt tokens computed in the step, B: sequences decoded in it, pairs: sum over prompt
    tokens of the tokens they attend to, context: cached tokens read by the decoded sequences.

    Attributes:
        base_s: per step, whatever is in it.
        stream_s: reading the weights once; what compute hides behind.
        per_prefill_token_s, per_sequence_s, per_pair_s, per_context_token_s: a, b, c, d.
        max_tokens, max_batch: largest n and B that the fit saw.
        max_context_tokens: longest sequence that it saw.
        error_fraction: mean absolute relative error of the fit.
        knee_tokens, knee_per_token_s: k, from where on each prompt token takes r more: parts of the
            model saturate compute one after the other.
    """

    base_s: NotNegative
    stream_s: NotNegative
    per_prefill_token_s: NotNegative
    per_sequence_s: NotNegative
    per_pair_s: NotNegative
    per_context_token_s: NotNegative
    max_tokens: Count
    max_batch: Count
    max_context_tokens: int
    error_fraction: NotNegative
    knee_tokens: tuple[Count, ...] = ()
    knee_per_token_s: tuple[NotNegative, ...] = ()

    def _check(self) -> None:
        if len(self.knee_tokens) != len(self.knee_per_token_s):
            place, expected = "knee_per_token_s", f"{len(self.knee_tokens)} numbers"
            raise InputError(place, len(self.knee_per_token_s), expected)

    def step_s(self, tokens: float, pairs: float, batch: float, context: float) -> float:
        """Return the seconds of a step (docs/model.md, eq. S1)."""
        return self.beside(batch)(tokens, pairs) + self.per_context_token_s * context

    def beside(self, batch: float) -> Callable[[float, float], float]:
        """Return the seconds, by prompt tokens and pairs, of steps of *batch* without context."""
        base_s, stream_s, decode_s = self.base_s, self.stream_s, self.per_sequence_s * batch
        token_s, pair_s = self.per_prefill_token_s, self.per_pair_s
        knees = tuple(zip(self.knee_tokens, self.knee_per_token_s, strict=True))

        def seconds(tokens: float, pairs: float) -> float:
            more_s = 0.0
            for knee, each_s in knees:
                more_s += each_s * max(0.0, tokens - knee)
            return base_s + max(stream_s, token_s * tokens + decode_s) + more_s + pair_s * pairs

        return seconds

    def decode_line(self, batch: float) -> tuple[float, float]:
        """Seconds of a decode step of *batch* sequences: without context, and per token of it."""
        return self.beside(batch)(0, 0), self.per_context_token_s

    def scaled(self, factor: float) -> StepCoefficients:
        """Return the coefficients of a step that takes *factor* times as long."""
        return scaled(self, factor)

    def slowed(self, *, prompts: float, decode: float) -> StepCoefficients:
        """Return a step that takes *decode* times as long, and prompts in it *prompts* times."""
        return replace(
            self.scaled(decode),
            per_prefill_token_s=self.per_prefill_token_s * prompts,
            per_pair_s=self.per_pair_s * prompts,
            knee_per_token_s=tuple(prompts * each_s for each_s in self.knee_per_token_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable(Spec):
    """
    One pool's step time on a grid, linear between its points, eq. S9 of docs/model.md.

        t = F(n, B) + a(n) pairs/n + d(B) context

    n, B, pairs and context are those of `StepCoefficients`. Beyond the grid the last interval goes
    on.

    Attributes:
        tokens: n of the grid, ascending from 0.
        sequences: B of the grid, ascending from 0.
        fixed_s: F, a row over n for each B.
        per_key_s: a, seconds per token that the prompt tokens attend to on average, for each n.
        per_context_token_s: d, for each B.
    """

    tokens: tuple[NotNegative, ...]
    sequences: tuple[NotNegative, ...]
    fixed_s: tuple[tuple[float, ...], ...]
    per_key_s: tuple[NotNegative, ...]
    per_context_token_s: tuple[NotNegative, ...]

    @property
    def error_fraction(self) -> float:
        """Nothing was fitted."""
        return 0.0

    def _check(self) -> None:
        for name, grid in (("tokens", self.tokens), ("sequences", self.sequences)):
            ascending = all(low < high for low, high in pairwise(grid))
            if len(grid) < 2 or grid[0] or not ascending:  # noqa: PLR2004  (an interval)
                raise InputError(name, grid, "two or more numbers, ascending from 0")
        columns, rows = len(self.tokens), len(self.sequences)
        lengths = {"per_key_s": columns, "per_context_token_s": rows, "fixed_s": rows}
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise InputError(name, len(getattr(self, name)), f"{length} numbers or rows")
        for at, row in enumerate(self.fixed_s):
            if len(row) != columns:
                raise InputError(f"fixed_s.{at}", len(row), f"{columns} numbers")
            if not 0 <= min(row) <= max(row) < math.inf:
                raise InputError(f"fixed_s.{at}", min(row), "finite numbers, zero or more")

    def step_s(self, tokens: float, pairs: float, batch: float, context: float) -> float:
        """Return the seconds of a step (docs/model.md, eq. S9)."""
        fixed_s, per_token_s = self.decode_line(batch)
        if tokens:
            fixed_s = self.beside(batch)(tokens, pairs)
        return fixed_s + per_token_s * context

    def beside(self, batch: float) -> Callable[[float, float], float]:
        """Return the seconds, by prompt tokens and pairs, of steps of *batch* without context."""
        row, share = _place(self.sequences, batch)
        inner = self.tokens[1:-1]
        lines: list[tuple[float, ...] | None] = [None] * (len(inner) + 1)

        def seconds(tokens: float, pairs: float) -> float:
            at = bisect_right(inner, tokens)
            a, b, c, d = lines[at] or self._lines(at, row, share, lines)
            return a + b * tokens + pairs * (c / tokens + d)

        return seconds

    def _lines(
        self, at: int, row: int, share: float, lines: list[tuple[float, ...] | None]
    ) -> tuple[float, ...]:
        """Make F = a + b n and a(n)/n = c/n + d between two points, and keep them in *lines*."""
        low, high = self.fixed_s[row : row + 2]
        fixed_s = (low[n] + share * (high[n] - low[n]) for n in (at, at + 1))
        grid = self.tokens[at : at + 2]
        line = (*_line(grid, tuple(fixed_s)), *_line(grid, self.per_key_s[at : at + 2]))
        lines[at] = line
        return line

    def decode_line(self, batch: float) -> tuple[float, float]:
        """Seconds of a decode step of *batch* sequences: without context, and per token of it."""
        at, share = _place(self.sequences, batch)
        low, high, each_s = self.fixed_s[at], self.fixed_s[at + 1], self.per_context_token_s
        per_token_s = each_s[at] + share * (each_s[at + 1] - each_s[at])
        return low[0] + share * (high[0] - low[0]), per_token_s

    def scaled(self, factor: float) -> StepTable:
        """Return the table of a step that takes *factor* times as long."""
        return self.slowed(prompts=factor, decode=factor)

    @lru_cache(maxsize=1024)  # noqa: B019  (tables are few, and values)
    def slowed(self, *, prompts: float, decode: float) -> StepTable:
        """Return a step that takes *decode* times as long, and prompts in it *prompts* times."""
        without = decode - prompts
        return replace(
            self,
            fixed_s=tuple(
                tuple(prompts * seconds + without * row[0] for seconds in row)
                for row in self.fixed_s
            ),
            per_key_s=tuple(prompts * seconds for seconds in self.per_key_s),
            per_context_token_s=tuple(decode * seconds for seconds in self.per_context_token_s),
        )


StepSpec = StepTable | StepCoefficients  # what a plan carries of the steps of a pool


def _place(grid: Sequence[float], value: float) -> tuple[int, float]:
    """Interval of a grid that holds *value*, or the nearest one, and how far along it."""
    at = bisect_right(grid, value, 1, len(grid) - 1) - 1
    return at, (value - grid[at]) / (grid[at + 1] - grid[at])


def _line(grid: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line through two points."""
    slope = (values[1] - values[0]) / (grid[1] - grid[0])
    return values[0] - slope * grid[0], slope


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCoefficients(Spec):
    """
    Seconds of a request between the two pools, outside their steps.

    Attributes:
        request_s: ingress, routing and RPC, once per request.
        request_spread_s: mean of what these take beyond `request_s`, exponentially distributed: on
            shared cores a request waits for them on its way in and out.
        transfer_base_s, transfer_per_token_s: fixed part of the KV pull, and per prompt token.
        uplink_per_token_s: likewise, of one GPU's share of oversubscribed uplinks; those of all
            GPUs of a pool carry pulls together. 0: as many uplinks as downlinks.
    """

    request_s: NotNegative
    transfer_base_s: NotNegative
    transfer_per_token_s: NotNegative
    uplink_per_token_s: NotNegative = 0.0
    request_spread_s: NotNegative = 0.0
    error_fraction: NotNegative

    def scaled(self, *, request: float, transfer: float) -> PathCoefficients:
        """Return a path whose request and whose KV pull take these times as long."""
        return scaled(scaled(self, request, "request_"), transfer, "transfer_")


DELAYS_PER_REQUEST = 2
"""Times that a request delays the decode batch: as it is handed over, and as it joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference(Spec):
    """
    Slowdown of a pool's steps by the other pool on the same cores.

    Zero where pools share nothing.

    Attributes:
        prefill_fraction: added to prefill in service, whatever decode does at the moment: requests
            are received, routed and handed over by the same cores.
        prefill_per_sequence_fraction: added to prefill for each sequence being decoded: every
            token on its way to a client takes time from the cores.
        prefill_per_request_s: added to each prompt: the cores also receive, route and hand over.
        decode_fraction: added to a decode step while prefill is busy.
        decode_per_request_s: what each request that joins the batch delays all of it, in
            `DELAYS_PER_REQUEST` equal parts.
    """

    prefill_fraction: NotNegative = 0.0
    prefill_per_sequence_fraction: NotNegative = 0.0
    prefill_per_request_s: NotNegative = 0.0
    decode_fraction: NotNegative = 0.0
    decode_per_request_s: NotNegative = 0.0

    def scaled(self, *, prefill: float, decode: float) -> Interference:
        """Return the same with what is added to either pool's steps times its factor."""
        return scaled(scaled(self, prefill, "prefill_"), decode, "decode_")
