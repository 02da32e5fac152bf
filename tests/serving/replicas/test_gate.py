"""The gate and its endpoints over real channels: exact counts, whatever dies or is given up."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.admission.controller import KeyHolder
from serving.api.gate import AnswerReport, Gate
from serving.protocol.messages import Refusal, RequestPhases, RequestRefused
from serving.replicas import ingress
from serving.replicas.gate_server import GateServer, plan_key
from serving.replicas.ingress import NO_GATE, WAIT_S
from serving.replicas.seats import NoReplicaError, ReplicaPool, RoutedPrompt, Seat
from tests.serving.configs import unplanned
from tests.serving.virtual_time import in_virtual_time, run

from .gates import (
    DECODE,
    ONE,
    PHASES,
    PREFILL,
    SIZE,
    Gates,
    OneEndpoint,
    Replicas,
    gated,
    settings_of,
    settled,
)

PLACES = 4
"""Requests that a replica has at once."""


def _few(places: int = PLACES) -> Any:  # noqa: ANN401
    config = unplanned()
    pools = tuple(replace(pool, max_ongoing_requests=places) for pool in config.pools)
    return replace(config, pools=pools)


CONFIG = _few()
OTHER = replace(CONFIG, plan_hash="other", max_model_len=1024)


async def _admitted(endpoint: OneEndpoint, *given: Any) -> int:  # noqa: ANN401
    ticket = await endpoint.admit(*given)
    assert isinstance(ticket, int)
    return ticket


@in_virtual_time
async def test_requests_of_all_endpoints_are_counted_together(replicas: Replicas) -> None:
    """Those without a token and all of them; each end of one takes one away, and only the first."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        assert gates.gate is not None
        tickets = [(each, await _admitted(each)) for each in (one, one, two)]
        assert gates.gate.outstanding == {"prefill": 3, "all": 3}
        one.gate.first_token(tickets[0][1], PHASES, 0.2)
        await asyncio.sleep(0.1)
        assert gates.gate.outstanding == {"prefill": 2, "all": 3}
        two.end(tickets[0][1])  # it has no such request
        for each, ticket in tickets[:2]:
            each.end(ticket)
            each.end(ticket)
        await asyncio.sleep(0.1)
        found = await gates.gate.series()
        assert found['minicluster_outstanding_requests{stage="all"}'] == 1
        assert found['minicluster_requests_total{outcome="ok",path="remote"}'] == 2
        two.end(tickets[2][1])
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty


