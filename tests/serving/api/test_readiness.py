"""Readiness: what is probed, what proves it, and what does not wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from minicluster.plan import Routing
from serving.admission.controller import AdmissionController
from serving.api.gate import CachedValue, Metrics, ReadyCheck
from serving.protocol.messages import EndpointConfig, Refusal, RequestPhases
from tests.serving.fake_servers import FakeServers
from tests.serving.virtual_time import in_virtual_time, run

FAILS = Refusal(status=504, message="Too late.")
REFUSED = "a probe was refused: Too late."


def _check(config: EndpointConfig, servers: FakeServers) -> ReadyCheck:
    return ReadyCheck(config, servers, AdmissionController(config), Metrics(config))


def _lacking(config: EndpointConfig, servers: FakeServers) -> list[str]:
    ready, lacking = run(_check(config, servers).check())
    assert ready == (not lacking)
    return lacking


def _phases(path: str) -> RequestPhases:
    return RequestPhases(prefill_s=0.0, decode_s=0.0, path=path)


def test_a_probe_has_to_go_through_prefill(config: EndpointConfig) -> None:
    """What decode computed alone says nothing of prefill, unless there is no prefill pool."""
    for path in ("local", "fallback-local"):
        without = f"a probe was answered without prefill: {path}"
        assert _lacking(config, FakeServers(path=path)) == [without]
    assert _lacking(config, FakeServers(path="retried")) == []
    aggregated = replace(config, pools=config.pools[1:])
    assert _lacking(aggregated, FakeServers(path="local")) == []


@pytest.mark.parametrize(("threshold", "tokens"), [(0, 1), (300, 301), (5000, 2047)])
def test_a_probe_is_longer_than_what_decode_computes(
    config: EndpointConfig, threshold: int, tokens: int
) -> None:
    """Unless nothing is; and each is computed anew, whatever the engines have cached."""
    servers = FakeServers(path="remote" if threshold < tokens else "local")
    routed = replace(config, routing=Routing(local_threshold_tokens=threshold))
    assert [_lacking(routed, servers) for _ in range(2)] == [[], []]
    assert [len(body["prompt"]) for body in servers.seen] == [tokens] * 2
    assert len({body["cache_salt"] for body in servers.seen}) == 2


@in_virtual_time
@pytest.mark.parametrize(
    ("path", "ago_s", "probes"),
    [("remote", 0.0, 0), ("retried", 0.0, 0), ("remote", 60.0, 1), ("local", 0.0, 1)],
)
async def test_an_answered_client_proves_as_much(
    config: EndpointConfig, path: str, ago_s: float, probes: int
) -> None:
    """If its prompt has just gone through prefill: the moment of its first token counts."""
    servers = FakeServers()
    check = _check(config, servers)
    check.answered("d0", _phases(path), time.perf_counter() - ago_s)
    assert await check.check() == (True, [])
    assert len(servers.seen) == probes


@in_virtual_time
async def test_older_news_do_not_count(config: EndpointConfig) -> None:
    """A long answer that began before a probe failed does not make it right; a newer one does."""
    servers = FakeServers(refusal=FAILS)
    check = _check(config, servers)
    began_s = time.perf_counter()
    await asyncio.sleep(0.1)
    assert await check.check() == (False, [REFUSED])
    await asyncio.sleep(0.1)
    for first_s, expected in ((began_s, (False, [REFUSED])), (time.perf_counter(), (True, []))):
        check.answered("d0", _phases("remote"), first_s)
        assert await check.check() == expected
    assert len(servers.seen) == 1


@in_virtual_time
async def test_every_domain_is_probed(config: EndpointConfig) -> None:
    """One that fails is named, however well the others do; clients prove their own alone."""
    up = {(role, domain): 1 for role in ("prefill", "decode") for domain in ("d0", "d1")}
    servers = FakeServers(up=up, refusal=FAILS, refuses="d1")
    two = replace(config, pairing={"d0": ("d0", "d1"), "d1": ("d1", "d0")})
    check = _check(two, servers)
    check.answered("d0", _phases("remote"), time.perf_counter())
    for probes in (1, 1 + 2):
        assert await check.check() == (True, [f"d1: {REFUSED}"])
        assert len(servers.seen) == probes
        await asyncio.sleep(6.0)
    servers.refuses = None
    assert await check.check() == (False, [f"{at}: {REFUSED}" for at in ("d0", "d1")])


@in_virtual_time
async def test_a_probe_does_not_block_status(config: EndpointConfig) -> None:
    """While one hangs, replicas and settings are reported at once, to admission control too."""
    servers = FakeServers(ttft_s=3600.0, up={("prefill", "d0"): 3, ("decode", "d0"): 1})
    admission = AdmissionController(config)
    check = ReadyCheck(config, servers, admission, Metrics(config))
    ready = asyncio.create_task(check.check())
    await asyncio.sleep(0.1)
    assert servers.open == 1
    assert await check.running.get() == servers.up
    assert set(await check.facts.get()) == set(servers.up)
    assert admission.inflight.load("d0").prefill.replicas == 3
    assert not ready.done()
    assert await ready == (False, ["a probe got no token within 2 s"])


@dataclass
class Silent(FakeServers):
    """A cluster whose controller does not answer any more after *looks*."""

    looks: int = 0

    async def running(self) -> dict[tuple[str, str], int]:
        self.looks -= 1
        if self.looks < 0:
            raise ConnectionError
        return self.up


@in_virtual_time
async def test_without_the_controller(config: EndpointConfig) -> None:
    """What was known stays known, and requests decide; what never was is not made up."""
    never = _check(config, Silent())
    assert await never.check() == (False, ["Ray Serve does not say what runs"])
    check = _check(config, Silent(looks=1))
    for _ in range(2):
        assert await check.check() == (True, [])
        await asyncio.sleep(6.0)


def _asking(*answers: object) -> tuple[Callable[[], Any], list[object]]:
    """Return what gives these answers in turn, waiting for futures, and what it has given."""
    given: list[object] = []

    async def ask() -> Any:  # noqa: ANN401
        answer = answers[len(given)]
        given.append(answer)
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, asyncio.Future) else answer

    return ask, given


@in_virtual_time
@pytest.mark.parametrize(
    ("max_age_s", "answers", "values", "questions"),
    [
        (60.0, (1, 2), [1, 1, 1], 1),  # a good value is not asked for again
        (-1.0, (1, 2, 3), [1, 2, 3], 3),  # a stale one is refreshed first, if that is quick
        (-1.0, (OSError(), 1, OSError()), [0, 1, 1], 3),  # a failure leaves the last value
    ],
)
async def test_a_value_is_asked_for_when_it_is_old(
    max_age_s: float, answers: tuple[object, ...], values: list[int], questions: int
) -> None:
    ask, given = _asking(*answers)
    value = CachedValue(ask, initial=0, max_age_s=max_age_s)
    assert [await value.get() for _ in range(3)] == values
    assert len(given) == questions


@in_virtual_time
async def test_a_refresh_that_hangs_blocks_no_reader() -> None:
    """The last value has to do meanwhile; a reader that is cancelled does not end the refresh."""
    late: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ask, given = _asking(1, late, 3)
    value = CachedValue(ask, initial=0, max_age_s=-1.0)
    assert await asyncio.gather(value.get(), value.get()) == [1, 1]
    start_s = time.monotonic()
    assert [await value.get() for _ in range(3)] == [1] * 3
    assert time.monotonic() - start_s == pytest.approx(3)  # a second each
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(value.get(), 0.001)
    assert given == [1, late]  # it is not asked twice
    late.set_result(2)
    assert await value.get() == 2
