"""Readiness: what is probed, what proves it, and what does not wait for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import Routing
from serving.admission.controller import AdmissionController
from serving.api import readiness
from serving.api.metrics import Metrics
from serving.api.readiness import ReadyCheck
from serving.protocol.endpoint_config import EndpointConfig, endpoint_config
from serving.protocol.messages import Refusal, RequestPhases
from tests.serving.fake_servers import FakeServers
from tests.serving.virtual_time import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import DeploymentMaker, PlanMaker

FAILS = Refusal(status=504, message="Too late.")


@pytest.fixture(scope="module")
def config(
    make_deployment: DeploymentMaker, make_plan: PlanMaker, small_model: Path
) -> EndpointConfig:
    """Return a plan of one replica each, with deadlines of a minute."""
    deployment = make_deployment(small_model)
    return endpoint_config(deployment, domains={"laptop": "d0"}, plan=make_plan(deployment))


def _check(config: EndpointConfig, servers: FakeServers) -> ReadyCheck:
    """Return what checks *servers*."""
    return ReadyCheck(config, servers, AdmissionController(config), Metrics(config))


def _lacking(config: EndpointConfig, servers: FakeServers) -> list[str]:
    """Ask once."""
    return run(_check(config, servers).lacking())


def _phases(path: str) -> RequestPhases:
    """Return the phases of an answer by this way."""
    return RequestPhases(prefill_s=0.0, decode_s=0.0, path=path)


@pytest.mark.parametrize("path", ["local", "fallback-local"])
def test_a_probe_has_to_go_through_prefill(config: EndpointConfig, path: str) -> None:
    """What decode computed alone says nothing of prefill and of the way between them."""
    assert _lacking(config, FakeServers(path=path)) == [
        f"a probe was answered without prefill: {path}"
    ]
    assert _lacking(config, FakeServers(path="retried")) == []


@pytest.mark.parametrize(("threshold", "tokens"), [(0, 1), (300, 301), (5000, 2047)])
def test_a_probe_is_longer_than_what_decode_computes(
    config: EndpointConfig, threshold: int, tokens: int
) -> None:
    """Unless nothing is; and each is computed anew, whatever the engines have cached."""
    servers = FakeServers(path="remote" if threshold < tokens else "local")
    for _ in range(2):
        assert (
            _lacking(replace(config, routing=Routing(local_threshold_tokens=threshold)), servers)
            == []
        )
    assert [len(body["prompt"]) for body in servers.seen] == [tokens] * 2
    assert len({body["cache_salt"] for body in servers.seen}) == 2


def test_without_a_prefill_pool_every_way_is_right(config: EndpointConfig) -> None:
    """An aggregated plan has no other."""
    together = replace(config, pools=config.pools[1:])
    assert _lacking(together, FakeServers(path="local")) == []


@pytest.mark.parametrize(
    ("path", "ago_s", "probes"),
    [("remote", 0.0, 0), ("retried", 0.0, 0), ("remote", 60.0, 1), ("local", 0.0, 1)],
)
def test_an_answered_client_proves_as_much(
    config: EndpointConfig, path: str, ago_s: float, probes: int
) -> None:
    """If its prompt has just gone through prefill: the moment of its first token counts."""
    servers = FakeServers()

    async def look() -> list[str]:
        check = _check(config, servers)
        check.answered("d0", _phases(path), time.perf_counter() - ago_s)
        return await check.lacking()

    assert run(look()) == []
    assert len(servers.seen) == probes


def test_older_news_do_not_count(config: EndpointConfig) -> None:
    """A long answer that began before a probe failed does not make it right; a newer one does."""
    servers = FakeServers(refusal=FAILS)

    async def look() -> list[list[str]]:
        check = _check(config, servers)
        began_s = time.perf_counter()
        await asyncio.sleep(0.1)
        found = [await check.lacking()]
        await asyncio.sleep(0.1)
        for first_s in (began_s, time.perf_counter()):
            check.answered("d0", _phases("remote"), first_s)
            found.append(await check.lacking())
        return found

    refused = ["a probe was refused: Too late."]
    assert run(look()) == [refused, refused, []]
    assert len(servers.seen) == 1


def test_every_domain_is_probed(config: EndpointConfig) -> None:
    """One that fails is named, however well the others do; clients prove their own alone."""
    up = {(role, domain): 1 for role in ("prefill", "decode") for domain in ("d0", "d1")}
    servers = FakeServers(up=up, refusal=FAILS, refuses="d1")
    two = replace(config, pairing={"d0": ("d0", "d1"), "d1": ("d1", "d0")})

    async def look() -> list[str]:
        check = _check(two, servers)
        check.answered("d0", _phases("remote"), time.perf_counter())
        return await check.lacking()

    assert run(look()) == ["d1: a probe was refused: Too late."]
    assert len(servers.seen) == 1
    assert _lacking(two, servers) == ["d1: a probe was refused: Too late."]
    assert len(servers.seen) == 3


def test_a_probe_does_not_block_status(config: EndpointConfig) -> None:
    """While one hangs, replicas and settings are reported at once, to admission control too."""
    servers = FakeServers(ttft_s=3600.0, up={("prefill", "d0"): 3, ("decode", "d0"): 1})

    async def look() -> None:
        admission = AdmissionController(config)
        check = ReadyCheck(config, servers, admission, Metrics(config))
        ready = asyncio.create_task(check.lacking())
        while not servers.open:  # noqa: ASYNC110  (the fake has no event for it)
            await asyncio.sleep(0)
        assert await check.running() == servers.up
        assert set(await check.facts()) == set(servers.up)
        assert admission.inflight.load("d0").prefill_replicas == 3
        assert not ready.done()
        ready.cancel()
        await asyncio.wait({ready})

    run(look())


@dataclass
class Silent(FakeServers):
    """A cluster whose controller does not answer any more after *looks*."""

    looks: int = 0

    async def running(self) -> dict[tuple[str, str], int]:
        """Answer as long as it may."""
        self.looks -= 1
        if self.looks < 0:
            raise ConnectionError
        return self.up


def test_without_the_controller(config: EndpointConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known stays known, and requests decide; what never was is not made up."""
    monkeypatch.setattr(readiness, "REFRESH_S", -1.0)
    assert _lacking(config, Silent()) == ["Ray Serve does not say what runs"]

    async def look(servers: Silent) -> list[list[str]]:
        check = _check(config, servers)
        return [await check.lacking() for _ in range(2)]

    assert run(look(Silent(looks=1))) == [[], []]
