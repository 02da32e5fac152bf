"""One replica, replayed step by step: who waits, who is prefilled, who decodes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minicluster.specs.engine import SchedulingRules
from sizing.evidence.steps import StepTable


class ReplayedRequest(NamedTuple):
    """Tokens that a request computes, finds cached, and makes."""

    computed: int
    cached: int
    output: int


class Served(NamedTuple):
    """When a request was sent, had its first token and its last."""

    sent_s: float
    first_s: float
    last_s: float
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedReplica:
    """
    What is replayed.

    Attributes:
        steps: seconds of its steps.
        rules: how the engine fills them.
        max_num_seqs: requests that run at a time.
        token_budget: tokens of a step.
        kv_tokens: tokens that the KV cache holds.
        overhead_s: between a request's arrival and the scheduler, and back.
        ahead: the next step is put together while one runs: who arrives during a step joins the
            one after the next.
        wait_steps: most steps that prompts wait for company while sequences decode.
        wait_fraction: share of the budget that, once filled, ends the wait.
    """

    steps: StepTable
    rules: SchedulingRules
    max_num_seqs: int
    token_budget: int
    kv_tokens: float
    overhead_s: float
    ahead: bool = False
    wait_steps: int = 0
    wait_fraction: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Job:
    """A request on its way: `left` prompt tokens still to compute, `made` output tokens."""

    request: ReplayedRequest
    sent_s: float
    left: int
    made: int = 0
    first_s: float = 0.0
    joined: int = 0
    ends: int = -1

    @property
    def context(self) -> int:
        return self.request.cached + self.request.computed + self.made


@dataclass(slots=True)
class RowReplay:
    """
    Replay of one replica (docs/model.md, eq. V2).

    Decode steps between two events are taken together, at the mean of their contexts.
    """

    replica: ReplayedReplica
    requests: Sequence[ReplayedRequest]
    arrivals: Sequence[float] | None
    users: int
    now: float = 0.0
    began: float = 0.0
    waited: int = 0
    step: int = 0
    context_sum: float = 0.0
    next_request: int = 0
    waiting: deque[_Job] = field(default_factory=deque)
    partial: _Job | None = None
    running: dict[int, _Job] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    coming: list[tuple[float, int]] = field(default_factory=list)
    done: list[Served] = field(default_factory=list)
    reserved: float = 0.0

    def run(self) -> list[Served]:
        """Serve every request; returns them in the order they finish."""
        if self.arrivals is None:
            for _ in range(min(self.users, len(self.requests))):
                self._send(0.0)
        else:
            for at in self.arrivals:
                self._send(at)
        while len(self.done) < len(self.requests):
            self._arrive()
            chunks = self._admit()
            if chunks:
                self._prefill_step(chunks)
            elif self.running:
                self._decode_steps()
            else:
                self.now = max(self.now, self.coming[0][0])
        return self.done

    def _send(self, at: float) -> None:
        """A user sends the next request; the scheduler sees it after the engine's overhead."""
        if self.next_request < len(self.requests):
            heapq.heappush(self.coming, (at + self.replica.overhead_s, self.next_request))
            self.next_request += 1

    def _arrive(self) -> None:
        """Queue what has reached the scheduler by now, or when the next step was put together."""
        busy = self.running or self.partial is not None
        seen = self.began if busy and self.replica.ahead else self.now
        while self.coming and self.coming[0][0] <= seen:
            at, number = heapq.heappop(self.coming)
            request = self.requests[number]
            sent = at - self.replica.overhead_s
            self.waiting.append(_Job(request=request, sent_s=sent, left=request.computed))

    def _admit(self) -> list[tuple[_Job, int]]:
        """Take prompts, or parts of them, into the next step."""
        if self._waits():
            return []
        rules = self.replica.rules
        budget = self.replica.token_budget - (len(self.running) if rules.mixed_steps else 0)
        chunks: list[tuple[_Job, int]] = []
        if self.partial is not None:
            size = min(self.partial.left, max(budget, 1))
            chunks.append((self.partial, size))
            budget -= size
            self.partial = None if size == chunks[0][0].left else self.partial
        while self.waiting and budget > 0 and self.partial is None:
            job = self.waiting[0]
            if not self._fits(job, len(chunks)):
                break
            if job.left > budget and not rules.chunked_prefill and chunks:
                break
            size = min(job.left, budget) if rules.chunked_prefill else job.left
            self.waiting.popleft()
            self.reserved += self._reservation(job)
            chunks.append((job, size))
            budget -= size
            if size < job.left:
                self.partial = job
        return chunks

    def _waits(self) -> bool:
        """Whether prompts wait a step for others, as the recipe of the engine says."""
        held = bool(self.waiting and self.running) and self.waited < self.replica.wait_steps
        if held:
            tokens = len(self.running) + sum(job.left for job in self.waiting)
            held = tokens < self.replica.wait_fraction * self.replica.token_budget
        self.waited = self.waited + 1 if held else 0
        return held

    def _fits(self, job: _Job, admitted: int) -> bool:
        """Whether batch and KV cache have room; an empty replica takes anything."""
        running = len(self.running) + admitted
        if not running:
            return True
        if running >= self.replica.max_num_seqs:
            return False
        return self.reserved + self._reservation(job) <= self.replica.kv_tokens

    def _reservation(self, job: _Job) -> float:
        """KV cache that a request holds from its admission on."""
        ahead = (job.request.output - job.made) * self.replica.rules.kv_reserved_fraction
        return job.context + ahead

    def _prefill_step(self, chunks: list[tuple[_Job, int]]) -> None:
        """One step with prompts in it; decoded sequences get a token where the engine mixes."""
        tokens = sum(size for _, size in chunks)
        pairs = sum(size * (job.context - job.left + size / 2) for job, size in chunks)
        batch = len(self.running) if self.replica.rules.mixed_steps else 0
        context = self.context_sum / batch if batch else 0.0
        self.began = self.now
        self.now += self.replica.steps.seconds(tokens, pairs / tokens - tokens / 2, batch, context)
        if batch:
            self._advance(1)
        for job, size in chunks:
            job.left -= size
            if not job.left:
                self._join(job)
        self._finish()

    def _decode_steps(self) -> None:
        """Steps until a request ends or one arrives that can be admitted."""
        batch = len(self.running)
        context = self.context_sum / batch
        count = 1 if self.waited else max(1, self._next_end() - self.step)
        one = self.replica.steps.seconds(0, 0.0, batch, context)
        if self.coming:
            count = min(count, max(1, int((self.coming[0][0] - self.now) / one) + 1))
        if self.replica.rules.kv_reserved_fraction < 1:
            room = self.replica.kv_tokens - self.reserved
            grows = batch * (1 - self.replica.rules.kv_reserved_fraction)
            count = min(count, max(1, int(room / grows)))
        if count > 1:
            one = self.replica.steps.seconds(0, 0.0, batch, context + (count - 1) / 2)
        self.now += one * count
        self.began = self.now - one
        self._advance(count)
        self._finish()

    def _advance(self, count: int) -> None:
        """Every running sequence makes *count* tokens."""
        self.step += count
        grown = count * len(self.running)
        self.context_sum += grown
        self.reserved += grown * (1 - self.replica.rules.kv_reserved_fraction)
        while self.reserved > self.replica.kv_tokens and len(self.running) > 1:
            self._preempt()

    def _join(self, job: _Job) -> None:
        """A prompt is computed: its first token is out, the rest is decoded."""
        if not job.made:
            job.first_s = self.now
        job.made += 1
        self.reserved += 1 - self.replica.rules.kv_reserved_fraction
        job.joined = self.step
        job.ends = self.step + job.request.output - job.made
        number = id(job)
        self.running[number] = job
        self.context_sum += job.context
        heapq.heappush(self.ends, (job.ends, number))

    def _next_end(self) -> int:
        """Step count at which the next sequence ends; forget the preempted."""
        while True:
            end, number = self.ends[0]
            job = self.running.get(number)
            if job is not None and job.ends == end:
                return end
            heapq.heappop(self.ends)

    def _finish(self) -> None:
        """Let go of what has all its tokens; its user sends again."""
        while self.running and self._next_end() <= self.step:
            _, number = heapq.heappop(self.ends)
            job = self.running.pop(number)
            made = job.made + self.step - job.joined
            self.context_sum -= job.request.cached + job.request.computed + made
            self.reserved -= self._held(job, made)
            self.done.append(Served(job.sent_s, job.first_s, self.now, job.request.output))
            if self.arrivals is None:
                self._send(self.now)

    def _held(self, job: _Job, made: int) -> float:
        """KV cache that a running request holds after *made* tokens."""
        prompt = job.request.cached + job.request.computed
        return prompt + made + (job.request.output - made) * self.replica.rules.kv_reserved_fraction

    def _preempt(self) -> None:
        """Drop the youngest sequence: its tokens are computed again when there is room."""
        number, job = next(reversed(self.running.items()))
        del self.running[number]
        made = job.made + self.step - job.joined
        self.context_sum -= job.request.cached + job.request.computed + made
        self.reserved -= self._held(job, made)
        job.made = made
        job.left = job.context
        job.ends = -1
        self.waiting.appendleft(job)
