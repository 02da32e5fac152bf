"""One replica under the rules of vLLM V1's scheduler."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sizing.simulation.decoding import Decoding

if TYPE_CHECKING:
    from sizing.simulation.ledger import Ledger
    from sizing.simulation.limits import EngineLimits
    from sizing.simulation.prefix import PrefixCache
    from sizing.simulation.step import StepTime


class Replica(Decoding):
    """
    An engine: waiting, pulling, prefilling and decoding requests (docs/model.md, eq. Q1).

    Time goes in stretches: one step where prompts are computed, else as many decode steps as
    pass before a sequence ends or blocks run out. `start_s` to `end_s` is the stretch in
    progress while `active`; an event at `end_s` must call `complete` and then `schedule`. Every
    change of `end_s` raises `epoch`, so that events of earlier ends can be told apart.

    Attributes:
        busy_s: time spent in stretches that are over.
        waiting: not admitted, in order.
        pulling: admitted, their KV cache on its way, in order; they hold blocks.
        ready: of those, the ones that have arrived.
        running: admitted, in order; the last one is preempted first.
        prefilling: of those, per request: prompt tokens computed so far.
        chunks: requests whose prompts are computed in this stretch, and tokens of each.
        started: pulls that this replica has begun: request and time; the caller takes them.
        keeps: whether requests end with their prompt and keep their blocks until `release`.
        pulls: requests that pull their KV cache instead of computing it.
    """

    __slots__ = (
        "_budget", "_fresh", "_limit", "_seconds", "_steps", "_threshold", "_total", "_used_end",
        "_watermark", "active", "busy_s", "chunks", "end_s", "epoch", "keeps", "prefilling",
        "prefix_cache", "pulling", "pulls", "ready", "running", "started", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        ledger: Ledger,
        step: StepTime,
        limits: EngineLimits,
        *,
        prefill_only: bool = False,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """
        Start idle and empty.

        *prefill_only*: requests end with their prompt, and keep their blocks until `release`.
        """
        super().__init__(ledger, step, limits.block_size)
        self._budget = limits.max_num_batched_tokens
        self._limit = limits.max_num_seqs
        self._threshold = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        self._total = limits.kv_blocks
        self._watermark = limits.watermark_blocks
        self.keeps = prefill_only
        self.prefix_cache = prefix_cache
        self.waiting: deque[int] = deque()
        self.pulling: dict[int, None] = {}
        self.ready: set[int] = set()
        self.running: dict[int, None] = {}
        self.prefilling: dict[int, int] = {}
        self.chunks: list[tuple[int, int]] = []
        self.started: list[tuple[int, float]] = []
        self.pulls: set[int] = set()
        self._fresh: list[int] = []
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
                self._take_ready()
                self._begin()

    def release(self, request: int, now_s: float) -> None:
        """Give back the blocks of a prompt that another replica has pulled."""
        self.used -= -(-self._ledger.prompt[request] // self._block_size)
        if self.prefix_cache is not None:
            self._remember(request, self._ledger.prompt[request])
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
            firsts = len(self._fresh)
            if firsts:
                for request in self._fresh:
                    self.first_token(request, self.start_s + first_s, one_step=taken == 1)
                self._fresh.clear()
            self.tally(taken, seconds, firsts=firsts, first_s=first_s)
            if self._ends[0][0] <= self.step_no:
                done = self.ended()
                self._forget(done, end_s)
        if self.chunks:
            done += self._compute(end_s)
        return done

    def schedule(self, now_s: float) -> None:
        """Begin the next stretch: running requests first, then arrived pulls, then waiting ones."""
        self.start_s = now_s
        self.chunks.clear()
        budget, may_admit = self._budget - self.batch, True
        free = self._total - self.used
        if self.prefilling or (self.batch and free < self._phase[self.step_no % self._block_size]):
            budget, may_admit = self._continue(free)
        if may_admit or not self.running:  # a step of nothing takes no time; the next one admits
            if self.ready:
                budget -= self._take_ready(budget)
            if self.waiting:
                self._admit(budget)
        self._begin(one_step=not may_admit)

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
        return (
            len(self.running) + len(self.pulling) < self._limit
            and self._used_end + blocks + self._watermark <= self._total
        )

    def _take_ready(self, budget: int = 1) -> int:
        """Let arrived pulls decode, in the order in which they began; return how many."""
        taken = 0
        for request in [each for each in self.pulling if each in self.ready]:
            if taken >= budget or len(self.running) >= self._limit or not self._above_watermark():
                break
            del self.pulling[request]
            self.ready.discard(request)
            self.running[request] = None
            # The last prompt token is computed again, so that its logits are there.
            cached = self._ledger.prompt[request] - 1
            if cached % self._block_size == 0:
                self.used -= 1  # its first step takes this block by eq. Q3
            self.join(request, cached, self._ledger.outputs[request])
            self._fresh.append(request)
            taken += 1
        return taken

    def _above_watermark(self) -> bool:
        """Say whether a request that needs no block now may join those that run."""
        if not self._watermark or not self.running:
            return True
        taking = self._phase[self.step_no % self._block_size]
        return self.used + taking + self._watermark <= self._total

    def _admit(self, budget: int) -> None:
        """Admit waiting requests while tokens, sequences and blocks last."""
        waiting, running, size = self.waiting, self.running, self._block_size
        taking = self._phase[self.step_no % size] if self.batch else 0
        while waiting and budget > 0 and len(running) < self._limit:
            request = waiting[0]
            tokens = self._ledger.prompt[request] + self._ledger.produced[request]
            need = -(-tokens // size)
            spare = self._total - self.used - taking - (self._watermark if running else 0)
            pull = request in self.pulls
            if need > (spare - self._reserved() if pull else spare):
                break
            waiting.popleft()
            if pull:
                self.used += need
                self.pulls.discard(request)
                self.pulling[request] = None
                self.started.append((request, self.start_s))
                continue
            hit = self._hit(request, tokens)
            new = min(tokens - hit, self._threshold, budget)
            self.used += -(-(hit + new) // size)
            running[request] = None
            self.prefilling[request] = hit
            self.chunks.append((request, new))
            self._ledger.admitted_s[request] = min(self._ledger.admitted_s[request], self.start_s)
            budget -= new

    def _continue(self, free: int) -> tuple[int, bool]:
        """
        Go on with the running requests, preempting the last one while blocks are missing.

        Returns:
            The token budget left, and whether waiting requests may be admitted.
        """
        budget, preempted, size = self._budget, False, self._block_size
        at = self.step_no % size
        for request in list(self.running):
            if request not in self.running:
                break
            done = self.prefilling.get(request)
            if done is None:
                new, need = 1, 1 if -self._base[request] % size == at else 0
            else:
                goal = self._ledger.prompt[request] + self._ledger.produced[request]
                new = min(goal - done, self._threshold, budget)
                need = -(-(done + new) // size) - -(-done // size)
            while need > free and request in self.running:
                free += self._preempt()
                preempted = True
            if request not in self.running:
                break
            free -= need
            budget -= new
            if done is not None:
                self.used += need
                self.chunks.append((request, new))
        return budget, not preempted

    def _preempt(self) -> int:
        """Put the last running request back in front of the queue; return its blocks."""
        request, _ = self.running.popitem()
        before = self.used
        done = self.prefilling.pop(request, None)
        ledger = self._ledger
        if done is None:
            ledger.produced[request] = ledger.outputs[request] - self.leave(request)
            if ledger.produced[request]:
                ledger.last_s[request] = self.start_s
            elif request in self._fresh:
                self._fresh.remove(request)
        else:
            self.used -= -(-done // self._block_size)
        ledger.preemptions[request] += 1
        self.waiting.appendleft(request)
        return before - self.used

    def _compute(self, end_s: float) -> list[int]:
        """Count the prompt tokens of a step that is over; return requests that end with it."""
        done: list[int] = []
        ledger = self._ledger
        for request, new in self.chunks:
            computed = self.prefilling[request] + new
            if computed < ledger.prompt[request] + ledger.produced[request]:
                self.prefilling[request] = computed
                continue
            del self.prefilling[request]
            if self.keeps:
                del self.running[request]
                done.append(request)
            else:
                self._emit(request, computed, end_s, done)
        return done

    def _emit(self, request: int, computed: int, end_s: float, done: list[int]) -> None:
        """Produce the token that a finished prompt gives, and decode on if there are more."""
        ledger = self._ledger
        ledger.produced[request] += 1
        remaining = ledger.outputs[request] - ledger.produced[request]
        if ledger.produced[request] == 1:
            ledger.first_s[request] = end_s
        else:
            gap_s = end_s - ledger.last_s[request]
            self.gaps.append((gap_s, 1, ledger.last_s[request]))
            ledger.stall_s[request] = max(ledger.stall_s[request], gap_s)
        if remaining:
            self.join(request, computed, remaining)
        else:
            self.used -= -(-computed // self._block_size)
            self._forget([request], end_s)
            done.append(request)

    def _forget(self, done: list[int], end_s: float) -> None:
        """Strike finished requests off the running ones."""
        ledger = self._ledger
        for request in done:
            del self.running[request]
            ledger.finish_s[request] = end_s
            if self.prefix_cache is not None:
                self._remember(request, ledger.prompt[request] + ledger.outputs[request] - 1)

    def _hit(self, request: int, tokens: int) -> int:
        """Prompt tokens found cached: whole blocks, and never the last token (eq. Q4)."""
        ledger = self._ledger
        found = ledger.prefix[request]
        if self.prefix_cache is not None and ledger.session[request] >= 0:
            spare = self._total - self.used
            found = max(found, self.prefix_cache.take(ledger.session[request], spare))
        hit = min(found, tokens - 1) // self._block_size * self._block_size
        if not ledger.produced[request]:
            ledger.cached[request] = hit
        return hit

    def _remember(self, request: int, tokens: int) -> None:
        """Leave a conversation's blocks in the prefix cache."""
        session = self._ledger.session[request]
        if self.prefix_cache is not None and session >= 0:
            self.prefix_cache.put(session, tokens, self._total - self.used)

    def _reserved(self) -> int:
        """Blocks that prompts in progress still need; a pull must leave them."""
        size, ledger, done = self._block_size, self._ledger, self.prefilling
        return sum(
            -(-(ledger.prompt[each] + ledger.produced[each]) // size)
            - -(-(done[each] + new) // size)
            for each, new in self.chunks
        )