@in_virtual_time
async def test_places_of_all_endpoints_are_those_of_the_plan(replicas: Replicas) -> None:
    """Whoever comes when a replica is full waits until any endpoint gives a place back."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        assert gates.gate is not None
        seats = [(each, await each.seat()) for each in (one, two, one, two)]
        assert gates.gate.seated == {"d": PLACES}
        waiting = asyncio.create_task(two.seat())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        one.gate.leave(DECODE, seats[0][1])
        seats[0] = (two, await waiting)
        assert gates.gate.seated == {"d": PLACES}
        for each, seat in seats:
            each.gate.leave(DECODE, seat)
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty


@in_virtual_time
async def test_a_place_is_waited_for_as_long_as_its_request_may(replicas: Replicas) -> None:
    """Longer than for a gate that is away: the gate is there, and the replica is full."""
    async with gated(_few(1), replicas) as (gates, [one, two]):
        assert gates.gate is not None
        first = await one.seat()
        waiting = asyncio.create_task(two.seat())
        await asyncio.sleep(3 * WAIT_S)
        assert not waiting.done()
        one.gate.leave(DECODE, first)
        two.gate.leave(DECODE, await waiting)


@in_virtual_time
async def test_where_there_is_no_replica_nobody_waits(replicas: Replicas) -> None:
    async with gated(CONFIG, replicas) as (gates, [one, _]):
        assert gates.gate is not None
        seats = [await one.seat() for _ in range(PLACES)]
        waiting = asyncio.create_task(one.seat())
        await asyncio.sleep(0.1)
        await replicas.start("Decode")
        for given_up in (waiting, one.seat()):
            with pytest.raises(NoReplicaError):
                await given_up
        assert one.gate.live(DECODE) == []
        for seat in seats:
            one.gate.leave(DECODE, seat)
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty


@in_virtual_time
async def test_each_request_is_in_one_stage(replicas: Replicas) -> None:
    """Behind another prompt, at a prefill replica, on its way to its first token, or behind it."""

    async def stages() -> list[float]:
        await asyncio.sleep(0.1)
        found = await gates.gate.series()
        names = ("prefill_queue", "prefill", "handoff", "decode")
        return [found[f'minicluster_stage_requests{{stage="{name}"}}'] for name in names]

    async with gated(CONFIG, replicas) as (gates, [one, two]):
        assert gates.gate is not None
        assert await stages() == [0, 0, 0, 0]
        tickets = [await _admitted(each) for each in (one, one, one, two)]
        seats = [await each.gate.seat(PREFILL, RoutedPrompt(), []) for each in (one, one, two)]
        assert await stages() == [2, 1, 1, 0]
        one.gate.leave(PREFILL, seats[0], answered=True)
        one.gate.first_token(tickets[0], PHASES, 0.2)
        assert await stages() == [1, 1, 1, 1]


@in_virtual_time
async def test_an_endpoint_that_dies_gives_everything_back(replicas: Replicas) -> None:
    """At once, to those that wait; the requests of the other one stay as they are."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        assert gates.gate is not None
        client = KeyHolder(name="alice", max_concurrency=3)
        kept = await _admitted(two, client), await two.seat()
        for _ in range(2):
            await _admitted(one, client)
        for _ in range(PLACES - 1):
            await one.seat()
        assert isinstance(await two.admit(client), Refusal)
        waiting = asyncio.create_task(two.seat())
        await asyncio.sleep(0.1)
        one.connection.close()
        another = await waiting
        assert (gates.gate.outstanding["all"], gates.gate.seated) == (1, {"d": 2})
        assert gates.gate.ongoing == {"alice": 1}
        assert two.told[-1]["endpoints"] == 1
        found = await gates.gate.series()
        assert found['minicluster_requests_total{outcome="failed",path="none"}'] == 2
        two.end(kept[0])
        for seat in (kept[1], another):
            two.gate.leave(DECODE, seat)
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty


@in_virtual_time
async def test_the_limits_of_a_key_are_exact_over_all_endpoints(replicas: Replicas) -> None:
    """Of twenty requests that come at two endpoints at once, as many are admitted as may be."""
    async with gated(CONFIG, replicas) as (gates, endpoints):
        assert gates.gate is not None
        client = KeyHolder(name="alice", max_concurrency=7)
        asked = [endpoints[number % 2].admit(client) for number in range(20)]
        answers = await asyncio.gather(*asked)
        admitted = [each for each in answers if isinstance(each, int)]
        refused = [each for each in answers if isinstance(each, Refusal)]
        assert (len(admitted), {each.status for each in refused}) == (7, {429})
        assert isinstance(await endpoints[0].admit(KeyHolder(name="bob", max_concurrency=1)), int)
        assert gates.gate.ongoing == {"alice": 7, "bob": 1}
        found = await gates.gate.series()
        assert found['minicluster_shed_total{reason="key"}'] == 13
    assert gates.gate is None


