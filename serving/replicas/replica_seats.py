"""The replicas that run, and the places at them: who may be called is Ray Serve's word."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from serving.cluster.serve_compat import live_replica_ids, places_of_replica
from serving.replicas.channels import Channels
from serving.request.replica_pool import ReplicaPool

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import ChannelPlace
    from serving.replicas.channels import Call
    from serving.request.replica_pool import RoutedPrompt, Seat

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

    Attributes:
        channels: the connections.
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
        """Take what one of Ray Serve's handles says, and ask new replicas for their places."""
        named = live_replica_ids(handle)
        if named is None or named == self._named.get(pool):
            return
        self._named[pool] = named
        for name in named - self._known.keys() - self._asking.keys():
            self._asking[name] = asyncio.create_task(self._ask(handle, name))
        self._arrange()

    async def _ask(self, handle: Any, name: str) -> None:  # noqa: ANN401
        """Ask a replica for its place until it answers, or is gone."""
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
        """Connect to the replicas that are named and have said where they are."""
        named = frozenset[str]().union(*self._named.values())
        self._known = {name: places for name, places in self._known.items() if name in named}
        self.channels.expect(self._places(named))
        self._changed()

    def _places(self, named: frozenset[str]) -> dict[str, ChannelPlace]:
        """Return where the engines of Serve's replicas are, by names of their own."""
        found = {}
        for name in sorted(named & self._known.keys()):
            places = self._known[name]
            for rank, place in enumerate(places):
                found[name if len(places) == 1 else f"{name}:{rank}"] = place
        return found

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
