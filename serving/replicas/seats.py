"""The replicas that run, which Ray Serve names, and the places of requests at them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.routing import PrefixIndex, find_policy, loads_in_groups
from serving.cluster.serve_compat import live_replica_ids, places_of_replica
from serving.protocol.messages import PoolRequests
from serving.replicas.channels import Channel, ChannelLostError
from serving.request.cost import BLOCK_TOKENS, prompt_blocks, prompt_tokens

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Collection, Mapping, Sequence

    from minicluster.routing import Rng
    from serving.protocol.messages import ChannelPlace, EndpointConfig, PoolConfig
    from serving.replicas.channels import Call


RECONNECT_S = 0.5
"""Time until a lost connection is tried again, for as long as its process is expected to run."""


class Channels:
    """
    The connections to several processes, by their names, kept up while those are expected to run.

    Attributes:
        connected: those that can be called.
    """

    def __init__(
        self, tls: ssl.SSLContext | None, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Connect with *tls*, or without; *changed* is called whenever `connected` has changed."""
        self.connected: dict[str, Channel] = {}
        self._tls = tls
        self._changed = changed
        self._places: dict[str, ChannelPlace] = {}
        self._open: dict[str, Channel] = {}

    def expect(self, places: Mapping[str, ChannelPlace]) -> None:
        """Connect to the processes at *places*; those of others end with what is under way."""
        former, self._places = self._places, dict(places)
        for name, place in places.items():
            if former.get(name) != place:
                self._connect(name)
        if gone := self.connected.keys() - places.keys():
            for name in gone:
                del self.connected[name]
            self._changed()

    def call(self, name: str, method: str, arguments: dict[str, Any]) -> Call:
        """Call a method of a process; raises ChannelLostError where there is no connection."""
        channel = self._open.get(name)
        if channel is None:
            raise ChannelLostError(f"there is no connection to {name}")
        return channel.call(method, arguments)

    def close(self) -> None:
        """Cut all connections."""
        self._places = {}
        for channel in [*self._open.values()]:
            channel.give_up("this process ends")

    def _connect(self, name: str) -> None:
        place = self._places.get(name)
        if place is None:
            return
        former = self._open.get(name)
        if former is not None and former.place == place:  # calls on it go on
            former.when_ready(lambda: self._ready(name, former))
            return
        channel = Channel(place, self._tls, ended=lambda: self._lost(name, channel))
        self._open[name] = channel
        channel.when_ready(lambda: self._ready(name, channel))
        if former is not None:
            former.give_up("its process has another place")
            if self.connected.pop(name, None) is not None:
                self._changed()

    def _ready(self, name: str, channel: Channel) -> None:
        connected = self.connected.get(name) is channel
        if not connected and self._open.get(name) is channel and name in self._places:
            self.connected[name] = channel
            self._changed()

    def _lost(self, name: str, channel: Channel) -> None:
        if self._open.get(name) is not channel:
            return
        del self._open[name]
        if self.connected.pop(name, None) is not None:
            self._changed()
        if name in self._places:
            channel.loop.call_later(RECONNECT_S, self._connect, name)


class NoReplicaError(Exception):
    """No replica can be called, or all are full and as many requests wait as may."""


class RoutedPrompt(NamedTuple):
    """
    A prompt as policies need it.

    Attributes:
        tokens: their estimated number.
        blocks: ids of its blocks (`PrefixIndex`); empty where the policy does not go by them.
    """

    tokens: float = 1.0
    blocks: tuple[int, ...] = ()


def routed_prompt(policy: str, body: Mapping[str, Any]) -> RoutedPrompt:
    """Return what a policy needs of a request's prompt."""
    prompt = body.get("prompt") or body.get("messages")
    if not prompt:
        return RoutedPrompt()
    # vLLM's prefix cache keeps those of salts and of adapters apart.
    apart = body.get("model"), body.get("cache_salt")
    blocks = prompt_blocks(prompt, apart) if find_policy(policy).by_prefix else ()
    return RoutedPrompt(prompt_tokens(prompt), blocks)


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one request at a replica, until it is given back."""

    replica: str
    number: int


@dataclass(slots=True, eq=False)
class _Replica:
    """What is at one replica: requests, and their load in the policy's unit."""

    group: object
    requests: int = 0
    load: float = 0.0
    answered_s: float = -math.inf


