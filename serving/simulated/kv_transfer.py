"""KV caches on their way between simulated engines, over the link of the plan."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.kv_pull import pull_times
from minicluster.engine_model.lora_slots import NO_ADAPTER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from minicluster.specs.step import PathCoefficients
    from serving.simulated.engine import EngineTimer, Sequence, SimulatedEngine

    Fetch = Callable[[Mapping[str, Any], float], Awaitable["AgreedPull"]]
    """Asks a prefill engine for a KV cache, to start no sooner than in some engine seconds."""


logger = logging.getLogger(__name__)


class KvLost(Exception):
    """A KV cache is not where it was said to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPull:
    """
    A pull that has been agreed on, in engine seconds from now.

    Attributes:
        held_s: how long it holds the NICs of both engines.
        arrives_s: when the KV cache is there.
    """

    held_s: float
    arrives_s: float


class KvSource:
    """The KV caches that a prefill engine keeps until they are fetched; each rank has a NIC."""

    def __init__(self, engine: SimulatedEngine, path: PathCoefficients) -> None:
        """Start with none, and idle NICs."""
        self._engine = engine
        self._path = path
        self._kept: dict[str, tuple[Sequence, EngineTimer]] = {}
        self._nic_free_s = defaultdict[int, float](float)
        self.fail_next = 0

    def keep(self, sequence: Sequence, lease_s: float) -> str:
        """Keep a computed prompt for *lease_s* engine seconds; return the key to fetch it by."""
        key = secrets.token_hex(8)
        clock = self._engine.clock
        timer = clock.call_at(clock.now_s() + lease_s, lambda: self._drop(key))
        self._kept[key] = (sequence, timer)
        return key

    def fetch(self, key: str, start_in_s: float) -> AgreedPull:
        """
        Agree on a pull, and give back the prompt's blocks at its end.

        Raises:
            KvLost: the key is unknown, was fetched before, or its lease is over.
        """
        if self.fail_next and self._kept.get(key):
            self.fail_next -= 1
            self._drop(key)
        if key not in self._kept:
            raise KvLost(key)
        clock = self._engine.clock
        now_s = clock.now_s()
        sequence, lease = self._kept.pop(key)
        lease.cancel()
        begin_s = max(now_s + start_in_s, self._nic_free_s[sequence.rank])
        free_s, arrives_s = pull_times(self._path, sequence.prompt_tokens, begin_s)
        self._nic_free_s[sequence.rank] = free_s
        clock.call_at(arrives_s, lambda: self._engine.release(sequence))
        return AgreedPull(held_s=free_s - now_s, arrives_s=arrives_s - now_s)

    def _drop(self, key: str) -> None:
        sequence, lease = self._kept.pop(key)
        lease.cancel()
        self._engine.release(sequence)


class KvSink:
    """The pulls of one decode engine: the NIC of each rank carries one at a time, in order."""

    def __init__(self, engine: SimulatedEngine, fetch: Fetch) -> None:
        """Serve the engine's pulls by *fetch*."""
        self._engine = engine
        self._fetch = fetch
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_order = defaultdict[int, asyncio.Lock](asyncio.Lock)
        self._nic_free_s = defaultdict[int, float](float)

    def add(
        self,
        prompt_tokens: int,
        blocks: tuple[int, ...],
        max_tokens: int,
        place: Mapping[str, Any],
        *,
        adapter: int = NO_ADAPTER,
        rank: int = 0,
    ) -> Sequence:
        """Give the engine a request whose KV cache is at *place*; arguments as of its `add`."""
        lengths, pull = (prompt_tokens, blocks, max_tokens), partial(self._begin, place)
        return self._engine.add(*lengths, adapter=adapter, rank=rank, begin_pull=pull)

    def _begin(self, place: Mapping[str, Any], sequence: Sequence, begin_s: float) -> None:
        task = asyncio.create_task(self._pull(place, sequence, begin_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, place: Mapping[str, Any], sequence: Sequence, begin_s: float) -> None:
        clock, rank = self._engine.clock, sequence.rank
        try:
            async with self._in_order[rank]:
                start_in_s = max(begin_s, self._nic_free_s[rank]) - clock.now_s()
                transfer = await self._fetch(place, max(0.0, start_in_s))
                self._nic_free_s[rank] = clock.now_s() + transfer.held_s
            await clock.sleep(transfer.arrives_s)
        except (Exception, asyncio.CancelledError):  # the engine computes it itself, as vLLM's does
            logger.exception("a KV cache was lost on its way; its prompt is computed here")
            self._engine.kv_lost(sequence)
        else:
            self._engine.kv_received(sequence)