@in_virtual_time
async def test_what_is_reported_of_a_request_arrives_as_it_was(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gaps as 32-bit numbers, phases and latencies to the last digit."""
    reports: list[AnswerReport] = []
    firsts: list[tuple[float, RequestPhases]] = []
    monkeypatch.setattr(Gate, "ended", lambda _self, _ticket, report: reports.append(report))
    monkeypatch.setattr(
        Gate, "first_token", lambda _self, _ticket, phases, ttft_s: firsts.append((ttft_s, phases))
    )
    async with gated(CONFIG, replicas) as (_, [one, _two]):
        ticket = await _admitted(one)
        gaps_s = [random.Random(1).expovariate(100.0) for _ in range(5000)]  # noqa: S311
        phases = replace(PHASES, path="retried", reason="prefill-failed", prefill_queue_s=1 / 3)
        one.gate.first_token(ticket, phases, 1 / 7)
        sent = AnswerReport(
            outcome="ok",
            path="retried",
            ttft_s=1 / 7,
            tpot_s=1 / 9,
            e2e_s=1e-9,
            prompt_tokens=12345,
            output_tokens=None,
            gaps_s=gaps_s,
        )
        one.gate.ended(ticket, sent)
        await asyncio.sleep(0.1)
    assert firsts == [(1 / 7, phases)]
    [arrived] = reports
    assert replace(arrived, gaps_s=()) == replace(sent, gaps_s=())
    assert arrived.gaps_s == pytest.approx(gaps_s, rel=1e-7)


@in_virtual_time
@pytest.mark.parametrize("loops", range(12))
async def test_a_request_that_is_given_up_leaves_nothing_behind(
    replicas: Replicas, loops: int
) -> None:
    """In whichever turn of the event loop it is given up, on its way to the gate and back."""
    async with gated(_few(1), replicas) as (gates, [one, two]):
        assert gates.gate is not None
        for asked in (one.admit, one.seat):
            given_up = asyncio.create_task(asked())
            for _ in range(loops):
                await asyncio.sleep(0)
            was_there = given_up.done()
            given_up.cancel()
            with suppress(asyncio.CancelledError):
                await given_up
            if was_there:
                found = given_up.result()
                one.end(found) if isinstance(found, int) else one.gate.leave(DECODE, found)
            await asyncio.sleep(0.2)
            assert gates.gate.is_empty
        seat = await two.seat()
        waiting = asyncio.create_task(one.seat())
        await asyncio.sleep(0.1)
        two.gate.leave(DECODE, seat)  # the place is on its way
        for _ in range(loops):
            await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
        with suppress(asyncio.CancelledError):
            one.gate.leave(DECODE, await waiting)
        await asyncio.sleep(0.2)
        assert gates.gate.is_empty


@in_virtual_time
async def test_another_gate_counts_what_is_under_way(replicas: Replicas) -> None:
    """Requests with and without a token, keys and places; they end at it as at the first one."""
    async with gated(CONFIG, replicas) as (gates, endpoints):
        client = KeyHolder(name="alice", max_concurrency=4)
        tickets = [(each, await _admitted(each, client)) for each in endpoints * 2]
        seats = [(each, await each.seat()) for each in endpoints]
        prefill = await endpoints[0].seat(PREFILL)
        endpoints[0].gate.first_token(tickets[0][1], PHASES, 0.2)
        gates.die()
        await asyncio.sleep(1.0)
        endpoints[1].end(tickets[3][1])  # nobody hears of it
        endpoints[1].gate.leave(DECODE, seats.pop()[1])
        gate = await gates.start()
        await settled(endpoints)
        assert gate.outstanding == {"prefill": 2, "all": 3}
        assert (gate.ongoing, gate.seated) == ({"alice": 3}, {"d": 1, "p": 1})
        assert isinstance(await endpoints[1].admit(client), int)
        assert isinstance(await endpoints[1].admit(client), Refusal)
        assert await endpoints[0].gate.move(tickets[2][1]) == "d0"
        for each, ticket in tickets[:3]:
            each.end(ticket)
        endpoints[0].gate.leave(DECODE, seats[0][1])
        endpoints[0].gate.leave(PREFILL, prefill)
        await asyncio.sleep(0.1)
        assert (gate.outstanding["all"], gate.seated) == (1, {})
        endpoints[1].lose()
        await asyncio.sleep(0.1)
        await settled(endpoints)
        assert gate.outstanding["all"] == 1  # it has joined again, with its request


@in_virtual_time
async def test_what_ends_while_an_endpoint_joins_has_ended(replicas: Replicas) -> None:
    """Whatever is told after the list of what is under way is taken after it."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        ticket, waits = await _admitted(one), await _admitted(one)
        seat = await one.seat()
        joined = one.connection._joined
        one.lose()
        while joined.is_set() or one.connection._channel is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not joined.is_set()
        one.gate.first_token(waits, PHASES, 0.2)
        one.end(ticket)
        one.gate.leave(DECODE, seat)
        await settled([one, two])
        assert gates.gate is not None
        assert (gates.gate.outstanding, gates.gate.seated) == ({"prefill": 0, "all": 1}, {})
        one.end(waits)
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty


@in_virtual_time
async def test_replicas_that_a_new_gate_finds_late_have_what_is_there(replicas: Replicas) -> None:
    """One whose channel is there after others has its requests, and takes no more than it may."""
    async with gated(_few(2), replicas) as (gates, [one, two]):
        await replicas.start("Decode", "d", "e")
        await asyncio.sleep(1.0)
        seats = [await each.seat() for each in (one, one, two, two)]
        gates.die()
        await asyncio.sleep(0.1)
        late = replicas.named["Decode"].pop("e")
        gate = await gates.start()
        await settled([one, two])
        replicas.named["Decode"]["e"] = late
        await asyncio.sleep(1.0)
        assert gate.seated == {"d": 2, "e": 2}
        waiting = asyncio.create_task(one.seat())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        for each, seat in zip((one, one, two, two), seats, strict=True):
            each.gate.leave(DECODE, seat)
        one.gate.leave(DECODE, await waiting)
        await asyncio.sleep(0.1)
        assert gate.is_empty


@in_virtual_time
async def test_new_requests_wait_for_another_gate(replicas: Replicas) -> None:
    """Also those that were at the one that died; after a while they are refused, to come again."""
    async with gated(_few(1), replicas) as (gates, [one, two]):
        seat = await one.seat()
        waits_at_it = asyncio.create_task(two.seat())
        await asyncio.sleep(0.1)
        gates.die()
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(each.admit()) for each in (one, two)]
        await asyncio.sleep(WAIT_S / 2)
        assert not any(each.done() for each in waiting)
        gate = await gates.start()
        tickets = [await each for each in waiting]
        assert gate.outstanding["all"] == 2
        assert not waits_at_it.done()
        one.gate.leave(DECODE, seat)
        two.gate.leave(DECODE, await waits_at_it)
        for each, ticket in zip((one, two), tickets, strict=True):
            assert isinstance(ticket, int)
            each.end(ticket)
        await asyncio.sleep(0.1)
        assert gate.is_empty

        gates.die()
        await asyncio.sleep(0.1)
        begun_s = asyncio.get_running_loop().time()
        asked = [one.admit(), one.seat(), one.gate.metrics_text(), one.gate.ready()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, RequestRefused)
            assert answer.refusal == NO_GATE
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(WAIT_S, abs=1.0)
        gate = await gates.start()
        await settled([one, two])
        assert gate.is_empty


