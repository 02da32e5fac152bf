"""The event loop: requests through ingress, prefill, pull and decode, in the deployed order."""

from __future__ import annotations

import random
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.conversation_cache import ConversationCache
from minicluster.engine_model.core_sharing import SharedDecode, SharedPrefill
from minicluster.engine_model.prefix_blocks import ContentCache
from minicluster.engine_model.replica import Replica
from minicluster.engine_model.request_table import Ledger
from minicluster.errors import NegativeAnswer
from minicluster.routing import chooser, counts_tokens
from sizing.simulation.links import TransferLinks

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.engine_model.prefix_cache import PrefixCache
    from minicluster.workload.arrivals import Arrivals
    from sizing.simulation.system import SimulatedPool, System

ARRIVAL, PULL, PULLED, STRETCH = range(4)
"""Kinds of events, in the order in which those of one moment happen."""

SAMPLES = 400
"""Looks at queues and caches over a run."""

LOOKED_AT = 400_000
"""Replicas that all of them look at together: pools of a thousand and more are seen less often."""

EVENTS_PER_REQUEST = 200
"""A run that takes more of them than this, and one for each step of its prompts, is broken off."""


class TandemSimulation:
    """
    One run of a system under given requests (docs/model.md, eq. Q5).

    Attributes:
        ledger: what became of each request.
        due_s: when it arrived; of chained requests, known when their predecessor is done.
        decode_of, prefill_of: its replicas; -1: no prefill replica.
        prefilled_s, pull_s, pulled_s: when its prompt was ready, its pull began and ended.
        samples: looks at the pools: time and per pool waiting, running, KV blocks in use.
    """

    def __init__(self, system: System, arrivals: Arrivals, *, seed: int) -> None:
        """Build the replicas, and queue the requests that wait for no other."""
        count = len(arrivals)
        self._system = system
        self.ledger = Ledger(
            arrivals.input_tokens.tolist(),
            arrivals.output_tokens.tolist(),
            None if arrivals.prefix_tokens is None else arrivals.prefix_tokens.tolist(),
        )
        self._session = None if arrivals.session is None else arrivals.session.tolist()
        self._content = arrivals.content
        self.due_s: list[float] = arrivals.due_s.tolist()
        self.decode_of, self.prefill_of = [-1] * count, [-1] * count
        self.prefilled_s, self.pull_s, self.pulled_s = [inf] * count, [inf] * count, [inf] * count
        self.samples: list[tuple[float, list[tuple[int, int, int]]]] = []
        self._rng = random.Random(seed)  # noqa: S311  (a simulation, not a secret)
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._serial = self._turn = 0
        self._chain(arrivals)
        self._build()
        longest = min(p.limits.max_num_batched_tokens for p in self._pools) or 1
        self._events_left = EVENTS_PER_REQUEST * (count + 10) + sum(
            tokens // longest for tokens in self.ledger.prompt
        )

    def _chain(self, arrivals: Arrivals) -> None:
        """Note which request follows which."""
        self._next: dict[int, tuple[int, float]] = {}
        self._open = list(range(len(arrivals)))
        if arrivals.previous is None:
            return
        previous = arrivals.previous.tolist()
        think = [0.0] * len(previous) if arrivals.think_s is None else arrivals.think_s.tolist()
        self._next = {
            before: (each, think[each]) for each, before in enumerate(previous) if before >= 0
        }
        self._open = [each for each, before in enumerate(previous) if before < 0]

    def _build(self) -> None:
        """Start every replica idle."""
        system = self._system
        self._pools = [system.decode] if system.prefill is None else [system.decode, system.prefill]
        self.decode = self._replicas(system.decode, prefill_only=False)
        self.prefill = (
            [] if system.prefill is None else self._replicas(system.prefill, prefill_only=True)
        )
        self._share()
        self._links = TransferLinks(system.path, prefill=len(self.prefill), decode=len(self.decode))
        self._choose_decode = chooser(system.decode_policy)
        self._choose_prefill = chooser(system.prefill_policy)
        self._decode_by_tokens = counts_tokens(system.decode_policy)
        self._prefill_by_tokens = counts_tokens(system.prefill_policy)
        self._decode_loads = [0] * len(self.decode)
        self._prefill_loads = [0] * len(self.prefill)
        self._held = [0] * len(self.decode)
        self._ingress: deque[int] = deque()
        self._index = {replica: at for at, replica in enumerate(self.decode)}
        self._index.update({replica: at for at, replica in enumerate(self.prefill)})

    def _share(self) -> None:
        """Let pools on the same cores see what the other one does."""
        system, self._computing, self._shared = self._system, 0, False
        if system.prefill is None:
            return
        if isinstance(system.prefill.step, SharedPrefill):
            system.prefill.step.decode = self.decode
        if isinstance(system.decode.step, SharedDecode):
            system.decode.step.prefill = self.prefill
            self._shared = True

    def _replicas(self, pool: SimulatedPool, *, prefill_only: bool) -> list[Replica]:
        """Return a pool's replicas."""
        return [
            Replica(
                self.ledger,
                pool.step,
                pool.limits,
                prefill_only=prefill_only,
                prefix_cache=self._prefix_cache(pool),
            )
            for _ in range(pool.replicas)
        ]

    def _prefix_cache(self, pool: SimulatedPool) -> PrefixCache | None:
        """Return an empty cache of what requests may find; `None` where there is nothing to."""
        size = pool.limits.block_size
        if not pool.prefix_cache:
            return None
        if self._content is not None:
            return ContentCache(self._content, size)
        return None if self._session is None else ConversationCache(self._session, size)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """
        Let every request pass.

        Args:
            progress: called now and then with the number of requests that have arrived.

        Raises:
            NegativeAnswer: the run takes more events than its bound.
        """
        heap, request_s = self._heap, self._system.path.request_s
        arriving = iter(self._open)
        coming = next(arriving, -1)
        coming_s = self.due_s[coming] + request_s if coming >= 0 else inf
        take = (self._land, self._pull, self._pulled)
        replicas = len(self.decode) + len(self.prefill)
        every = max(1, len(self.ledger) // max(1, min(SAMPLES, LOOKED_AT // replicas)))
        for _ in range(self._events_left):
            if heap and heap[0][0] < coming_s:
                time_s, kind, _, what, epoch = heappop(heap)
                if kind != STRETCH:
                    take[kind](what, time_s)
                elif what.epoch == epoch:
                    self._end_stretch(what, time_s)
            elif coming >= 0:
                if coming % every == 0:
                    self._look(coming_s)
                    if progress is not None:
                        progress(coming)
                self._land(coming, coming_s)
                coming = next(arriving, -1)
                coming_s = self.due_s[coming] + request_s if coming >= 0 else inf
            else:
                return
        raise NegativeAnswer(
            f"no end after {self._events_left:,} events: requests preempt one another all the"
            " time; give the decode pool more KV cache or fewer sequences"
        )

    def _land(self, request: int, now_s: float) -> None:
        """Choose a decode replica with a free slot, or wait at the ingress for one."""
        chosen = self._choose_decode(self._decode_loads, self._rng, self._turn)
        limit = self._system.decode.max_ongoing_requests
        if limit is not None and self._held[chosen] >= limit:
            chosen = min(range(len(self._held)), key=self._held.__getitem__)
            if self._held[chosen] >= limit:
                self._ingress.append(request)
                return
        self._send(request, chosen, now_s)

    def _send(self, request: int, chosen: int, now_s: float) -> None:
        """Hold a slot of the decode replica, and compute the prompt there or in the other pool."""
        self.decode_of[request] = chosen
        tokens = self.ledger.prompt[request]
        self._held[chosen] += 1
        self._decode_loads[chosen] += tokens if self._decode_by_tokens else 1
        turn = self._turn
        self._turn += 1
        if not self.prefill or tokens <= self._system.local_threshold_tokens:
            replica = self.decode[chosen]
        else:
            at = self._choose_prefill(self._prefill_loads, self._rng, turn)
            self.prefill_of[request] = at
            self._prefill_loads[at] += tokens if self._prefill_by_tokens else 1
            replica = self.prefill[at]
            self._hold(self.decode[chosen], now_s)
        epoch = replica.epoch
        replica.add(request, now_s)
        self._expect(replica, epoch)

    def _hold(self, replica: Replica, now_s: float) -> None:
        """Let those that decode wait for the cores to receive a request."""
        epoch = replica.epoch
        replica.hold(now_s)
        self._expect(replica, epoch)

    def _expect(self, replica: Replica, epoch: int) -> None:
        """Queue the end of a replica's stretch if it is not the one of *epoch*."""
        if replica.epoch != epoch and replica.active:
            self._serial += 1
            heappush(self._heap, (replica.end_s, STRETCH, self._serial, replica, replica.epoch))
        if replica.started:
            self._begin_pulls(replica)
        if self._shared and replica.keeps:
            self._refresh_decode(replica.start_s)

    def _refresh_decode(self, now_s: float) -> None:
        """Have decode step at another pace if prefill has begun or ceased to compute."""
        computing = sum(replica.active for replica in self.prefill)
        if computing != self._computing:
            self._computing = computing
            for replica in self.decode:
                epoch = replica.epoch
                replica.refresh(now_s)
                self._expect(replica, epoch)

    def _begin_pulls(self, replica: Replica) -> None:
        """Queue the pulls that a decode replica has begun."""
        handover_s = replica.handover_s
        for request, time_s in replica.started:
            self._serial += 1
            heappush(self._heap, (time_s + handover_s, PULL, self._serial, request, 0))
        replica.started.clear()

    def _end_stretch(self, replica: Replica, now_s: float) -> None:
        """Hand on what is done, and let the replica go on."""
        epoch = replica.epoch
        done = replica.complete()
        replica.schedule(now_s)
        self._expect(replica, epoch)
        if done:
            at = self._index[replica]
            if replica.keeps:
                for request in done:
                    self._prefilled(request, at, now_s)
            else:
                for request in done:
                    self._finished(request, at, now_s)

    def _prefilled(self, request: int, at: int, now_s: float) -> None:
        """Offer a computed prompt to its decode replica."""
        self.prefilled_s[request] = now_s
        self._prefill_loads[at] -= self.ledger.prompt[request] if self._prefill_by_tokens else 1
        replica = self.decode[self.decode_of[request]]
        epoch = replica.epoch
        replica.offer(request, now_s)
        replica.hold(now_s)
        self._expect(replica, epoch)

    def _pull(self, request: int, now_s: float) -> None:
        """Begin a pull; it ends when the links say."""
        self.pull_s[request] = now_s
        end_s = self._links.pull(
            self.prefill_of[request],
            self.decode_of[request],
            self.ledger.prompt[request],
            now_s,
        )
        self._serial += 1
        heappush(self._heap, (end_s, PULLED, self._serial, request, 0))

    def _pulled(self, request: int, now_s: float) -> None:
        """Let a request decode whose KV cache is there; free the prefill replica's blocks."""
        self.pulled_s[request] = now_s
        replica = self.decode[self.decode_of[request]]
        epoch = replica.epoch
        replica.pulled(request, now_s)
        self._expect(replica, epoch)
        source = self.prefill[self.prefill_of[request]]
        epoch = source.epoch
        source.release(request, now_s)
        self._expect(source, epoch)

    def _finished(self, request: int, at: int, now_s: float) -> None:
        """Free the slot; let the next of a chain arrive, and one that waits at the ingress in."""
        self._held[at] -= 1
        self._decode_loads[at] -= self.ledger.prompt[request] if self._decode_by_tokens else 1
        if request in self._next:
            follower, think_s = self._next[request]
            self.due_s[follower] = now_s + think_s
            self._serial += 1
            due_s = now_s + think_s + self._system.path.request_s
            heappush(self._heap, (due_s, ARRIVAL, self._serial, follower, 0))
        if self._ingress:
            self._send(self._ingress.popleft(), at, now_s)

    def _look(self, now_s: float) -> None:
        """Note queues and caches."""
        self.samples.append(
            (
                now_s,
                [
                    (
                        sum(len(replica.waiting) for replica in pool)
                        + (at == 0) * len(self._ingress),
                        sum(len(replica.running) for replica in pool),
                        sum(replica.used for replica in pool),
                    )
                    for at, pool in enumerate((self.decode, self.prefill))
                ],
            )
        )
