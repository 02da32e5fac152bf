"""The replicas of one pool and domain: which one takes a request, and how many they take."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.routing import PrefixIndex, find_policy, loads_in_groups
from serving.request.length import BLOCK_TOKENS, prompt_blocks, prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from minicluster.routing import Rng
    from serving.protocol.endpoint_config import PoolConfig


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
        """
        Start without replicas.

        Args:
            config: of the pool.
            rng: what the policy draws from.
            replicas: their planned number; `None`: that of all domains.
        """
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

    def answered_within(self, replica: str, age_s: float) -> bool:
        """Return whether a replica has answered any request in the last *age_s*."""
        at = (self._replicas or {}).get(replica)
        return at is not None and time.monotonic() - at.answered_s <= age_s

    def _with_room(self, tried: Collection[str]) -> list[str]:
        replicas = self._replicas or {}
        untried = [name for name in replicas if name not in tried] or list(replicas)
        return [name for name in untried if replicas[name].requests < self._most_requests]

    def _let_in(self) -> None:
        """Give the places that are free to those that wait, in the order in which they came."""
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
        own = [replica.load for replica in self._replicas.values()]
        more: list[float] | None = None
        if self._policy.by_prefix:
            more = [self._index.uncached_tokens(name, *prompt) for name in self._replicas]
        # Replicas that are no candidates count in their groups.
        groups = [replica.group for replica in self._replicas.values()]
        by_name = dict(zip(self._replicas, loads_in_groups(own, groups, more), strict=True))
        loads = [by_name[name] for name in candidates]
        best = self._policy.choose(loads, self._rng, self._turn)
        self._turn += 1
        return self.take(candidates[best], prompt)


class _Waiting:
    """A request that waits until a replica takes it."""

    def __init__(self, prompt: RoutedPrompt, tried: Collection[str]) -> None:
        self.prompt, self.tried = prompt, tried
        self.seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()

    def fail(self) -> None:
        """Tell it that there is no replica any more."""
        if not self.seat.done():
            self.seat.set_exception(NoReplicaError())
