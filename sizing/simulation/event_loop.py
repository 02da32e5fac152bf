"""The event loop: requests through ingress, prefill, KV pull and decode, as deployed."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.engine_model.interference import DecodeWithInterference, PrefillWithInterference
from minicluster.engine_model.kv_offload import MOST_BLOCKS, HostCache
from minicluster.engine_model.lockstep import Rank, keep_in_step, step_together
from minicluster.engine_model.lora_slots import LoraSlots
from minicluster.engine_model.prefix_cache import ContentCache, ConversationCache
from minicluster.engine_model.replica import Replica
from minicluster.engine_model.request_table import RequestTable
from minicluster.errors import NegativeAnswer
from minicluster.routing import Balancer, PrefixIndex
from minicluster.workload.arrivals import CONTENT_TOKENS
from sizing.simulation.nics import NicQueues

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from minicluster.engine_model.prefix_cache import PrefixCache
    from minicluster.workload.arrivals import Arrivals
    from sizing.simulation.system import Decoding, SimulatedPool, System

ARRIVAL, PULL, PULLED, LOADED, STRETCH = range(5)
"""Kinds of events, in the order in which those of one moment happen."""

SAMPLES = 400
"""Samples of queues and caches over a run."""

SAMPLED_REPLICAS = 400_000
"""Replicas in all samples of a run together: larger pools are sampled less often."""

EVENTS_PER_REQUEST = 200
"""Most events of a run per request, beside one for each step of its prompts; 6 are usual."""


class EventLoop:
    """
    One run of a system under given requests (docs/model.md, eq. Q5).

    Attributes:
        requests: the requests and their times so far, those that decode at the begin last.
        due_s: arrival of each; of chained requests, known when their predecessor is finished.
        decode_of, prefill_of: replicas of each; -1: no prefill replica.
        prefilled_s, pull_s, pulled_s: end of the prompt's computation, begin and end of the pull.
        offloaded: prompt tokens of each that came from host memory, and from disk.
        adapter_loads: copies of adapters to slots that each caused.
        samples: time, and per pool waiting and running requests and KV blocks in use.
    """

    def __init__(
        self,
        system: System,
        arrivals: Arrivals,
        *,
        seed: int,
        decoding: Decoding | None = None,
        gaps: bool = True,
    ) -> None:
        """Build the replicas, and queue the requests that wait for no other."""
        self._system, self._keeps_gaps = system, gaps
        prompts, outputs = arrivals.input_tokens.tolist(), arrivals.output_tokens.tolist()
        prefixes = [0] * len(arrivals)
        if arrivals.prefix_tokens is not None:
            prefixes = arrivals.prefix_tokens.tolist()
        if decoding is not None:
            prompts += decoding.context_tokens.tolist()
            outputs += decoding.remaining_tokens.tolist()
            prefixes += [0] * len(decoding.context_tokens)
        self.requests = RequestTable(prompts, outputs, prefixes)
        self.num_arrivals, count = len(arrivals), len(prompts)
        self._session = None if arrivals.session is None else arrivals.session.tolist()
        self._content = arrivals.content
        self._adapter: list[int] | None = None
        if arrivals.adapter is not None:  # sequences that decode at the begin have adapters, too
            self._adapter = np.resize(arrivals.adapter, count).tolist()
        self.due_s: list[float] = arrivals.due_s.tolist() + [0.0] * (count - len(arrivals))
        self.decode_of, self.prefill_of = [-1] * count, [-1] * count
        self.prefilled_s, self.pull_s, self.pulled_s = [inf] * count, [inf] * count, [inf] * count
        self.offloaded = ([0] * count, [0] * count)
        self.adapter_loads = [0] * count
        self.samples: list[tuple[float, list[tuple[int, int, int]]]] = []
        self._rng = random.Random(seed)  # noqa: S311  (a simulation, not a secret)
        self._heap: list[tuple[float, int, int, Any]] = []
        self._serial = 0
        self._link_conversations(arrivals)
        self._build()
        if decoding is not None:
            self._resume()
        longest = min(p.limits.max_num_batched_tokens for p in self._pools) or 1
        self._events_left = EVENTS_PER_REQUEST * (count + 10) + sum(
            tokens // longest for tokens in self.requests.num_prompt_tokens
        )

    def _link_conversations(self, arrivals: Arrivals) -> None:
        self._next: dict[int, tuple[int, float]] = {}
        self._unchained = list(range(len(arrivals)))
        if arrivals.previous is None:
            return
        previous = arrivals.previous.tolist()
        think = [0.0] * len(previous) if arrivals.think_s is None else arrivals.think_s.tolist()
        self._next = {
            before: (each, think[each]) for each, before in enumerate(previous) if before >= 0
        }
        self._unchained = [each for each, before in enumerate(previous) if before < 0]

    def _build(self) -> None:
        system = self._system
        self._pools = [system.decode] if system.prefill is None else [system.decode, system.prefill]
        self.decode = self._replicas(system.decode, prefill_only=False)
        self.prefill = (
            [] if system.prefill is None else self._replicas(system.prefill, prefill_only=True)
        )
        self._connect_interference()
        self._nics = NicQueues(system)
        self._to_decode = self._balancer(system.decode, system.decode_policy)
        self._to_prefill = self._to_decode
        if system.prefill is not None:
            self._to_prefill = self._balancer(system.prefill, system.prefill_policy)
        self._more_coming = False
        self._held: dict[Replica, None] = {}

    def _balancer(self, pool: SimulatedPool, policy: str) -> Balancer:
        index = PrefixIndex(pool.limits.max_tokens // CONTENT_TOKENS, CONTENT_TOKENS)
        return Balancer(policy, pool.replicas, self._rng, group=pool.group, index=index)

    def _connect_interference(self) -> None:
        """Show the steps of pools on the same cores the replicas of the other pool."""
        system, self._num_computing, self._interferes = self._system, 0, False
        if system.prefill is None:
            return
        if isinstance(system.prefill.step, PrefillWithInterference):
            system.prefill.step.decode = self.decode
        if isinstance(system.decode.step, DecodeWithInterference):
            system.decode.step.prefill = self.prefill
            self._interferes = True

    def _replicas(self, pool: SimulatedPool, *, prefill_only: bool) -> list[Replica]:
        kind = Replica if pool.group == 1 else Rank
        found = [
            kind(
                self.requests,
                pool.step,
                pool.limits,
                prefill_only=prefill_only,
                prefix_cache=self._prefix_cache(pool),
            )
            for _ in range(pool.replicas)
        ]
        for replica in found:
            replica.keeps_gaps = self._keeps_gaps
        if pool.offload is not None and pool.prefix_cache:
            for replica in found:
                replica.offload = self._offload(pool)
        if pool.lora is not None and self._adapter is not None:
            for replica in found:
                replica.lora = LoraSlots(self._adapter, pool.lora, self.adapter_loads)
        ranks = [replica for replica in found if isinstance(replica, Rank)]
        for at, rank in enumerate(ranks):
            first = at - at % pool.group
            rank.ranks = tuple(ranks[first : first + pool.group])
        return found

    def _prefix_cache(self, pool: SimulatedPool) -> PrefixCache | None:
        """Return an empty cache of what requests may find; `None` where there is nothing to."""
        size = pool.limits.block_size
        if not pool.prefix_cache:
            return None
        if self._content is not None:
            return ContentCache(self._content, size)
        return None if self._session is None else ConversationCache(self._session, size)

    def _offload(self, pool: SimulatedPool) -> HostCache | None:
        """Return empty tiers of what requests may find; `None` where there is nothing to."""
        known = self._content is not None
        if pool.offload is None or not (known or self._session is not None):
            return None
        return HostCache(
            pool.offload,
            content=self._content,
            session=self._session,
            tokens_each=CONTENT_TOKENS if known else pool.limits.block_size,
            found=self.offloaded,
        )

    def _resume(self) -> None:
        """Give the sequences that decode when the run begins to the decode replicas in turn."""
        for request in range(self.num_arrivals, len(self.requests)):
            at = request % len(self.decode)
            if self.decode[at].resume(request):
                self.decode_of[request] = at
                self._to_decode.add(request, at, self.requests.num_prompt_tokens[request])
        self._start(self.decode, 0.0)

    def run(self, progress: Callable[[int], None] | None = None, *, samples: int = SAMPLES) -> None:
        """
        Run until every request is finished.

        Args:
            progress: called at each sample with the number of requests that have arrived.
            samples: most samples of queues and caches; every one visits every replica.

        Raises:
            NegativeAnswer: the run takes more events than `EVENTS_PER_REQUEST` allows.
        """
        heap, request_s = self._heap, self._system.path.request_s
        arriving = iter(self._unchained)
        coming = next(arriving, -1)
        coming_s = self.due_s[coming] + request_s if coming >= 0 else inf
        take = (self._arrive, self._pull, self._pulled, self._loaded)
        replicas = len(self.decode) + len(self.prefill)
        every = max(1, self.num_arrivals // max(1, min(samples, SAMPLED_REPLICAS // replicas)))
        for _ in range(self._events_left):
            if heap and heap[0][0] < coming_s:
                time_s, kind, _, what = heappop(heap)
                if kind != STRETCH:
                    take[kind](what, time_s)
                elif what.end_s == time_s and what.active:  # else it is another end by now
                    self._end_stretch(what, time_s)
            elif coming >= 0:
                if coming % every == 0:
                    self._sample(coming_s)
                    if progress is not None:
                        progress(coming)
                request, now_s = coming, coming_s
                coming = next(arriving, -1)
                coming_s = self.due_s[coming] + request_s if coming >= 0 else inf
                self._more_coming = coming_s == now_s
                self._route(request, now_s)
            else:
                return
        raise NegativeAnswer(
            f"the simulation did not end after {self._events_left:,} events: requests preempt one"
            " another again and again; give the decode pool more KV cache or fewer sequences"
        )

    def _arrive(self, request: int, now_s: float) -> None:
        heap = self._heap
        self._more_coming = bool(heap) and heap[0][:2] == (now_s, ARRIVAL)
        self._route(request, now_s)

    def _route(self, request: int, now_s: float) -> None:
        tokens = self.requests.num_prompt_tokens[request]
        if not self.prefill or tokens <= self._system.local_threshold_tokens:
            at = self._to_decode.choose(request, tokens, self._blocks(request))
            self.decode_of[request] = at
            replica = self.decode[at]
        else:
            at = self._to_prefill.choose(request, tokens, self._blocks(request))
            self.prefill_of[request] = at
            replica = self.prefill[at]
        if not (self._more_coming or self._held) or replica.active:
            replica.add(request, now_s)
            self._queue_end(replica)
        else:
            replica.waiting.append(request)
            self._held[replica] = None
        if self._held and not self._more_coming:
            self._start_held(now_s)

    def _blocks(self, request: int) -> Sequence[int]:
        """Return what a router knows a prompt's blocks by: their contents, or its conversation."""
        if self._content is not None:
            return self._content[request]
        if self._session is None or self._session[request] < 0:
            return ()
        first = self._session[request] * MOST_BLOCKS
        whole = self.requests.num_prompt_tokens[request] // CONTENT_TOKENS
        return range(first, first + min(whole, MOST_BLOCKS))

    def _start_held(self, now_s: float) -> None:
        """Start idle replicas once all requests of this moment are there: they share a step."""
        self._start(self._held, now_s)
        self._held.clear()

    def _start(self, idle: Collection[Replica], now_s: float) -> None:
        for replica in idle:
            replica.start_stretch(now_s)
        for replica in idle:
            if isinstance(replica, Rank):
                step_together(replica.ranks)
            self._queue_changes(replica)

    def _queue_end(self, replica: Replica) -> None:
        if isinstance(replica, Rank) and replica.end_s != replica.ranks[0].queued_s:
            keep_in_step(replica)
        self._queue_changes(replica)

    def _queue_changes(self, replica: Replica) -> None:
        # The first rank stands for its group.
        ending = replica.ranks[0] if isinstance(replica, Rank) else replica
        if ending.active and ending.end_s != ending.queued_s:
            self._serial += 1
            ending.queued_s = ending.end_s
            heappush(self._heap, (ending.end_s, STRETCH, self._serial, ending))
        if replica.started_pulls:
            self._begin_pulls(replica)
        if replica.started_loads:
            self._begin_loads(replica)
        if self._interferes and replica.prefill_only:
            self._refresh_decode(replica.start_s)

    def _refresh_decode(self, now_s: float) -> None:
        """Recompute the decode steps if a prefill replica has begun or ceased to compute."""
        computing = sum(replica.active for replica in self.prefill)
        if computing != self._num_computing:
            self._num_computing = computing
            for replica in self.decode:
                replica.reschedule(now_s)
                self._queue_end(replica)

    def _begin_pulls(self, replica: Replica) -> None:
        handover_s = replica.handover_s
        for request, time_s in replica.started_pulls:
            self._serial += 1
            heappush(self._heap, (time_s + handover_s, PULL, self._serial, request))
        replica.started_pulls.clear()

    def _begin_loads(self, replica: Replica) -> None:
        for request, end_s in replica.started_loads:
            self._serial += 1
            heappush(self._heap, (end_s, LOADED, self._serial, request))
        replica.started_loads.clear()

    def _loaded(self, request: int, now_s: float) -> None:
        """End a load of offloaded blocks: the rest of the prompt may be computed."""
        at = self.prefill_of[request]
        replica = self.decode[self.decode_of[request]] if at < 0 else self.prefill[at]
        replica.kv_loaded(request, now_s)
        self._queue_end(replica)

    def _end_stretch(self, replica: Replica, now_s: float) -> None:
        if isinstance(replica, Rank):
            self._end_group(replica.ranks, now_s)
            return
        done = replica.end_stretch()
        replica.start_stretch(now_s)
        self._queue_end(replica)
        if done:
            self._pass_on(replica, done, now_s)

    def _end_group(self, ranks: tuple[Rank, ...], now_s: float) -> None:
        done = [rank.end_stretch() for rank in ranks]
        for rank in ranks:
            rank.start_stretch(now_s)
        step_together(ranks)
        self._queue_changes(ranks[0])
        for at, rank in enumerate(ranks):
            if rank.started_pulls:
                self._begin_pulls(rank)
            if rank.started_loads:
                self._begin_loads(rank)
            if done[at]:
                self._pass_on(rank, done[at], now_s)

    def _pass_on(self, replica: Replica, done: list[int], now_s: float) -> None:
        """Send computed prompts to decode replicas; take finished requests off the load."""
        for request in done:
            if replica.prefill_only:
                self._prefilled(request, now_s)
            else:
                self._finished(request, now_s)

    def _prefilled(self, request: int, now_s: float) -> None:
        self.prefilled_s[request] = now_s
        tokens = self.requests.num_prompt_tokens[request]
        self._to_prefill.remove(request)
        self.decode_of[request] = chosen = self._to_decode.choose(request, tokens)
        replica = self.decode[chosen]
        replica.add_remote_prefill(request, now_s)
        if self._interferes:
            replica.delay(now_s)
        self._queue_end(replica)

    def _pull(self, request: int, now_s: float) -> None:
        self.pull_s[request] = now_s
        end_s = self._nics.pull(
            self.prefill_of[request],
            self.decode_of[request],
            self.requests.num_prompt_tokens[request],
            now_s,
        )
        self._serial += 1
        heappush(self._heap, (end_s, PULLED, self._serial, request))

    def _pulled(self, request: int, now_s: float) -> None:
        """End a pull: the request may decode, and the prefill replica gets its blocks back."""
        self.pulled_s[request] = now_s
        replica = self.decode[self.decode_of[request]]
        replica.kv_received(request, now_s)
        self._queue_end(replica)
        source = self.prefill[self.prefill_of[request]]
        source.release(request, now_s)
        self._queue_end(source)

    def _finished(self, request: int, now_s: float) -> None:
        """Take the request off its replica's load; queue the next one of its conversation."""
        self._to_decode.remove(request)
        if request in self._next:
            follower, think_s = self._next[request]
            self.due_s[follower] = now_s + think_s
            self._serial += 1
            due_s = now_s + think_s + self._system.path.request_s
            heappush(self._heap, (due_s, ARRIVAL, self._serial, follower))

    def _sample(self, now_s: float) -> None:
        self.samples.append(
            (
                now_s,
                [
                    (
                        sum(len(replica.waiting) for replica in pool),
                        sum(len(replica.running) for replica in pool),
                        sum(replica.used_blocks for replica in pool),
                    )
                    for pool in (self.decode, self.prefill)
                ],
            )
        )
