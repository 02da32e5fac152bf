"""The engine model by the clock: one engine's requests, their tokens, and its KV cache."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeVar

from minicluster.engine_model.lockstep import Rank, keep_in_step, step_together
from minicluster.engine_model.lora_slots import NO_ADAPTER, LoraSlots
from minicluster.engine_model.prefix_cache import ContentCache
from minicluster.engine_model.replica import Replica
from minicluster.engine_model.request_table import RequestTable
from minicluster.errors import InputError
from minicluster.workload.engine_steps import EngineStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from minicluster.engine_model.limits import EngineLimits, LoraLimits
    from minicluster.engine_model.step_seconds import StepTime

    Pull = Callable[["Sequence", float], None]
    """Takes a request that may pull its KV cache, and the engine time from which on."""


RESOLUTION_S = 1e-6
"""Seconds by which a timer may be early: times are sums of rounded numbers."""


MOST_STEPS = 200_000
"""Steps that an engine keeps: half an hour of them."""


def check_slowdown(slowdown: float) -> float:
    """Return *slowdown*; raises InputError unless it is a finite number of at least 1."""
    if not (math.isfinite(slowdown) and slowdown >= 1):
        raise InputError("--slowdown", slowdown, "a number, at least 1")
    return slowdown


class EngineClock:
    """
    Seconds of the plan; each takes *slowdown* seconds of the event loop's clock.

    They count from that clock's zero, which is the same in all processes of a machine. Engine time
    never goes back: while the engine is frozen it stands still.
    """

    def __init__(self, slowdown: float) -> None:
        """Start inside the event loop that all calls are made in."""
        self.slowdown = check_slowdown(slowdown)
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._now_s = 0.0

    def now_s(self) -> float:
        """Return the engine time."""
        passed_s = (self._loop.time() - self._origin_s) / self.slowdown
        self._now_s = max(self._now_s, passed_s)
        return self._now_s

    def wait_s(self, until_s: float) -> float:
        """Return the seconds of the clock until an engine time; 0 if it has passed."""
        passed_s = (self._loop.time() - self._origin_s) / self.slowdown
        return max(0.0, (until_s - passed_s) * self.slowdown)

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* of engine time, as long as the engine is not frozen meanwhile."""
        await asyncio.sleep(seconds * self.slowdown)

    def call_at(self, until_s: float, callback: Callable[[], object]) -> EngineTimer:
        """Call back at an engine time, or at once where it has passed."""
        return EngineTimer(self, until_s, callback)

    def reached(self, until_s: float) -> bool:
        """Say whether an engine time has come; from then on `now_s` is not before it."""
        if self.wait_s(until_s) > RESOLUTION_S:
            return False
        self._now_s = max(self._now_s, until_s)
        return True

    def freeze(self, seconds: float) -> None:
        """Let engine time stand still for *seconds* of the clock."""
        self.now_s()
        self._origin_s += seconds


class EngineTimer:
    """A callback at an engine time, which comes later where the engine is frozen meanwhile."""

    def __init__(self, clock: EngineClock, until_s: float, callback: Callable[[], object]) -> None:
        """Start to wait."""
        self._clock = clock
        self._until_s = until_s
        self._callback = callback
        self._wait()

    def cancel(self) -> None:
        """Do not call back."""
        self._handle.cancel()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._clock.wait_s(self._until_s), self._due)

    def _due(self) -> None:
        if self._clock.reached(self._until_s):
            self._callback()
        else:
            self._wait()


Batch = TypeVar("Batch", bound=Replica)


class EngineDied(Exception):
    """The engine died, or was told to fail."""


