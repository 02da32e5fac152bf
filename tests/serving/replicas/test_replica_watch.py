"""Which replicas can be called: those that Ray Serve's handles name and that are connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from serving.protocol.messages import ChannelPlace
from serving.replicas.channels import CallListener, ChannelLostError, whole
from serving.replicas.seats import (
    ASK_AGAIN_S,
    ASK_S,
    NoReplicaError,
    ReplicaSeats,
    ReplicaWatch,
    RoutedPrompt,
)
from tests.serving.configs import unplanned
from tests.serving.virtual_time import in_virtual_time, ticking

PREFILL, DECODE = ("prefill", "d0"), ("decode", "d0")
ONE = RoutedPrompt()


@dataclass
class Handle:
    """
    A handle of Ray Serve, and the replicas behind it.

    Attributes:
        named: those that it names; `None`: it does not know them yet; an error: it fails.
        silent: those that do not say where they are.
        failing: how often those are asked in vain which do say so.
        asked: the names of those that were asked.
    """

    named: str | Exception | None = None
    silent: str = ""
    failing: int = 0
    asked: list[str] = field(default_factory=list)
    replicas: dict[str, CallListener] = field(default_factory=dict)
    ranks: dict[str, str] = field(default_factory=dict)

    async def start(self, names: str) -> None:
        """Start replicas, and name them."""

        async def give(value: object) -> object:
            await asyncio.sleep(5.0)
            return value

        for name in names:
            self.replicas[name] = CallListener({"give": whole(give)}, group="g")
            await self.replicas[name].listen("127.0.0.1", None)
        self.named = (self.named if isinstance(self.named, str) else "") + names

    def ids(self) -> frozenset[str] | None:
        if isinstance(self.named, Exception):
            raise self.named
        return None if self.named is None else frozenset(self.named)

    async def places_of(self, name: str) -> list[ChannelPlace]:
        self.asked.append(name)
        if name in self.silent:
            await asyncio.sleep(3600.0)
        if self.failing:
            self.failing -= 1
            raise ConnectionError(name)
        return [self.replicas[each].place for each in (name, *self.ranks.get(name, ""))]


@pytest.fixture(autouse=True)
def handles_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "serving.replicas.seats."
    monkeypatch.setattr(f"{module}live_replica_ids", Handle.ids)
    monkeypatch.setattr(f"{module}places_of_replica", Handle.places_of)


class Watched:
    """A watch of two pools, and what it has said of prefill at each change."""

    def __init__(self) -> None:
        self.prefill, self.decode = Handle(), Handle()
        self.said: list[str] = []
        self.watch = ReplicaWatch({PREFILL: self.prefill, DECODE: self.decode}, None, self._changed)

    def _changed(self, watch: ReplicaWatch) -> None:
        live = "".join(watch.live(PREFILL) or "-")
        if [live] != self.said[-1:]:
            self.said.append(live)

    async def live(self) -> str | None:
        """Return the prefill replicas that can be called, soon; `None`: not known."""
        await asyncio.sleep(1.0)
        found = self.watch.live(PREFILL)
        return None if found is None else "".join(found)


@asynccontextmanager
async def watching() -> AsyncIterator[Watched]:
    async with ticking():
        watched = Watched()
        try:
            yield watched
        finally:
            watched.watch.close()
            for handle in (watched.prefill, watched.decode):
                for listener in handle.replicas.values():
                    listener.close()


@in_virtual_time
async def test_ranks_of_one_process_are_replicas_of_their_own() -> None:
    """They are called at places of their own, and gone together."""
    async with watching() as watched:
        handle = watched.prefill
        handle.ranks = {"a": "c"}
        await handle.start("abc")
        handle.named = "ab"
        await watched.live()
        found, places = watched.watch.live(PREFILL), handle.replicas
        assert found == {"a:0": places["a"].place, "a:1": places["c"].place, "b": places["b"].place}
        handle.named = "b"
        assert await watched.live() == "b"


@in_virtual_time
async def test_replicas_come_and_go_as_they_are_named() -> None:
    """Nothing is known until the handle knows; later, what it said last stays true."""
    async with watching() as watched:
        assert await watched.live() is None
        watched.prefill.named = ""
        assert await watched.live() == ""
        await watched.prefill.start("ba")
        assert await watched.live() == "ab"
        live = watched.watch.live(PREFILL)
        assert live == {name: watched.prefill.replicas[name].place for name in "ab"}
        watched.prefill.named = None  # Serve's controller restarts
        assert await watched.live() == "ab"
        watched.prefill.named = "b"
        assert await watched.live() == "b"
        former = watched.prefill.replicas["a"]
        await watched.prefill.start("a")  # elsewhere
        assert await watched.live() == "ab"
        assert (watched.watch.live(PREFILL) or {})["a"] == watched.prefill.replicas["a"].place
        assert watched.prefill.asked.count("a") == 2
        former.close()
        assert watched.said[-3:] == ["ab", "b", "ab"]
        assert watched.watch.live(DECODE) is None


@in_virtual_time
async def test_a_replica_that_dies_is_gone_at_once() -> None:
    """However long it is still named; the last one leaves a pool that is known to have none."""
    async with watching() as watched:
        await watched.prefill.start("ab")
        assert await watched.live() == "ab"
        for name, left in (("a", "b"), ("b", "")):
            watched.prefill.replicas[name].close()
            await asyncio.sleep(0.1)
            assert "".join(watched.watch.live(PREFILL) or "") == left
        assert await watched.live() == ""


@in_virtual_time
async def test_a_replica_that_leaves_ends_the_calls_that_it_has() -> None:
    async with watching() as watched:
        await watched.prefill.start("a")
        assert await watched.live() == "a"
        call = watched.watch.channels.call("a", "give", {"value": 7})
        watched.prefill.named = ""
        assert await watched.live() == ""
        assert await call.result == 7


@in_virtual_time
async def test_a_replica_is_asked_until_it_says_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool none of whose replicas could be called yet is not known; one silent holds up none."""
    async with watching() as watched:
        watched.prefill.silent, watched.prefill.failing = "ab", 3
        await watched.prefill.start("ab")
        assert await watched.live() is None
        await watched.prefill.start("c")
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(3 * ASK_AGAIN_S)
            assert await watched.live() == "c"
        assert caplog.text.count("replica c does not say where it is") == 3
        watched.prefill.silent = "a"
        await asyncio.sleep(ASK_S)
        assert await watched.live() == "bc"
        assert [watched.prefill.asked.count(name) for name in "abc"] == [2, 2, 4]
        watched.prefill.named = "bc"  # nobody waits for the place of what is gone
        watched.prefill.silent = ""
        await asyncio.sleep(2 * ASK_S)
        assert (await watched.live(), watched.prefill.asked.count("a")) == ("bc", 2)
        watched.prefill.named = "abc"
        assert await watched.live() == "abc"


