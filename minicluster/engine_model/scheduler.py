"""Who is in a step, by the rules of vLLM V1's scheduler."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from minicluster.engine_model.decode_batch import Decoding

if TYPE_CHECKING:
    from minicluster.engine_model.limits import EngineLimits
    from minicluster.engine_model.prefix_cache import PrefixCache
    from minicluster.engine_model.request_table import Ledger
    from minicluster.engine_model.step_seconds import StepTime


class Scheduler(Decoding):
    """
    Waiting, pulling, prefilling and decoding requests of one engine (docs/model.md, eq. Q1).

    Attributes:
        waiting: not admitted, in order.
        pulling: admitted, their KV cache on its way, in order; they hold blocks.
        ready: of those, the ones that have arrived.
        running: admitted, in order; the last one is preempted first.
        prefilling: of those, per request: prompt tokens computed so far.
        chunks: requests whose prompts are computed in this stretch, and tokens of each.
        fresh: pulls that have joined and got no token yet.
        owed: times that requests on their way have held up those that decode, not yet counted.
        started: pulls that this replica has begun: request and time; the caller takes them.
        keeps: whether requests end with their prompt and keep their blocks until they are pulled.
        pulls: requests that are to pull their KV cache instead of computing it.
    """

    __slots__ = (
        "_budget", "_limit", "_threshold", "_total", "_watermark", "chunks", "fresh", "keeps",
        "owed", "prefilling", "prefix_cache", "pulling", "pulls", "ready", "running", "started",
        "waiting",
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
        self.fresh: list[int] = []
        self.owed = 0

    def choose(self, now_s: float) -> bool:
        """
        Choose who is in the step that begins now: running requests first, then pulls, then others.

        Returns:
            Whether waiting requests were looked at; after a preemption they are not.
        """
        self.chunks.clear()
        budget, may_admit = self._budget - self.batch, True
        free = self._total - self.used
        if self.prefilling or (self.batch and free < self._phase[self.step_no % self._block_size]):
            budget, may_admit = self._continue(free)
        if may_admit or not self.running:  # a step of nothing takes no time; the next one admits
            if self.ready:
                budget -= self.take_ready(budget)
            if self.waiting:
                self._admit(budget, now_s)
        return may_admit

    def take_ready(self, budget: int = 1) -> int:
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
            self.fresh.append(request)
            self.owed += 1
            taken += 1
        return taken

    def _above_watermark(self) -> bool:
        """Say whether a request that needs no block now may join those that run."""
        if not self._watermark or not self.running:
            return True
        taking = self._phase[self.step_no % self._block_size]
        return self.used + taking + self._watermark <= self._total

    def _admit(self, budget: int, now_s: float) -> None:
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
                self.started.append((request, now_s))
                continue
            hit = self._hit(request, tokens)
            new = min(tokens - hit, self._threshold, budget)
            self.used += -(-(hit + new) // size)
            running[request] = None
            self.prefilling[request] = hit
            self.chunks.append((request, new))
            if self.prefix_cache is not None:
                self.prefix_cache.compute(request, hit + new)
            self._ledger.admitted_s[request] = min(self._ledger.admitted_s[request], now_s)
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
                if self.prefix_cache is not None:
                    self.prefix_cache.compute(request, done + new)
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
            elif request in self.fresh:
                self.fresh.remove(request)
        else:
            self.used -= -(-done // self._block_size)
        self.remember(request, 0)
        ledger.preemptions[request] += 1
        self.waiting.appendleft(request)
        return before - self.used

    def compute(self, end_s: float) -> list[int]:
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
            self.forget([request], end_s)
            done.append(request)

    def forget(self, done: list[int], end_s: float) -> None:
        """Strike finished requests off the running ones."""
        ledger = self._ledger
        for request in done:
            del self.running[request]
            ledger.finish_s[request] = end_s
            self.remember(request, ledger.prompt[request] + ledger.outputs[request] - 1)

    def _hit(self, request: int, tokens: int) -> int:
        """Prompt tokens found cached: whole blocks, and never the last token (eq. Q4)."""
        ledger = self._ledger
        found = ledger.prefix[request]
        if self.prefix_cache is not None:
            found = max(found, self.prefix_cache.take(request, self._total - self.used))
        hit = min(found, tokens - 1) // self._block_size * self._block_size
        if not ledger.produced[request]:
            ledger.cached[request] = hit
        return hit

    def remember(self, request: int, tokens: int) -> None:
        """Leave a request's blocks, of *tokens*, in the prefix cache."""
        if self.prefix_cache is not None:
            self.prefix_cache.leave(request, tokens, self._total - self.used)

    def _reserved(self) -> int:
        """Blocks that prompts in progress still need; a pull must leave them."""
        size, ledger, done = self._block_size, self._ledger, self.prefilling
        return sum(
            -(-(ledger.prompt[each] + ledger.produced[each]) // size)
            - -(-(done[each] + new) // size)
            for each, new in self.chunks
        )
