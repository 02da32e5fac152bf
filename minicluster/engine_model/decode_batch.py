"""Sequences that decode together, advanced by any number of steps at once."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.engine_model.request_table import Ledger
    from minicluster.engine_model.step_seconds import StepTime


class Decoding:
    """
    The decode batch of one replica.

    Every running sequence gets one token a step, so that only counts are kept: a join or a leave
    costs the logarithm of the batch, a stretch of steps costs nothing per step or sequence.

    Attributes:
        step_no: steps done by this replica.
        batch: sequences that decode, B.
        context: tokens that they have cached together, C.
        start_s: when the stretch in progress begins, or began.
        used: KV blocks taken before the stretch.
        gaps: per stretch, mean gap between two tokens of a sequence, how many, and its start.
        held_s: for how long those that join have held up the others before the step to come.
    """

    __slots__ = (
        "_base", "_block_size", "_due", "_ends", "_gap_from", "_ledger", "_peaks",
        "_peaks_at", "_per_token_s", "_phase", "_step", "_step_s", "_stretch_no", "batch",
        "context", "gaps", "held_s", "start_s", "step_no", "used",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, step: StepTime, block_size: int) -> None:
        """Start empty."""
        self._ledger = ledger
        self._step = step
        self._block_size = block_size
        # Of sequence i: its context is base + step_no; its last step is before due.
        self._base: dict[int, int] = {}
        self._due: dict[int, int] = {}
        self._ends: list[tuple[int, int]] = []
        # Sequences by the steps, modulo the block size, in which they take a new block.
        self._phase = [0] * block_size
        self._step_s = self._per_token_s = 0.0
        # Longest step since stretch n: values that no later one exceeds, with their stretches.
        self._stretch_no = 0
        self._peaks: list[float] = []
        self._peaks_at: list[int] = []
        self._gap_from: dict[int, int] = {}
        self.step_no = self.batch = self.context = self.used = 0
        self.start_s = self.held_s = 0.0
        self.gaps: list[tuple[float, int, float]] = []

    def join(self, request: int, cached: int, remaining: int) -> None:
        """Let a sequence with *cached* tokens decode for *remaining* > 0 steps from the next on."""
        base = cached - self.step_no
        due = self.step_no + remaining
        self._base[request] = base
        self._due[request] = due
        self._phase[-base % self._block_size] += 1
        self._gap_from[request] = self._stretch_no
        self.batch += 1
        self.context += cached
        heappush(self._ends, (due, request))

    def leave(self, request: int) -> int:
        """Take a sequence out, give back its blocks, return the steps it still had to do."""
        base = self._base.pop(request)
        cached = base + self.step_no
        self._phase[-base % self._block_size] -= 1
        self.batch -= 1
        self.context -= cached
        self.used -= -(-cached // self._block_size)
        self._keep_stall(request)
        return self._due.pop(request) - self.step_no

    def next_end(self) -> int:
        """Step number before which the next sequence ends; only where there is one."""
        ends, due = self._ends, self._due
        while due.get(ends[0][1]) != ends[0][0]:
            heappop(ends)  # it was preempted, and ends later if it is back
        return ends[0][0]

    def ended(self) -> list[int]:
        """Take out every sequence that has done its last step, in the order of their numbers."""
        ends, step_no, done = self._ends, self.step_no, []
        while ends and ends[0][0] <= step_no:
            due, request = heappop(ends)
            if self._due.get(request) == due:
                self.leave(request)
                done.append(request)
        return done

    def crossings(self, steps: int) -> int:
        """
        Blocks that the next *steps* steps take (docs/model.md, eq. Q3).

        A sequence with c tokens cached takes one in a step where c is a multiple of the block.
        """
        size, phase = self._block_size, self._phase
        first = self.step_no % size
        if steps == 1:
            return phase[first]
        whole, rest = divmod(steps, size)
        end = first + rest
        if end <= size:
            return whole * self.batch + sum(phase[first:end])
        return whole * self.batch + sum(phase[first:]) + sum(phase[: end - size])

    def steps_s(self, steps: int) -> float:
        """
        Seconds of *steps* decode steps.

            T(k) = k (t_B + d (C + B (k - 1) / 2))      (docs/model.md, eq. Q2)
        """
        return steps * (
            self._step_s + self._per_token_s * (self.context + self.batch * (steps - 1) * 0.5)
        )

    def steps_until(self, time_s: float) -> int:
        """Least number of steps, at least one, that end at *time_s* or later (eq. Q2 solved)."""
        after = time_s - self.start_s
        slope = self._per_token_s * self.batch * 0.5
        first = self._step_s + self._per_token_s * self.context - slope
        steps = max(1, ceil(2 * after / (first + sqrt(first * first + 4 * slope * after))))
        # The root is rounded; the times of boundaries are what decides.
        while self.start_s + self.steps_s(steps) < time_s:
            steps += 1
        while steps > 1 and self.start_s + self.steps_s(steps - 1) >= time_s:
            steps -= 1
        return steps

    def tally(self, steps: int, seconds: float, *, firsts: int, first_s: float) -> None:
        """
        Count a stretch that is over: its gaps, its blocks, and the longest step so far.

        In its first step, of *first_s* seconds, *firsts* sequences got their first token, which
        ends no gap. What held up the others before it made their gaps longer, no later ones.
        """
        start_s = self.start_s
        if self.held_s and steps > 1:
            self._count(1, first_s, start_s - self.held_s, (firsts, first_s))
            self.held_s = 0.0
            self._count(steps - 1, seconds - first_s, start_s + first_s, (0, 0.0))
        else:
            self._count(steps, seconds, start_s - self.held_s, (firsts, first_s))
            self.held_s = 0.0

    def _count(self, steps: int, seconds: float, start_s: float, first: tuple[int, float]) -> None:
        """Count *steps* steps, of which the first may have been held up."""
        self.used += self.crossings(steps)
        firsts, first_s = first
        gaps = self.batch * steps - firsts
        if gaps:
            held_s = (self.batch - firsts) * self.held_s
            mean_s = (self.batch * seconds - firsts * first_s + held_s) / gaps
            self.gaps.append((mean_s, gaps, start_s))
        last_s = seconds if steps == 1 else seconds - self.steps_s(steps - 1)
        last_s += self.held_s
        peaks = self._peaks
        while peaks and peaks[-1] <= last_s:
            peaks.pop()
            self._peaks_at.pop()
        peaks.append(last_s)
        self._peaks_at.append(self._stretch_no)
        self._stretch_no += 1
        self.step_no += steps
        self.context += self.batch * steps

    def first_token(self, request: int, time_s: float, *, one_step: bool) -> None:
        """Note a first token; gaps count from the step after it."""
        self._ledger.first_s[request] = time_s
        if one_step and request in self._gap_from:
            self._gap_from[request] += 1

    def _keep_stall(self, request: int) -> None:
        """Keep the longest step that a sequence has seen."""
        at = bisect_left(self._peaks_at, self._gap_from.pop(request))
        if at < len(self._peaks):
            stalls = self._ledger.stall_s
            stalls[request] = max(stalls[request], self._peaks[at])