@in_virtual_time
async def test_a_handle_that_fails_holds_up_no_other() -> None:
    async with watching() as watched:
        await watched.prefill.start("a")
        assert await watched.live() == "a"
        watched.prefill.named = RuntimeError("no router")
        await watched.decode.start("x")
        assert await watched.live() == "a"
        assert [*(watched.watch.live(DECODE) or ())] == ["x"]


@in_virtual_time
async def test_who_stops_watching_cuts_the_connections() -> None:
    async with watching() as watched:
        await watched.prefill.start("a")
        assert await watched.live() == "a"
        call = watched.watch.channels.call("a", "give", {"value": 7})
        watched.prefill.failing = 10**9
        await watched.prefill.start("b")
        await asyncio.sleep(1.0)
        watched.watch.close()
        with pytest.raises(ChannelLostError):
            await call.result
        asked = len(watched.prefill.asked)
        await watched.prefill.start("c")
        await asyncio.sleep(5.0)
        assert len(watched.prefill.asked) == asked
        assert not any(each.connections for each in watched.prefill.replicas.values())


@in_virtual_time
async def test_places_are_given_at_the_replicas_that_run() -> None:
    """Requests wait for the first one, none waits when all are gone, and a new one is empty."""
    async with ticking():
        handles = {PREFILL: Handle(), DECODE: Handle()}
        seats = ReplicaSeats(unplanned(), handles, None)
        waiting = asyncio.create_task(seats.seat(PREFILL, ONE, []))
        await asyncio.sleep(5.0)
        assert (seats.live(PREFILL), waiting.done()) == (None, False)
        await handles[PREFILL].start("ab")
        former = [await waiting] + [await seats.seat(PREFILL, ONE, ["a"]) for _ in range(2)]
        assert (seats.live(PREFILL), seats.live(DECODE)) == (["a", "b"], None)
        assert {seat.replica for seat in former[1:]} == {"b"}
        assert await seats.call("b", "give", {"value": 7}).result == 7
        for listener in handles[PREFILL].replicas.values():
            listener.close()
        await asyncio.sleep(1.0)
        assert seats.live(PREFILL) == []
        with pytest.raises(NoReplicaError):
            await seats.seat(PREFILL, ONE, [])
        with pytest.raises(ChannelLostError):
            await seats.call("a", "give", {}).result
        await handles[PREFILL].start("c")
        await asyncio.sleep(1.0)
        assert (await seats.seat(PREFILL, ONE, ["a", "b"])).replica == "c"
        for seat in former:
            seats.leave(PREFILL, seat)
        seats.close()
        handles[PREFILL].replicas["c"].close()
