"""One replica of an engine: begin and end of its steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from minicluster.engine_model.scheduler import Scheduler
from minicluster.specs.step import DELAYS_PER_REQUEST

if TYPE_CHECKING:
    from minicluster.engine_model.limits import EngineLimits
    from minicluster.engine_model.prefix_cache import PrefixCache
    from minicluster.engine_model.request_table import RequestTable
    from minicluster.engine_model.step_seconds import StepTime


class Replica(Scheduler):
    """
    An engine, stretch by stretch (docs/model.md, eq. Q1 to Q3).

    Time goes in stretches: one step where prompts are computed, else as many decode steps as
    pass before a sequence ends or blocks run out. `start_s` to `end_s` is the stretch in
    progress while `active`; an event at `end_s` must call `end_stretch` and then `start_stretch`.
    An event at another time is one of an end that has been changed.

    Attributes:
        active: whether a stretch is in progress.
        busy_s: time spent in stretches that are over.
        queued_s: the end for which the caller has queued an event last.
    """

    __slots__ = (
        "_began_s", "_late", "_seconds", "_steps", "_stepwise", "_unseen_steps", "_used_end",
        "active", "busy_s", "end_s", "queued_s",
    )  # fmt: skip

    def __init__(
        self,
        requests: RequestTable,
        step: StepTime,
        limits: EngineLimits,
        *,
        prefill_only: bool = False,
        prefix_cache: PrefixCache | None = None,
        stepwise: bool = False,
    ) -> None:
        """
        Start idle and empty; the arguments are the scheduler's, and one more.

        *stepwise*: every stretch is one step, for a caller that shows each token when it is there.
        """
        super().__init__(
            requests, step, limits, prefill_only=prefill_only, prefix_cache=prefix_cache
        )
        self.active = False
        self.end_s = self.queued_s = self._seconds = self.busy_s = 0.0
        self._unseen_steps = 0
        self._stepwise = stepwise
        self._late: deque[tuple[int, float]] = deque()
        self._began_s = 0.0
        self._steps = self._used_end = 0

    def add(self, request: int, now_s: float) -> None:
        """Take a request that computes its own prompt."""
        if self.active and (self._rules.scheduled_ahead or self._rules.receive_steps > 1):
            self._late.append((request, now_s))
            self._end_at_next_step(now_s, every=self._rules.receive_steps)
        else:
            self._queue(request, now_s)

    def _queue(self, request: int, now_s: float) -> None:
        """Let a request wait; the next step considers the first one, and may those that pass it."""
        self.waiting.append(request)
        if not self.active:
            self.start_stretch(now_s)
        elif (len(self.waiting) == 1 or self.lora is not None) and (
            len(self.running) < self._max_num_seqs
        ):
            self._end_at_next_step(now_s)

    def add_remote_prefill(self, request: int, now_s: float) -> None:
        """Take a request whose KV cache is to be pulled; see `started_pulls` for the begin."""
        self.remote_prefills.add(request)
        prompts = self.waiting or self._late or self.scheduled_prefills
        decoding = self.active and not prompts
        if decoding and self.lora is None and self._pull_fits(request):
            # Blocks are free at the next step whatever happens until then: the stretch goes on.
            num_blocks = -(-self._requests.num_prompt_tokens[request] // self._block_size)
            self._used_end += num_blocks
            self.start_pull(request, num_blocks, self._next_step_s(now_s))
        else:
            self._queue(request, now_s)

    def kv_received(self, request: int, now_s: float) -> None:
        """Note that a KV cache has arrived; its request decodes from the next step on."""
        self.kv_arrived.add(request)
        if not self.active:
            self.start_stretch(now_s)
        elif (
            self.scheduled_prefills
            or self.waiting
            or self._late
            or not self._joins_next_step(request)
        ):
            self._end_at_next_step(now_s)
        else:
            steps = 0 if now_s < self.start_s else self.steps_until(now_s)
            if steps < self._steps:
                # Nothing else can happen at that step: go there at once.
                self.end_stretch(steps)
                self.start_decoding(request)
                self._set_stretch()

    def kv_loaded(self, request: int, now_s: float) -> None:
        """Let a request whose offloaded blocks have arrived wait, before those without blocks."""
        at = 0
        while at < len(self.waiting) and self.waiting[at] in self._loaded:
            at += 1
        self.waiting.insert(at, request)
        self._passed += at < self._passed
        if not self.active:
            self.start_stretch(now_s)
        elif len(self.running) < self._max_num_seqs:
            self._end_at_next_step(now_s)

    def recompute(self, request: int, now_s: float) -> None:
        """Compute the prompt of a request whose KV cache was lost on its way here."""
        self.drop_pull(request)
        self._queue(request, now_s)

    @property
    def handover_s(self) -> float:
        """Delay of a pull's begin because this replica decodes on the same cores."""
        return self._step.join_delay_s / DELAYS_PER_REQUEST if self.batch else 0.0

    def delay(self, now_s: float) -> None:
        """Delay the decode batch by the work that a coming request makes for the cores (Q9)."""
        if self.active and self._step.join_delay_s:
            self.pending_delays += 1
            self._end_at_next_step(now_s)

    def release(self, request: int, now_s: float) -> None:
        """Give back the blocks of a prompt that another replica has pulled."""
        num_tokens = self._requests.num_prompt_tokens[request]
        self.used_blocks -= -(-num_tokens // self._block_size)
        self.free_to_cache(request, num_tokens)
        if self.waiting and not self.active:
            self.start_stretch(now_s)

    def end_stretch(self, steps: int | None = None) -> list[int]:
        """End the stretch, or its first *steps* steps; return the requests that are finished."""
        taken = self._steps if steps is None else steps
        if not taken:
            return []
        seconds = self._seconds if taken == self._steps else self.steps_s(taken)
        end_s = self.start_s + seconds
        self._note_end(taken, seconds)
        done: list[int] = []
        if self.scheduled_prefills and not self._rules.mixed_steps:
            self.delay_batch(seconds, self.batch - len(self.newly_joined))
        elif self.batch:
            self._count_steps(taken, seconds)
            if self._finish_heap[0][0] <= self.num_tokens:
                done = self.pop_finished()
                self.finish(done, end_s)
        if self.scheduled_prefills:
            done += self.update_from_output(end_s)
        self.start_s = end_s
        return done

    def _note_end(self, steps: int, seconds: float) -> None:
        if self.running:
            self.busy_s += seconds
        if self._rules.scheduled_ahead:
            self._began_s = self.start_s + (self.steps_s(steps - 1) if steps > 1 else 0.0)
        self._unseen_steps = 0 if self.scheduled_prefills else self._unseen_steps + steps
        if self.lora is not None:
            self.lora.pending = 0

    def _count_steps(self, steps: int, seconds: float) -> None:
        """Count decode steps that are over; pulled requests got their first token in the first."""
        firsts, first_s = len(self.newly_joined), seconds
        if steps > 1 and (firsts or self.delay_s):
            first_s = self.steps_s(1)
        if firsts:
            one_step = steps == 1 or self.delay_s > 0
            self.note_first_tokens(self.newly_joined, self.start_s + first_s, one_step=one_step)
            self.newly_joined.clear()
        self.advance(steps, seconds, firsts=firsts, first_s=first_s)

    def reschedule(self, now_s: float) -> None:
        """End the stretch with the step in progress, because later ones take another time."""
        if self.active:
            self._end_at_next_step(now_s)

    def start_stretch(self, now_s: float) -> None:
        """Begin the next stretch."""
        self.start_s = now_s
        if not self.running:
            self._unseen_steps = 0
            if not (self.waiting or self.kv_arrived or self._late):
                self.scheduled_prefills.clear()
                self.active = False
                return
        self._unseen_steps %= self._rules.receive_steps
        if self._late and not self._unseen_steps:
            self._see_late(now_s)
        considered = self.schedule(now_s)
        self._set_stretch(one_step=not considered)

    def _see_late(self, now_s: float) -> None:
        """Queue what had arrived when the step that begins was scheduled."""
        # One ahead that was as the last step began.
        scheduled_s = self._began_s if self._rules.scheduled_ahead and self.running else now_s
        while self._late and self._late[0][1] <= scheduled_s:
            self.waiting.append(self._late.popleft()[0])

    def _set_stretch(self, *, one_step: bool = False) -> None:
        """
        Compute the number of steps and the end of the stretch that starts now (eq. Q2, Q3).

        *one_step*: waiting requests were kept out of this step; the next one may admit them.
        Requests that were not received yet end the stretch at the next look at them.
        """
        self.active = True
        if self.scheduled_prefills:
            computed = self.prefilling
            chunks = [(new, computed[request]) for request, new in self.scheduled_prefills]
            self._steps = 1
            batch, context = self.batch, self.context_tokens
            if not self._rules.mixed_steps:
                batch = context = 0
            self._seconds = self._step.step_s(chunks, batch, context) + self.copies_s
        elif self.batch:
            if self.pending_delays:
                self._delay_step()
            self.begin_steps()
            copies_s = self.copies_s
            one_step = one_step or self._stepwise or copies_s > 0
            steps = 1 if one_step else self.steps_to_finish()
            if self._late:
                steps = min(steps, self._rules.receive_steps - self._unseen_steps)
            self._used_end = self.used_blocks + self.new_blocks(steps)
            if self._used_end > self._num_blocks:
                steps = self._until_full(steps)
            self._steps = steps
            self._seconds = self.steps_s(steps) + copies_s
        else:
            self.active = False
            return
        self.end_s = self.start_s + self._seconds

    @property
    def copies_s(self) -> float:
        """Seconds by which copies of adapters make the step longer (eq. Q15)."""
        return 0.0 if self.lora is None else self.lora.pending_s

    def _delay_step(self) -> None:
        """Begin the next step later, by what coming requests take from the cores (eq. Q9)."""
        if self.batch > len(self.newly_joined):
            self._wait(self.pending_delays * self._step.join_delay_s / DELAYS_PER_REQUEST)
        self.pending_delays = 0

    def _wait(self, seconds: float) -> None:
        """Begin the next step later; sequences that have had a token wait for theirs."""
        self.start_s += seconds
        self.delay_batch(seconds, self.batch - len(self.newly_joined))

    def _until_full(self, steps: int) -> int:
        """Return the steps, at least one, after which blocks run out; bisection over eq. Q3."""
        low, high = 1, steps
        while high - low > 1:
            middle = (low + high) // 2
            if self.used_blocks + self.new_blocks(middle) > self._num_blocks:
                high = middle
            else:
                low = middle
        self._used_end = self.used_blocks + self.new_blocks(low)
        return low

    def _next_step_s(self, now_s: float) -> float:
        if now_s < self.start_s:
            return self.start_s
        steps = self.steps_until(now_s)
        return self.end_s if steps >= self._steps else self.start_s + self.steps_s(steps)

    def _end_at_next_step(self, now_s: float, *, every: int = 1) -> None:
        """
        End the stretch with the step in progress; the next step may admit a request.

        *every*: it may do so only each so many steps.
        """
        if self.scheduled_prefills:
            return
        steps = 0 if now_s < self.start_s else self.steps_until(now_s)
        steps += -(self._unseen_steps + steps) % every
        if steps < self._steps:
            self._take(steps)

    def _take(self, steps: int) -> None:
        self._steps = steps
        self._seconds = self.steps_s(steps)
        self.end_s = self.start_s + self._seconds

    def _joins_next_step(self, request: int) -> bool:
        return (
            len(self.kv_arrived) == 1
            and not self.keeps_blocks_free
            and next(iter(self.waiting_for_kv)) == request
            and len(self.running) < self._max_num_seqs
            and self._used_end < self._num_blocks
            and self.adapter_fits(request)
        )

    def _pull_fits(self, request: int) -> bool:
        if self.keeps_blocks_free:
            return False
        blocks = -(-self._requests.num_prompt_tokens[request] // self._block_size)
        # If that is the end of the stretch, the step after it takes its blocks first.
        step_blocks = self.blocks_of_step_after(self._steps)
        return (
            len(self.running) + len(self.waiting_for_kv) < self._max_num_seqs
            and self._used_end + step_blocks + blocks <= self._num_blocks
        )
