"""One replica: when its steps begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.scheduler import Scheduler
from minicluster.specs.step import HOLDS

if TYPE_CHECKING:
    from minicluster.engine_model.limits import EngineLimits
    from minicluster.engine_model.prefix_cache import PrefixCache
    from minicluster.engine_model.request_table import Ledger
    from minicluster.engine_model.step_seconds import StepTime


class Replica(Scheduler):
    """
    An engine, stretch by stretch (docs/model.md, eq. Q1 to Q3).

    Time goes in stretches: one step where prompts are computed, else as many decode steps as
    pass before a sequence ends or blocks run out. `start_s` to `end_s` is the stretch in
    progress while `active`; an event at `end_s` must call `complete` and then `schedule`. Every
    change of `end_s` raises `epoch`, so that events of earlier ends can be told apart.

    Attributes:
        active: whether a stretch is in progress.
        busy_s: time spent in stretches that are over.
    """

    __slots__ = ("_seconds", "_steps", "_used_end", "active", "busy_s", "end_s", "epoch")

    def __init__(
        self,
        ledger: Ledger,
        step: StepTime,
        limits: EngineLimits,
        *,
        prefill_only: bool = False,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Start idle and empty; the arguments are the scheduler's."""
        super().__init__(ledger, step, limits, prefill_only=prefill_only, prefix_cache=prefix_cache)
        self.active = False
        self.end_s = self._seconds = self.busy_s = 0.0
        self._steps = self._used_end = 0
        self.epoch = 0

    def add(self, request: int, now_s: float) -> None:
        """Take a request that computes its own prompt."""
        self.waiting.append(request)
        if not self.active:
            self.schedule(now_s)
        elif len(self.waiting) == 1 and len(self.running) < self._limit:
            self._cut(now_s)

    def offer(self, request: int, now_s: float) -> None:
        """Take a request whose KV cache is to be pulled; `started` tells when that begins."""
        self.pulls.add(request)
        if self.active and not self.waiting and not self.chunks and self._spare(request):
            # Blocks are there at the next boundary whatever happens until then: no need to stop.
            blocks = -(-self._ledger.prompt[request] // self._block_size)
            self.used += blocks
            self._used_end += blocks
            self.pulls.discard(request)
            self.pulling[request] = None
            self.started.append((request, self._boundary_s(now_s)))
        else:
            self.add(request, now_s)

    def pulled(self, request: int, now_s: float) -> None:
        """Note that a KV cache has arrived; its request decodes from the next step on."""
        self.ready.add(request)
        if not self.active:
            self.schedule(now_s)
        elif self.chunks or self.waiting or not self._first(request):
            self._cut(now_s)
        else:
            steps = 0 if now_s < self.start_s else self.steps_until(now_s)
            if steps < self._steps:
                # Nothing else can happen at that boundary: go there at once.
                boundary_s = self.start_s + self.steps_s(steps)
                self.complete(steps)
                self.start_s = boundary_s
                self.take_ready()
                self._begin()

    @property
    def handover_s(self) -> float:
        """How much later a pull begins because this replica decodes on the same cores."""
        return self._step.join_s / HOLDS if self.batch else 0.0

    def hold(self, now_s: float) -> None:
        """Note work that a coming request makes for the cores; who decodes waits for it (Q9)."""
        if self.active and self._step.join_s:
            self.owed += 1
            self._cut(now_s)

    def release(self, request: int, now_s: float) -> None:
        """Give back the blocks of a prompt that another replica has pulled."""
        self.used -= -(-self._ledger.prompt[request] // self._block_size)
        self.remember(request, self._ledger.prompt[request])
        if self.waiting and not self.active:
            self.schedule(now_s)

    def complete(self, steps: int | None = None) -> list[int]:
        """End the stretch, or its first *steps* steps; return the requests that are done."""
        taken = self._steps if steps is None else steps
        if not taken:
            return []
        seconds = self._seconds if taken == self._steps else self.steps_s(taken)
        end_s = self.start_s + seconds
        self.busy_s += seconds
        done: list[int] = []
        if self.batch:
            first_s = seconds if taken == 1 else self.steps_s(1)
            firsts = len(self.fresh)
            if firsts:
                for request in self.fresh:
                    one_step = taken == 1 or self.held_s > 0
                    self.first_token(request, self.start_s + first_s, one_step=one_step)
                self.fresh.clear()
            self.tally(taken, seconds, firsts=firsts, first_s=first_s)
            if self._ends[0][0] <= self.step_no:
                done = self.ended()
                self.forget(done, end_s)
        if self.chunks:
            done += self.compute(end_s)
        return done

    def refresh(self, now_s: float) -> None:
        """End the stretch at the next boundary: steps take another time from now on."""
        if self.active:
            self._cut(now_s)

    def schedule(self, now_s: float) -> None:
        """Begin the next stretch."""
        self.start_s = now_s
        looked = self.choose(now_s)
        self._begin(one_step=not looked)

    def _begin(self, *, one_step: bool = False) -> None:
        """
        Find how long the stretch is that starts now (eq. Q2, Q3).

        *one_step*: there was a preemption, so that nobody was admitted; the next step tries.
        """
        self.epoch += 1
        self.active = bool(self.batch or self.chunks)
        if self.chunks:
            done = self.prefilling
            self._steps = 1
            self._seconds = self._step.step_s(
                [(new, done[request]) for request, new in self.chunks], self.batch, self.context
            )
        elif self.batch:
            if self.owed:
                if self.batch > len(self.fresh):
                    held_s = self.owed * self._step.join_s / HOLDS
                    self.start_s += held_s
                    self.held_s += held_s
                self.owed = 0
            self._step_s, self._per_token_s = self._step.decode_line(self.batch)
            steps = 1 if one_step else self.next_end() - self.step_no
            self._used_end = self.used + self.crossings(steps)
            if self._used_end > self._total:
                steps = self._until_full(steps)
            self._steps = steps
            self._seconds = self.steps_s(steps)
        self.end_s = self.start_s + self._seconds

    def _until_full(self, steps: int) -> int:
        """Return the steps, at least one, after which blocks run out; bisection over eq. Q3."""
        low, high = 1, steps
        while high - low > 1:
            middle = (low + high) // 2
            if self.used + self.crossings(middle) > self._total:
                high = middle
            else:
                low = middle
        self._used_end = self.used + self.crossings(low)
        return low

    def _boundary_s(self, now_s: float) -> float:
        """Return when the step in progress ends."""
        if now_s < self.start_s:
            return self.start_s
        steps = self.steps_until(now_s)
        return self.end_s if steps >= self._steps else self.start_s + self.steps_s(steps)

    def _cut(self, now_s: float) -> None:
        """End the stretch at the next boundary, where somebody may be admitted."""
        if self.chunks:
            return
        steps = 0 if now_s < self.start_s else self.steps_until(now_s)
        if steps < self._steps:
            self._steps = steps
            self._seconds = self.steps_s(steps)
            self.end_s = self.start_s + self._seconds
            self.epoch += 1

    def _first(self, request: int) -> bool:
        """Say whether an arrived pull joins at the next boundary, whatever happens until then."""
        return (
            len(self.ready) == 1
            and next(iter(self.pulling)) == request
            and len(self.running) < self._limit
            and self._used_end + self._watermark < self._total
        )

    def _spare(self, request: int) -> bool:
        """Say whether a pull begins at the next boundary, whatever joins until then."""
        blocks = -(-self._ledger.prompt[request] // self._block_size)
        # If that is the end of the stretch, the step after it takes its blocks first.
        taking = self._phase[(self.step_no + self._steps) % self._block_size]
        return (
            len(self.running) + len(self.pulling) < self._limit
            and self._used_end + taking + blocks + self._watermark <= self._total
        )