class ReplicaPool:
    """
    Chooses replicas by the policy of the plan, with the functions that the simulator uses.

    Its one owner sends all requests, so that it knows every one that is outstanding. A replica has
    so many at once as the plan says; the others wait here, first come first served.
    """

    def __init__(
        self, config: PoolConfig, rng: Rng | None = None, *, replicas: int | None = None
    ) -> None:
        """Start without replicas, of which *replicas* are planned, by default as in all domains."""
        planned = sum(config.replicas.values()) if replicas is None else replicas
        self._policy = find_policy(config.policy)
        self._index = PrefixIndex(config.cached_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        self._most_requests = config.max_ongoing_requests
        self._most_waiting = config.max_ongoing_requests * planned
        self._replicas: dict[str, _Replica] | None = None
        self._expected: dict[str, _Replica] = {}
        self._seats: dict[int, tuple[_Replica, float]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._rng = rng or random.Random()  # noqa: S311  (load balancing, not a secret)
        self._numbers = itertools.count(1)
        self._turn = 0

    @property
    def live(self) -> int | None:
        """The number of replicas that can be called; `None`: not known yet."""
        return None if self._replicas is None else len(self._replicas)

    def update(self, groups: Mapping[str, object]) -> None:
        """
        Take the replicas that can be called now; the requests of others are no load any more.

        Args:
            groups: by name, what a replica steps together with; `None`: nothing.
        """
        former = self._replicas or {}
        self._replicas = {
            name: former.get(name) or self._expected.pop(name, None) or _Replica(name)
            for name in groups
        }
        for name, group in groups.items():
            self._replicas[name].group = name if group is None else group
        for gone in former.keys() - groups.keys():
            self._index.forget(gone)
        if not groups:
            while self._waiting:
                self._waiting.popleft().fail()
        self._let_in()

    async def seat(self, prompt: RoutedPrompt, tried: Collection[str] = ()) -> Seat:
        """
        Return a place for a request, at none of the replicas *tried* if there are others.

        Raises:
            NoReplicaError: there is no replica, or too many requests wait.
        """
        candidates = self._with_room(tried)
        if candidates:  # none of those that wait may go there: they would have been let in
            return self._seated(candidates, prompt)
        if self.live == 0 or len(self._waiting) >= self._most_waiting:
            raise NoReplicaError
        waiting = _Waiting(prompt, tried)
        self._waiting.append(waiting)
        try:
            return await waiting.seat
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.seat.cancelled() and waiting.seat.exception() is None:
                self.leave(waiting.seat.result())
            raise

    def take(self, replica: str, prompt: RoutedPrompt) -> Seat:
        """Count a request that is at *replica* already, full or not, known or not yet."""
        tokens = self._index.uncached_tokens(replica, *prompt)
        load = tokens if self._policy.counts_tokens else 1.0
        at = (self._replicas or {}).get(replica)
        if at is None:
            at = self._expected.setdefault(replica, _Replica(replica))
        at.requests += 1
        at.load += load
        self._index.note(replica, prompt.blocks)
        seat = Seat(replica, next(self._numbers))
        self._seats[seat.number] = at, load
        return seat

    def leave(self, seat: Seat, *, answered: bool = False) -> None:
        """Take note that a request has left its replica, however it ended, or with an answer."""
        at, load = self._seats.pop(seat.number)
        at.requests -= 1
        if answered:
            at.answered_s = time.monotonic()
        # Rounding errors of the sum would keep an idle replica from ever being idle.
        at.load = at.load - load if at.requests else 0.0
        if not at.requests and self._expected.get(seat.replica) is at:
            del self._expected[seat.replica]
        self._let_in()

    @property
    def requests(self) -> PoolRequests:
        """The requests in this pool now."""
        at_replicas = [replica.requests for replica in (self._replicas or {}).values()]
        return PoolRequests(waiting=len(self._waiting), at_replicas=at_replicas)

    def answered_within(self, replica: str, age_s: float) -> bool:
        """Return whether a replica has answered any request in the last *age_s*."""
        at = (self._replicas or {}).get(replica)
        return at is not None and time.monotonic() - at.answered_s <= age_s

    def _with_room(self, tried: Collection[str]) -> list[str]:
        replicas = self._replicas or {}
        untried = [name for name in replicas if name not in tried] or list(replicas)
        return [name for name in untried if replicas[name].requests < self._most_requests]

    def _let_in(self) -> None:
        kept: deque[_Waiting] = deque()
        while self._waiting and self._with_room(()):
            first = self._waiting.popleft()
            candidates = self._with_room(first.tried)
            if first.seat.done():  # nobody waits for it any more
                continue
            if candidates:
                first.seat.set_result(self._seated(candidates, first.prompt))
            else:
                kept.append(first)  # it waits for another replica
        self._waiting.extendleft(reversed(kept))

    def _seated(self, candidates: list[str], prompt: RoutedPrompt) -> Seat:
        assert self._replicas is not None  # noqa: S101  (for the type checker)
        own_loads = [replica.load for replica in self._replicas.values()]
        more: list[float] | None = None
        if self._policy.by_prefix:
            more = [self._index.uncached_tokens(name, *prompt) for name in self._replicas]
        # Replicas that are no candidates count in their groups.
        groups = [replica.group for replica in self._replicas.values()]
        by_name = dict(zip(self._replicas, loads_in_groups(own_loads, groups, more), strict=True))
        loads = [by_name[name] for name in candidates]
        best = self._policy.choose(loads, self._rng, self._turn)
        self._turn += 1
        return self.take(candidates[best], prompt)


class _Waiting:
    def __init__(self, prompt: RoutedPrompt, tried: Collection[str]) -> None:
        self.prompt, self.tried = prompt, tried
        self.seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()

    def fail(self) -> None:
        """Tell it that there is no replica any more."""
        if not self.seat.done():
            self.seat.set_exception(NoReplicaError())


logger = logging.getLogger(__name__)

Pool = tuple[str, str]
"""Role and domain."""

POLL_S = 0.1
"""Interval at which the handles are asked, which costs some µs; Serve tells them of changes."""

ASK_S = 10.0
"""Longest time for a replica to say where it takes calls."""

ASK_AGAIN_S = 1.0
"""Time until a replica that did not say it is asked again."""


class ReplicaWatch:
    """
    Watches the replicas of some deployments.

    A replica counts while Ray Serve names it and there is a connection to it: one that dies is gone
    at once, and one that drains as soon as Serve knows. Serve's handles know their replicas also
    while its controller restarts. One of Serve's that has several engines, the ranks of a simulated
    group, is as many replicas here.
    """

    def __init__(
        self,
        handles: Mapping[Pool, Any],
        tls: ssl.SSLContext | None,
        changed: Callable[[ReplicaWatch], None],
    ) -> None:
        """Begin to watch; *changed* is called with this whenever replicas came or went."""
        self.channels = Channels(tls, self._changed)
        self._handles = dict(handles)
        self._tell = changed
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, list[ChannelPlace]] = {}
        self._named: dict[Pool, frozenset[str]] = {}
        self._seen: set[Pool] = set()
        self._task = asyncio.create_task(self._run())

    def live(self, pool: Pool) -> dict[str, ChannelPlace] | None:
        """Return the replicas of a pool that can be called; `None`: not known yet."""
        named, connected = self._named.get(pool), self.channels.connected
        if named is None:
            return None
        live = {name: at for name, at in self._places(named).items() if name in connected}
        if live or not named:
            self._seen.add(pool)
        return live if pool in self._seen else None

    def close(self) -> None:
        """Stop watching, and cut the connections, of which nothing is told."""
        self._tell = lambda _watch: None
        self._task.cancel()
        for task in self._asking.values():
            task.cancel()
        self.channels.close()

    async def _run(self) -> None:
        while True:
            for pool, handle in self._handles.items():
                try:
                    self._look(pool, handle)
                except Exception:
                    logger.exception("Ray Serve's handle of %s does not say what runs", pool)
            await asyncio.sleep(POLL_S)

    def _look(self, pool: Pool, handle: Any) -> None:  # noqa: ANN401
        named = live_replica_ids(handle)
        if named is None or named == self._named.get(pool):
            return
        self._named[pool] = named
        for name in named - self._known.keys() - self._asking.keys():
            self._asking[name] = asyncio.create_task(self._ask(handle, name))
        self._arrange()

    async def _ask(self, handle: Any, name: str) -> None:  # noqa: ANN401
        while any(name in named for named in self._named.values()):
            try:
                async with asyncio.timeout(ASK_S):
                    self._known[name] = await places_of_replica(handle, name)
                break
            except Exception as error:  # noqa: BLE001  (it may be ending)
                logger.warning("replica %s does not say where it is: %r", name, error)
                await asyncio.sleep(ASK_AGAIN_S)
        del self._asking[name]
        self._arrange()

    def _arrange(self) -> None:
        named = frozenset[str]().union(*self._named.values())
        self._known = {name: places for name, places in self._known.items() if name in named}
        self.channels.expect(self._places(named))
        self._changed()

    def _places(self, named: frozenset[str]) -> dict[str, ChannelPlace]:
        """Return where the engines of Serve's replicas are, by names of their own."""
        places_by_name = {}
        for name in sorted(named & self._known.keys()):
            places = self._known[name]
            for rank, place in enumerate(places):
                places_by_name[name if len(places) == 1 else f"{name}:{rank}"] = place
        return places_by_name

    def _changed(self) -> None:
        self._tell(self)


class ReplicaSeats:
    """Implements `serving.replicas.backend.Seats` in the one process that gives places."""

    def __init__(
        self,
        config: EndpointConfig,
        handles: Mapping[Pool, Any],
        tls: ssl.SSLContext | None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Watch the replicas behind *handles*, one of Ray Serve for each pool and domain.

        *changed* is called after `places` has changed.
        """
        self._tell = changed
        self._pools = {
            (pool.role, domain): ReplicaPool(pool, replicas=pool.replicas[domain])
            for pool in config.pools
            for domain in pool.replicas
        }
        self._live: dict[Pool, dict[str, ChannelPlace] | None] = dict.fromkeys(self._pools)
        self._watch = ReplicaWatch(handles, tls, self._changed)

    async def seat(self, pool: Pool, prompt: RoutedPrompt, tried: Sequence[str]) -> Seat:
        """See `Seats`."""
        return await self._pools[pool].seat(prompt, tried)

    def leave(self, pool: Pool, seat: Seat, *, answered: bool = False) -> None:
        """See `Seats`."""
        self._pools[pool].leave(seat, answered=answered)

    async def answered_within(self, pool: Pool, replica: str, age_s: float) -> bool:
        """See `Seats`."""
        return self._pools[pool].answered_within(replica, age_s)

    def take(self, pool: Pool, replica: str, prompt: RoutedPrompt) -> Seat:
        """Count a request that is at *replica* already."""
        return self._pools[pool].take(replica, prompt)

    def live(self, pool: Pool) -> Sequence[str] | None:
        """See `Seats`."""
        live = self._live[pool]
        return None if live is None else [*live]

    def requests(self) -> dict[Pool, PoolRequests]:
        """Return the requests in each pool now."""
        return {pool: replicas.requests for pool, replicas in self._pools.items()}

    def places(self) -> list[tuple[Pool, dict[str, ChannelPlace]]]:
        """Return where the replicas of each pool take calls that is known, by their names."""
        return [(pool, live) for pool, live in self._live.items() if live is not None]

    def call(self, replica: str, method: str, arguments: dict[str, Any]) -> Call:
        """See `Seats`."""
        return self._watch.channels.call(replica, method, arguments)

    def close(self) -> None:
        """Stop watching, and cut the connections."""
        self._watch.close()

    def _changed(self, watch: ReplicaWatch) -> None:
        before = dict(self._live)
        for pool, replicas in self._pools.items():
            live = watch.live(pool)
            if live is not None and live != self._live[pool]:
                self._live[pool] = live
                replicas.update({name: place.group for name, place in live.items()})
        if self._live != before:
            self._tell()