@in_virtual_time
async def test_a_gate_that_fails_to_answer_harms_nothing_else(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is refused (503); others, and those after it, are as before."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        assert gates.gate is not None
        kept = await _admitted(two)

        def broken(*_given: object, **_named: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(Gate, "admit", broken)
            patched.setattr(ReplicaPool, "seat", broken)
            patched.setattr(Gate, "first_token", broken)
            two.gate.first_token(kept, PHASES, 0.1)
            for asked in (one.admit(), one.seat(), one.gate.move(99)):
                with pytest.raises(RequestRefused) as refused:
                    await asked
                assert (refused.value.refusal.status, refused.value.refusal) == (503, NO_GATE)
        assert gates.gate.outstanding["all"] == 1
        ticket, seat = await _admitted(one), await one.seat()
        one.end(ticket)
        one.gate.leave(DECODE, seat)
        two.end(kept)
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty


@in_virtual_time
async def test_endpoints_hear_of_replicas_and_call_them(replicas: Replicas) -> None:
    """Of those that come, and of those that go; a call goes from the endpoint to the replica."""
    async with gated(CONFIG, replicas) as (_, endpoints):
        assert [each.gate.live(DECODE) for each in endpoints] == [["d"], ["d"]]
        await replicas.start("Decode", "d", "e")
        await asyncio.sleep(1.0)
        assert [each.gate.live(DECODE) for each in endpoints] == [["d", "e"], ["d", "e"]]
        for each in endpoints:
            assert await each.gate.call("e", "facts", {}).result == {"tp": 1}
        await replicas.start("Decode", "e")
        await asyncio.sleep(1.0)
        assert [each.gate.live(DECODE) for each in endpoints] == [["e"], ["e"]]
        assert (await endpoints[0].seat()).replica == "e"
        found = await endpoints[1].gate.state()
        assert found["deployed"]["replicas"]["decode"]["d0"] == {"planned": 1, "running": 1}
        assert await endpoints[0].gate.ready() == (True, [])
        assert await endpoints[0].gate.steps(1.0, 2.0) == {
            "decode": [[1.0, 2.0]],
            "prefill": [[1.0, 2.0]],
        }


@in_virtual_time
async def test_another_plan_is_prepared_and_reaches_all_endpoints(replicas: Replicas) -> None:
    """It serves once all have it; the former one ends with its last request, and then is gone."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        gate, other = gates.gate, settings_of(OTHER, "2")
        assert gate is not None
        former = one.gate
        one.ends = False
        client = KeyHolder(name="alice", max_concurrency=2)
        ticket, seat = await _admitted(one, client), await one.seat()
        await replicas.start("Decode2", "d2")
        replicas.refuses = True
        await replicas.start("Prefill2", "p2")
        assert await gate.prepare(other) == ["a probe was refused: It is full."]
        replicas.refuses = False
        assert await gate.prepare(other) == []
        assert await gate.serves() == {"d0": "Decode"}

        await gate.reconfigure(other)
        draining = asyncio.create_task(gate.drain_former())
        assert await gate.serves() == {}
        await asyncio.sleep(0.1)
        assert await gate.serves() == {"d0": "Decode2"}
        assert [each.key for each in (one, two)] == [plan_key(other)] * 2
        assert (await two.seat()).replica == "d2"
        assert isinstance(await two.admit(client), int)
        assert isinstance(await two.admit(client), Refusal), "keys have what they had"
        assert [each.live(DECODE) for each in (former, one.gate)] == [["d"], ["d2"]]
        assert not draining.done()
        former.ended(ticket, AnswerReport(outcome="ok"))
        former.leave(DECODE, seat)
        one.end_former()
        assert await draining == 0
        await asyncio.sleep(0.1)
        assert {*one.told[-1]["replicas"]} == {plan_key(other)}
        assert gate.ongoing == {"alice": 1}
        refused = await one.admit(gate=former)
        assert isinstance(refused, Refusal)
        assert refused.code == "no_replica"


@in_virtual_time
async def test_requests_that_outlive_the_drain_of_their_plan_are_counted_until_they_end(
    replicas: Replicas,
) -> None:
    """The wait for them ends at the limit, and says how many are left; their key has them on."""
    async with gated(CONFIG, replicas) as (gates, [one, _]):
        gate, former = gates.gate, one.gate
        assert gate is not None
        client = KeyHolder(name="alice", max_concurrency=1)
        ticket, seat = await _admitted(one, client), await one.seat()
        await replicas.start("Decode2", "d2")
        await replicas.start("Prefill2", "p2")
        await gate.reconfigure(settings_of(OTHER, "2"))
        assert await gate.drain_former() == 1
        await asyncio.sleep(1.0)
        assert isinstance(await one.admit(client), Refusal)
        former.ended(ticket, AnswerReport(outcome="ok"))
        former.leave(DECODE, seat)
        await asyncio.sleep(0.1)
        assert (gate.ongoing, await gate.drain_former()) == ({}, 0)
        assert isinstance(await one.admit(client), int)


@in_virtual_time
async def test_a_plan_that_serves_again_before_it_has_ended_goes_on(replicas: Replicas) -> None:
    """Its requests from before are counted with the new ones; nothing is refused."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        gate = gates.gate
        assert gate is not None
        await replicas.start("Decode2", "d2")
        await replicas.start("Prefill2", "p2")
        one.ends = False
        first = settings_of(CONFIG)
        tickets = [await _admitted(one)]
        for each in (settings_of(OTHER, "2"), first):
            await gate.reconfigure(each)
            await asyncio.sleep(0.5)
            tickets.append(await _admitted(one))
        one.end_former()
        await asyncio.sleep(0.5)
        assert gate.outstanding["all"] == 2
        tickets.append(await _admitted(two))
        assert (await two.seat()).replica == "d"
        assert gate.outstanding["all"] == 3
        assert await gate.serves() == {"d0": "Decode"}


@in_virtual_time
async def test_an_endpoint_that_joins_while_the_plan_changes_serves_by_one_that_is_known(
    replicas: Replicas,
) -> None:
    """What it admits by the plan that it was told first is admitted."""
    async with gated(CONFIG, replicas, endpoints=1) as (gates, [one]):
        gate = gates.gate
        assert gate is not None
        await replicas.start("Decode2", "d2")
        await replicas.start("Prefill2", "p2")
        late = OneEndpoint(gates)
        late.ends = False
        while late.connection.plans == []:
            assert len(gate._endpoints) <= 2
            await asyncio.sleep(0)
        former = late.gate
        await gate.reconfigure(settings_of(OTHER, "2"))
        await late.connection._joined.wait()
        assert isinstance(await late.admit(gate=former), int)
        late.connection.close()
        await asyncio.sleep(0.1)
        assert isinstance(await one.admit(), int)


@in_virtual_time
async def test_a_drain_lasts_until_no_endpoint_has_requests(replicas: Replicas) -> None:
    """All are told to refuse new work, also one that comes or comes back meanwhile."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        gate = gates.gate
        assert gate is not None
        one.ends = two.ends = False
        draining = asyncio.create_task(gate.drain())
        await asyncio.sleep(0.1)
        assert [each.told[-1]["draining"] for each in (one, two)] == [True, True]
        late = OneEndpoint(gates)
        await asyncio.sleep(0.1)
        assert late.told[0]["draining"] is True
        one.end_former(but=0)
        one.lose()
        await asyncio.sleep(1.0)
        assert not draining.done()
        two.connection.close()
        assert await draining == 0
        late.connection.close()


@in_virtual_time
async def test_the_end_of_the_gate_waits_for_endpoints_that_end(replicas: Replicas) -> None:
    """Those that end, too, have it until they are gone; the others go on at the next gate."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        gate = gates.gate
        assert gate is not None
        ticket, kept = await _admitted(one), await _admitted(two)
        ending = asyncio.create_task(GateServer.__del__(gate))
        one.connection.notify("ends")
        await asyncio.sleep(100.0)
        one.gate.leave(DECODE, await one.seat())
        one.end(ticket)
        assert not ending.done()
        successor = await gates.start()
        one.connection.close()
        await ending
        await settled([two])
        assert successor.outstanding["all"] == 1
        assert isinstance(await two.admit(), int)
        two.end(kept)
        await asyncio.sleep(0.1)
        assert successor.outstanding["all"] == 1
        gate.die()


@in_virtual_time
async def test_an_endpoint_finds_the_gate_however_often_it_fails_to(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Serve may not answer, or name one that has just ended."""
    async with gated(CONFIG, replicas) as (gates, [one, two]):
        gone = await gates.find()
        gates.die()
        monkeypatch.setattr(ingress, "FIND_S", 1.0)
        answers: list[Any] = [gone, None, gone, None]

        async def find() -> Any:  # noqa: ANN401
            answer = answers.pop() if answers else await gates.find()
            return answer or await asyncio.sleep(3600.0)

        one.connection._find = find
        await gates.start()
        await asyncio.sleep(10.0)
        assert answers == []
        await settled([one, two])
        assert isinstance(await one.admit(), int)


@dataclass(eq=False)
class Request:
    """One request as an endpoint has it: admitted, seated, with a first token, and ended."""

    endpoint: OneEndpoint
    client: KeyHolder
    steps: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ticket: int | None = None
    seat: Seat | None = None

    def begin(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self._live())
        return self.task

    def go_on(self) -> None:
        self.steps += 1
        self.news.set()

    async def _until(self, steps: int) -> None:
        while self.steps < steps:
            self.news.clear()
            await self.news.wait()

    async def _live(self) -> None:
        gate = self.endpoint.gate
        with suppress(RequestRefused, NoReplicaError):
            ticket = next(OneEndpoint.tickets)
            if not isinstance(await gate.admit(ticket, self.client, SIZE, streamed=True), str):
                return
            self.ticket = ticket
            try:
                await self._until(1)
                seat = await gate.seat(DECODE, ONE, [])
                self.seat = seat
                try:
                    await self._until(2)
                    gate.first_token(ticket, PHASES, 0.1)
                    await self._until(3)
                finally:
                    self.seat = None
                    gate.leave(DECODE, seat)
            finally:
                self.ticket = None
                gate.ended(ticket, AnswerReport(outcome="ok", gaps_s=[0.1]))


CLIENTS = (KeyHolder(name="alice", max_concurrency=5), KeyHolder())
OFTEN = {"begin": 3, "go_on": 4, "turns": 2, "cancel": 1, "lose": 1, "restart": 1, "agree": 1}
ACTS = st.lists(
    st.tuples(
        st.sampled_from([act for act in OFTEN for _ in range(OFTEN[act])]), st.integers(0, 9)
    ),
    max_size=40,
)


class Run:
    """A gate, two endpoints, and the requests that came at them."""

    def __init__(self, gates: Gates, endpoints: list[OneEndpoint]) -> None:
        self._gates, self._endpoints = gates, endpoints
        self._requests: list[Request] = []

    async def begin(self, number: int) -> None:
        client = CLIENTS[len(self._requests) % len(CLIENTS)]
        self._requests.append(Request(self._endpoints[number % 2], client))
        self._requests[-1].begin()

    async def go_on(self, number: int) -> None:
        if self._requests:
            self._requests[number % len(self._requests)].go_on()

    async def cancel(self, number: int) -> None:
        if self._requests:
            self._requests[number % len(self._requests)].task.cancel()

    async def lose(self, number: int) -> None:
        self._endpoints[number % 2].lose()

    async def restart(self, _number: int) -> None:
        self._gates.die()
        await asyncio.sleep(0.01)
        await self._gates.start()

    async def turns(self, number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async def agree(self, _number: int = 0) -> None:
        """Check that the gate counts what there is."""
        await settled(self._endpoints)
        await asyncio.sleep(0.3)
        assert self._gates.gate is not None
        live = [each for each in self._requests if not each.task.done()]
        assert self._gates.gate.outstanding["all"] == sum(each.ticket is not None for each in live)
        seated = sum(each.seat is not None for each in live)
        assert sum(self._gates.gate.seated.values()) == seated

    async def end(self) -> None:
        """Check that nothing is left of requests that are given up."""
        await self.agree()
        for request in self._requests:
            request.task.cancel()
        tasks = [each.task for each in self._requests]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.agree()
        assert self._gates.gate is not None
        assert self._gates.gate.is_empty


async def _interleaved(replicas: Replicas, acts: list[tuple[str, int]]) -> None:
    async with gated(_few(3), replicas) as (gates, endpoints):
        it = Run(gates, endpoints)
        for act, number in acts:
            await getattr(it, act)(number)
        await it.end()


@given(acts=ACTS)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_counts_return_to_zero_whatever_happens_in_which_order(
    replicas: Replicas, acts: list[tuple[str, int]]
) -> None:
    """They are those of the endpoints whenever all is quiet, after any losses and restarts."""
    replicas.named.clear()
    run(_interleaved(replicas, acts))