class SlowedStep:
    """Steps of a plan that take *factor* times as long: a fault that can be set and taken back."""

    def __init__(self, step: StepTime) -> None:
        """Start as planned."""
        self._step = step
        self.join_delay_s = step.join_delay_s
        self.factor = 1.0

    def decode_line(self, batch: int) -> tuple[float, float]:
        """See `StepTime`."""
        fixed_s, per_token_s = self._step.decode_line(batch)
        return fixed_s * self.factor, per_token_s * self.factor

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`."""
        return self._step.step_s(chunks, batch, context) * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests that compute or decode, that wait for a place or KV cache, and used blocks."""

    running: int
    waiting: int
    kv_blocks: int


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """
    One request in an engine; times are engine seconds.

    Attributes:
        index: row of the engine's table.
        begin_pull: called when it may pull its KV cache from another engine.
        num_tokens: tokens generated so far.
        scheduled_s: time at which its prompt's first step began, or its KV cache had been pulled.
        done: no token follows.
        failed: the engine died before the last one.
        kv_lost: its prompt was computed elsewhere in vain.
    """

    lane: _Lane
    index: int
    prompt_tokens: int
    arrived_s: float
    begin_pull: Pull
    num_tokens: int = 0
    done: bool = False
    failed: bool = False
    kv_lost: bool = False
    scheduled_s: float = inf
    first_token_s: float | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> int:
        """The rank of the engine that has it; 0 outside a group."""
        return self.lane.rank

    async def more_than(self, seen: int) -> int:
        """
        Wait for more tokens than *seen*, or the end; return how many there are.

        Raises:
            EngineDied: there will be none.
        """
        while self.num_tokens <= seen and not self.done:
            self._changed.clear()
            await self._changed.wait()
        if self.failed:
            raise EngineDied("the simulated engine died")
        return self.num_tokens

    def progress(self, num_tokens: int, *, done: bool) -> None:
        """Note new tokens or the end, and wake what waits for them."""
        if num_tokens > self.num_tokens or done:
            self.num_tokens, self.done = num_tokens, done
            self._changed.set()


class _Lane:
    """
    One batch of an engine: a copy of attention, or a stage of a pipeline.

    Attributes:
        rank: of its group; 0 outside one.
        together: the lanes whose steps are one, those of its group; else itself alone.
    """

    def __init__(self, engine: SimulatedEngine, replica: Replica, rank: int = 0) -> None:
        self.engine = engine
        self.replica = replica
        self.rank = rank
        self.together: tuple[_Lane, ...] = (self,)
        replica.keeps_gaps = False
        self.sequences: dict[int, Sequence] = {}
        self.aborted: list[Sequence] = []
        self.timer: EngineTimer | None = None
        self._step_before_s = -inf

    def catch_up(self) -> float:
        """End all steps that are over; return the engine time."""
        now_s, replica = self.engine.clock.now_s(), self.replica
        while replica.active and replica.end_s <= now_s:
            self._next_step()
        return now_s

    def do(self, change: Callable[[float], None]) -> None:
        """Change something now, by the engine time; begin what that allows."""
        change(self.catch_up())
        if isinstance(self.replica, Rank):
            keep_in_step(self.replica)
        self.changed()

    def changed(self) -> None:
        """Begin the pulls that the last change allowed, and wake up when the step is over."""
        for lane in self.together:
            for request, begin_s in lane.replica.started_pulls:
                sequence = lane.sequences[request]
                sequence.begin_pull(sequence, begin_s)
            lane.replica.started_pulls.clear()
        first = self.together[0]  # has the timer of all
        first.stop_timer()
        if first.replica.active:
            end_s = first.replica.end_s
            first.timer = self.engine.clock.call_at(end_s, first.step_over)

    def stop_timer(self) -> None:
        """Do not wake up."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def abort(self, sequence: Sequence, now_s: float) -> None:
        """Take a request out, after the step in progress and the pull of its KV cache."""
        if sequence.done:
            self.release(sequence, now_s)
            return
        self.aborted.append(sequence)
        if not self.replica.active:
            self._forget_aborted()

    def release(self, sequence: Sequence, now_s: float) -> None:
        """Give back the blocks of a computed prompt that is kept here."""
        if sequence.index in self.sequences:
            self.replica.release(sequence.index, now_s)
            self.end(sequence)

    def fail(self) -> None:
        """End every request: the engine died."""
        self.stop_timer()
        for sequence in self.sequences.values():
            sequence.failed = True
            sequence.progress(sequence.num_tokens, done=True)
        self.sequences.clear()

    def end(self, sequence: Sequence) -> None:
        """Forget a request that has no blocks left."""
        self.sequences.pop(sequence.index, None)
        self.engine.forget_prompt(sequence.index)

    def step_over(self) -> None:
        """End the step that is over; begin what that allows."""
        self.timer = None
        self.catch_up()
        self.changed()

    def _next_step(self) -> None:
        end_s = self.replica.end_s
        for lane in self.together:
            lane.end_step()
        for lane in self.together:
            lane.replica.start_stretch(end_s)
            lane._step_before_s = end_s if lane.replica.active else -inf  # noqa: SLF001  (ours)
        if isinstance(self.replica, Rank):
            step_together(self.replica.ranks)

    def end_step(self) -> None:
        """End the step in progress: its tokens are there, and blocks are free."""
        if self.engine.steps is not None:
            self.engine.steps.append(self._contents())
        self._report(self.replica.end_stretch())
        self._forget_aborted()

    def _contents(self) -> EngineStep:
        """Return the step in progress as vLLM's are reported; its end is by the engine's clock."""
        replica, clock = self.replica, self.engine.clock
        chunks = [(new, replica.prefilling[at]) for at, new in replica.scheduled_prefills]
        began_s = replica.start_s if self._step_before_s < 0 else self._step_before_s
        return EngineStep(
            end_unix_s=replica.end_s,
            seconds=(replica.end_s - began_s) * clock.slowdown,
            prompts=len(chunks),
            prompt_tokens=sum(new for new, _ in chunks),
            pairs=sum(new * (2 * cached + new + 1) // 2 for new, cached in chunks),
            sequences=replica.batch,
            context_tokens=replica.context_tokens,
            joined=len(replica.newly_joined) + sum(not cached for _, cached in chunks),
        )

    def _forget_aborted(self) -> None:
        pulling = self.replica.waiting_for_kv
        ready = [request for request in self.aborted if request.index not in pulling]
        self.aborted = [request for request in self.aborted if request.index in pulling]
        for sequence in ready:
            if not sequence.done:
                self.replica.abort(sequence.index)
                sequence.progress(sequence.num_tokens, done=True)
                self.end(sequence)
            else:  # a prompt that this step computed, and keeps
                self.release(sequence, self.engine.clock.now_s())

    def _report(self, finished: list[int]) -> None:
        replica, now_s = self.replica, self.replica.end_s
        others = [index for index, request in self.sequences.items() if not request.done]
        for index in dict.fromkeys([*finished, *others]):
            sequence = self.sequences[index]
            done = index in finished
            max_tokens = self.engine.table.max_tokens[index]
            tokens = max_tokens if done else replica.num_generated(index)
            if tokens and sequence.first_token_s is None:
                sequence.first_token_s = now_s
                scheduled_s = self.engine.table.scheduled_s[index]
                sequence.scheduled_s = min(sequence.scheduled_s, scheduled_s)
            sequence.progress(tokens, done=done)
            if done and not replica.prefill_only:
                self.end(sequence)


class SimulatedEngine:
    """
    An engine that computes nothing and takes the time that the plan's model says.

    Its scheduler, KV blocks, prefix cache, slots for adapters and step seconds are those that
    `sizing` drives with virtual time; here every step is a stretch of its own, and ends by the
    clock. The ranks of a data-parallel group are lanes that step together (docs/model.md, eq. Q11).

    Attributes:
        table: the requests.
        steps: the last ones, where they are kept: only where they are not the plan's own.
    """

    def __init__(  # noqa: PLR0913  (what an engine is, by name)
        self,
        limits: EngineLimits,
        step: StepTime,
        clock: EngineClock,
        *,
        prefill_only: bool = False,
        lanes: int = 1,
        ranks: int = 1,
        lora: LoraLimits | None = None,
        keeps_steps: bool = False,
    ) -> None:
        """
        Start idle and empty, with steps of *step* seconds of the clock.

        Args:
            limits: of each lane.
            step: seconds of its steps.
            clock: engine time.
            prefill_only: whether requests keep their blocks until `release`.
            lanes: batches of the engine, each with its own queue and KV cache.
            ranks: size of a data-parallel group, whose lanes step together; 1: they step alone.
            lora: slots for adapters of each lane; `None`: requests name none.
            keeps_steps: whether `steps` are kept.
        """
        self.clock = clock
        self.steps = deque[EngineStep](maxlen=MOST_STEPS) if keeps_steps else None
        self.step = SlowedStep(step)
        self.table = RequestTable([], [])
        self.died = False
        self._content: list[tuple[int, ...]] = []
        self._adapter: list[int] = []
        self._adapter_loads: list[int] = []
        self._lora = lora
        make = partial(self._batch, limits, prefill_only=prefill_only)
        self._grouped = ranks > 1
        if self._grouped:
            batches = tuple(make(Rank) for _ in range(ranks))
            self._lanes = [_Lane(self, batch, rank) for rank, batch in enumerate(batches)]
            for lane, batch in zip(self._lanes, batches, strict=True):
                batch.ranks, lane.together = batches, tuple(self._lanes)
        else:
            self._lanes = [_Lane(self, make(Replica)) for _ in range(lanes)]

    def _batch(self, limits: EngineLimits, kind: type[Batch], *, prefill_only: bool) -> Batch:
        cache = ContentCache(self._content, limits.block_size, tokens_each=limits.block_size)
        batch = kind(
            *(self.table, self.step, limits),
            prefill_only=prefill_only,
            prefix_cache=cache,
            stepwise=True,
        )
        if self._lora is not None:
            batch.lora = LoraSlots(self._adapter, self._lora, self._adapter_loads)
        return batch

    def add(
        self,
        prompt_tokens: int,
        blocks: tuple[int, ...],
        max_tokens: int,
        *,
        adapter: int = NO_ADAPTER,
        rank: int = 0,
        begin_pull: Pull | None = None,
    ) -> Sequence:
        """
        Take a request that arrives now.

        Args:
            prompt_tokens: length of its prompt.
            blocks: ids of the contents of its whole blocks, for the prefix cache.
            max_tokens: tokens to generate.
            adapter: LoRA adapter, which needs a slot.
            rank: rank of the group that takes it; 0 outside a group.
            begin_pull: called when it may pull its KV cache from another engine; `kv_received` or
                `kv_lost` has to follow. `None`: its prompt is computed here.

        Raises:
            EngineDied: it takes no more requests.
        """
        if self.died:
            raise EngineDied("the simulated engine died")
        lane = self._lanes[rank]
        if not self._grouped:
            lane = min(self._lanes, key=lambda each: len(each.sequences))
        now_s = lane.catch_up()
        index = self.table.add(prompt_tokens, max_tokens)
        self._content.append(blocks)
        self._adapter.append(adapter)
        self._adapter_loads.append(0)
        sequence = Sequence(
            lane=lane,
            index=index,
            prompt_tokens=prompt_tokens,
            arrived_s=now_s,
            begin_pull=begin_pull or _no_pull,
        )
        lane.sequences[index] = sequence
        take = lane.replica.add if begin_pull is None else lane.replica.add_remote_prefill
        lane.do(partial(take, index))
        if begin_pull is not None:
            lane.do(lane.replica.delay)
        return sequence

    def kv_received(self, sequence: Sequence) -> None:
        """Note that a request's KV cache is there; it decodes from the next step on."""

        def join(now_s: float) -> None:
            if sequence.index in sequence.lane.sequences:
                sequence.scheduled_s = now_s
                sequence.lane.replica.kv_received(sequence.index, now_s)

        sequence.lane.do(join)

    def kv_lost(self, sequence: Sequence) -> None:
        """Note that a request's KV cache will not come; the engine computes the prompt itself."""
        sequence.kv_lost = True

        def recompute(now_s: float) -> None:
            if sequence.index in sequence.lane.sequences:
                sequence.lane.replica.recompute(sequence.index, now_s)

        sequence.lane.do(recompute)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of a prompt that was pulled, or never will be."""
        sequence.lane.do(partial(sequence.lane.release, sequence))

    def abort(self, sequence: Sequence) -> None:
        """End a request whose answer is not wanted any more, and free the prompt that it keeps."""
        sequence.lane.do(partial(sequence.lane.abort, sequence))

    def fail(self) -> None:
        """Let the engine die: all requests fail, and it takes no more."""
        self.died = True
        for lane in self._lanes:
            lane.fail()

    def freeze(self, seconds: float) -> None:
        """Let nothing happen for *seconds* of the clock."""
        for lane in self._lanes:
            lane.catch_up()
        self.clock.freeze(seconds)
        for lane in self._lanes:
            lane.changed()

    @property
    def num_requests(self) -> int:
        """Requests that hold or wait for KV blocks."""
        return sum(len(lane.sequences) for lane in self._lanes)

    def load(self) -> EngineLoad:
        """Count requests and KV blocks, of all lanes together."""
        replicas = [lane.replica for lane in self._lanes]
        return EngineLoad(
            running=sum(len(replica.running) for replica in replicas),
            waiting=sum(len(replica.waiting) + len(replica.waiting_for_kv) for replica in replicas),
            kv_blocks=sum(replica.used_blocks for replica in replicas),
        )

    def forget_prompt(self, index: int) -> None:
        """Drop the block ids of a request that has ended: thousands of numbers."""
        self._content[index] = ()


def _no_pull(sequence: Sequence, begin_s: float) -> None:
    """Stand in for `Sequence.begin_pull` of a request that is computed here."""
    raise AssertionError(f"request {sequence.index} pulls at {begin_s} s, and nothing serves it")
