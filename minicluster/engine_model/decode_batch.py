"""The decode batch of one replica, advanced by any number of steps at once."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.engine_model.limits import EngineLimits
    from minicluster.engine_model.request_table import RequestTable
    from minicluster.engine_model.step_seconds import StepTime


class DecodeBatch:
    """
    The sequences of one replica that decode together.

    All sequences get the same number of tokens a step, so that only counts are kept: a join or a
    leave costs the logarithm of the batch, and a stretch of steps costs nothing per step or
    sequence. That number is one, or with drafts 1 + a on average (eq. Q12).

    Attributes:
        num_steps: steps done by this replica.
        num_tokens: tokens that a sequence got in all of them.
        batch: number of sequences that decode, B.
        context_tokens: tokens that they have cached together, C.
        start_s: begin of the stretch in progress, or of the next one.
        used_blocks: KV blocks taken before the stretch.
        gaps: per stretch, mean gap between two tokens of a sequence (with drafts: between what two
            steps gave), number of gaps, and start, one after the other.
        keeps_gaps: whether they are noted: that takes a quarter of a simulation.
        delay_s: time for which joining requests (eq. Q9), or steps of prompts alone (eq. Q10), have
            delayed the next step.
    """

    __slots__ = (
        "_block_offsets", "_block_size", "_context_base", "_delayed_s", "_delays", "_finish_heap",
        "_finish_token", "_first_stretch", "_half_s", "_line_s", "_longest_at", "_longest_s",
        "_lookahead", "_num_stretches", "_pace", "_requests", "_step", "batch", "context_tokens",
        "delay_s", "gaps", "keeps_gaps", "num_steps", "num_tokens", "start_s", "used_blocks",
    )  # fmt: skip

    def __init__(self, requests: RequestTable, step: StepTime, limits: EngineLimits) -> None:
        """Start empty."""
        self._requests = requests
        self._step = step
        self._block_size = block_size = limits.block_size
        self._pace = 1.0 + limits.options.mean_accepted_tokens
        self._lookahead = limits.lookahead_tokens
        # Sequence i has _context_base[i] + num_tokens tokens cached, and ends when num_tokens has
        # reached _finish_token[i].
        self._context_base: dict[int, int] = {}
        self._finish_token: dict[int, int] = {}
        self._finish_heap: list[tuple[int, int]] = []
        # Number of sequences by the token, modulo the block size, at which each takes a new block.
        self._block_offsets = [0] * block_size
        self._line_s = self._half_s = 0.0
        # Longest step since stretch n: durations that no later one exceeds, and their stretches.
        self._num_stretches = 0
        self._longest_s: list[float] = []
        self._longest_at: list[int] = []
        self._first_stretch: dict[int, int] = {}
        self.num_steps = self.num_tokens = 0
        self.batch = self.context_tokens = self.used_blocks = 0
        self.start_s = self.delay_s = 0.0
        # Delays of the next step, each with the stretch before which a sequence has joined that
        # waits for it; and their sum over the sequences that wait.
        self._delays: list[tuple[int, float]] = []
        self._delayed_s = 0.0
        self.gaps: list[float] = []
        self.keeps_gaps = True

    def join(self, request: int, cached: int, remaining: int) -> None:
        """
        Let a sequence decode *remaining* > 0 tokens from the next step on.

        Its *cached* tokens have their blocks; those that it looks ahead for are taken here.
        """
        base = cached - self.num_tokens
        finish_token = self.num_tokens + remaining
        self._context_base[request] = base
        self._finish_token[request] = finish_token
        self._block_offsets[-(base + self._lookahead) % self._block_size] += 1
        self._first_stretch[request] = self._num_stretches
        self.batch += 1
        self.context_tokens += cached
        if self._lookahead:
            self.used_blocks += self._blocks_of(cached) - -(-cached // self._block_size)
        heappush(self._finish_heap, (finish_token, request))

    def leave(self, request: int) -> int:
        """Take a sequence out and give back its blocks; return the tokens that it still lacks."""
        base = self._context_base.pop(request)
        cached = base + self.num_tokens
        self._block_offsets[-(base + self._lookahead) % self._block_size] -= 1
        self.batch -= 1
        self.context_tokens -= cached
        self.used_blocks -= self._blocks_of(cached)
        self._note_longest_gap(request)
        return self._finish_token.pop(request) - self.num_tokens

    def _blocks_of(self, cached: int) -> int:
        return -(-(cached + self._lookahead) // self._block_size)

    def tokens_left(self, request: int) -> int | None:
        """Return the tokens that a sequence still lacks; `None` where it does not decode."""
        finish_token = self._finish_token.get(request)
        return None if finish_token is None else finish_token - self.num_tokens

    def tokens_in(self, steps: int) -> int:
        """
        Tokens that each sequence gets in the next *steps* steps (eq. Q12).

            T(n + k) - T(n), T(n) = floor((1 + a) n)
        """
        if self._pace == 1.0:
            return steps
        return int((self.num_steps + steps) * self._pace) - self.num_tokens

    def delay_batch(self, seconds: float, sequences: int) -> None:
        """Let *sequences*, all that have had a token, wait *seconds* longer for their next one."""
        if not sequences:
            return
        self._delays.append((self._num_stretches, seconds))
        self._num_stretches += 1  # a sequence that joins meanwhile does not wait for this
        self.delay_s += seconds
        self._delayed_s += seconds * sequences

    def delay_of(self, request: int) -> float:
        """Seconds by which the next step has been delayed since a sequence joined."""
        joined = self._first_stretch[request]
        return sum(seconds for at, seconds in self._delays if at >= joined)

    def steps_to_finish(self) -> int:
        """Return the steps until the next sequence ends; there must be one."""
        heap, finish_token = self._finish_heap, self._finish_token
        while finish_token.get(heap[0][1]) != heap[0][0]:
            heappop(heap)  # it was preempted, and ends later if it is back
        tokens = heap[0][0] - self.num_tokens
        if self._pace == 1.0:
            return tokens
        steps = max(1, int(tokens / self._pace) - 1)
        while self.tokens_in(steps) < tokens:
            steps += 1
        return steps

    def pop_finished(self) -> list[int]:
        """Take out every sequence that has done its last step, in the order of their numbers."""
        heap, finished = self._finish_heap, []
        while heap and heap[0][0] <= self.num_tokens:
            finish_token, request = heappop(heap)
            if self._finish_token.get(request) == finish_token:
                self.leave(request)
                finished.append(request)
        return finished

    def _blocks_of_next_step(self) -> int:
        if self._pace != 1.0:
            return self.new_blocks(1)
        return self._block_offsets[self.num_tokens % self._block_size]

    def blocks_of_step_after(self, steps: int) -> int:
        """Blocks that the sequences take in the step after the next *steps*."""
        if self._pace != 1.0:
            return self.new_blocks(steps + 1) - self.new_blocks(steps)
        return self._block_offsets[(self.num_tokens + steps) % self._block_size]

    def new_blocks(self, steps: int) -> int:
        """
        Blocks that the next *steps* steps take (docs/model.md, eq. Q3).

        A sequence with c tokens cached takes one for a token where c is a multiple of the block.
        """
        size, offsets = self._block_size, self._block_offsets
        first, tokens = self.num_tokens % size, self.tokens_in(steps)
        if tokens == 1:
            return offsets[first]
        rest = tokens % size
        blocks = tokens // size * self.batch
        for at in range(first, first + rest):  # compiled, faster than sums of slices
            blocks += offsets[at if at < size else at - size]
        return blocks

    def begin_steps(self) -> None:
        """
        Compute the seconds of decode steps from now on, which `steps_s` returns.

            T(k) = k (t_B + d (C + B (1 + a) (k - 1) / 2))      (docs/model.md, eq. Q2)
        """
        step_s, per_token_s = self._step.decode_line(self.batch)
        self._half_s = per_token_s * self.batch * 0.5 * self._pace
        self._line_s = step_s + per_token_s * self.context_tokens - self._half_s

    def steps_s(self, steps: int) -> float:
        """Seconds of *steps* decode steps."""
        return steps * (self._line_s + steps * self._half_s)

    def steps_until(self, time_s: float) -> int:
        """Least number of steps, at least one, that end at *time_s* or later (eq. Q2 solved)."""
        start_s, line_s, half_s = self.start_s, self._line_s, self._half_s
        after = time_s - start_s
        root = sqrt(line_s * line_s + 4 * half_s * after)
        steps = ceil(2 * after / (line_s + root)) or 1
        # The root is rounded; the times at which steps end decide.
        while start_s + steps * (line_s + steps * half_s) < time_s:
            steps += 1
        while steps > 1 and start_s + (steps - 1) * (line_s + (steps - 1) * half_s) >= time_s:
            steps -= 1
        return steps

    def advance(self, steps: int, seconds: float, *, firsts: int, first_s: float) -> None:
        """
        Count a stretch that is over: its gaps, its blocks, and the longest step so far.

        In its first step, of *first_s* seconds, *firsts* sequences got their first token, which
        ends no gap. A delay before that step makes the others' gaps longer, but no later ones.
        """
        start_s = self.start_s
        if self.delay_s and steps > 1:
            self._advance(1, first_s, start_s - self.delay_s, firsts * first_s, firsts)
            self._line_s += 2 * self._half_s  # the context has grown by a step of each sequence
            self._advance(steps - 1, seconds - first_s, start_s + first_s, 0.0, 0)
        else:
            self._advance(steps, seconds, start_s - self.delay_s, firsts * first_s, firsts)

    def _advance(
        self, steps: int, seconds: float, start_s: float, firsts_s: float, firsts: int
    ) -> None:
        """Count *steps* steps, of which the first may have been delayed."""
        batch, tokens = self.batch, self.tokens_in(steps)
        self.used_blocks += self.new_blocks(steps)
        gaps = batch * steps - firsts
        if gaps:
            mean_s = (batch * seconds - firsts_s + self._delayed_s) / gaps
            self.note_gaps(mean_s, gaps, start_s)
        last_s = seconds if steps == 1 else seconds - self.steps_s(steps - 1)
        if self._delays:
            self._note_delays(last_s)
        longest_s = self._longest_s
        if longest_s and longest_s[-1] <= last_s:
            self._forget_shorter(last_s)
        longest_s.append(last_s)
        self._longest_at.append(self._num_stretches)
        self._num_stretches += 1
        self.num_steps += steps
        self.num_tokens += tokens
        self.context_tokens += batch * tokens

    def note_gaps(self, mean_s: float, count: int, start_s: float) -> None:
        """Note gaps between tokens; see the attribute."""
        if self.keeps_gaps:
            gaps = self.gaps
            gaps.append(mean_s)
            gaps.append(count)
            gaps.append(start_s)

    def _note_delays(self, step_s: float) -> None:
        for at, seconds in self._delays:
            self._forget_shorter(step_s + self.delay_s)
            self._longest_s.append(step_s + self.delay_s)
            self._longest_at.append(at)
            self.delay_s -= seconds
        self._delays.clear()
        self.delay_s = self._delayed_s = 0.0

    def _forget_shorter(self, seconds: float) -> None:
        """Forget steps of earlier stretches that are no longer than one of *seconds* now."""
        while self._longest_s and self._longest_s[-1] <= seconds:
            self._longest_s.pop()
            self._longest_at.pop()

    def note_first_tokens(self, joined: list[int], time_s: float, *, one_step: bool) -> None:
        """Note first tokens; gaps count from the step after them."""
        for request in joined:
            self._requests.first_token_s[request] = time_s
            if one_step and request in self._first_stretch:
                self._first_stretch[request] = self._num_stretches + 1

    def _note_longest_gap(self, request: int) -> None:
        at = bisect_left(self._longest_at, self._first_stretch.pop(request))
        if at < len(self._longest_s):
            longest_s, stall_s = self._longest_s[at], self._requests.stall_s
            stall_s[request] = max(stall_s[request], longest_s)
