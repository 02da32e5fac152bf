"""The places at the replicas that run: who may be called is `ReplicaWatch`'s word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.replicas.replica_watch import ReplicaWatch
from serving.request.replica_pool import ReplicaPool

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import ChannelPlace
    from serving.replicas.channels import Call
    from serving.replicas.replica_watch import Pool
    from serving.request.replica_pool import RoutedPrompt, Seat


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
