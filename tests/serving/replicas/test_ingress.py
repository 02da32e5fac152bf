"""Endpoint processes as Ray Serve has them, with a gate: plans, health, and the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec
from serving.api.app import access_log
from serving.cluster.ports import free_ports
from serving.protocol.messages import EndpointConfig
from serving.replicas import ingress
from serving.replicas.gate_server import GateServer
from serving.replicas.ingress import Ingress
from tests.serving.http_client import KEY, ONE
from tests.serving.virtual_time import in_virtual_time

from .gates import HERE, Gates, OneGate, Replicas, gated, settings_of

OURS: Any = Ingress.__wrapped__  # type: ignore[attr-defined]

HOUR_S = 3600.0
STREAM = {**ONE, "max_tokens": 6, "stream": True}
WHOLE = "data: [DONE]\n\n"


@pytest.fixture
def config(config: EndpointConfig) -> EndpointConfig:
    """Return the plan with deadlines that no answer here misses."""
    return replace(config, prefill_deadline_s=HOUR_S, kv_wait_deadline_s=HOUR_S)


class Endpoint(OURS):
    """Ours without Ray Serve around it."""

    def __del__(self) -> None:
        """Python's own end: Ray Serve awaits ours before."""


class Endpoints:
    """Endpoints at one port, and a client of them."""

    def __init__(self, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gates = gates
        [self.port] = free_ports(1)
        self.running: list[Any] = []
        self.client = httpx.AsyncClient(base_url=f"http://{HERE}:{self.port}", timeout=HOUR_S)
        self._monkeypatch = monkeypatch

    async def start(self) -> None:
        """Start another one, and wait until it listens."""
        self._monkeypatch.setattr("serving.replicas.ingress._find_gate", self.gates.find)
        endpoint = Endpoint(address=(HERE, self.port))
        await endpoint.__serve_build_asgi_app__()
        self.running.append(endpoint)
        while not endpoint._server._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def end(self, endpoint: Any) -> None:  # noqa: ANN401
        """End one as Ray Serve does."""
        self.running.remove(endpoint)
        await OURS.__del__(endpoint)

    async def streams(self, number: int) -> list[asyncio.Task[httpx.Response]]:
        """Begin streams of six tokens, each on a connection of its own; wait for their first."""
        assert self.gates.gate is not None
        before = self.gates.gate.outstanding["all"]
        begun = [asyncio.create_task(self.ask(**STREAM)) for _ in range(number)]
        while self.gates.gate.outstanding != {"prefill": 0, "all": before + number}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return begun

    async def ask(self, **body: object) -> httpx.Response:
        """Send a request, of one token if nothing else is said, on a connection of its own."""
        given = {"headers": self.client.headers, "timeout": HOUR_S}
        async with httpx.AsyncClient(base_url=self.client.base_url, **given) as client:  # type: ignore[arg-type]
            return await client.post("/v1/completions", json={**ONE, "max_tokens": 1, **body})

    async def series(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leave this process's signals and logs alone: it is no worker of Ray."""
    monkeypatch.setattr("serving.replicas.ingress.before_sigterm", lambda _wait: None)
    monkeypatch.setattr("serving.replicas.ingress.keep_log_open", lambda: None)
    monkeypatch.setattr("serving.replicas.ingress.serve_logs", lambda: tmp_path)
    kept = [*access_log.handlers]
    yield
    for handler in {*access_log.handlers} - {*kept}:
        access_log.removeHandler(handler)
        handler.close()


@pytest.fixture
def at_port(monkeypatch: pytest.MonkeyPatch, replicas: Replicas) -> Callable[..., Any]:
    """Return what starts a gate and endpoints that listen, and ends them."""

    @asynccontextmanager
    async def started(
        config: EndpointConfig, number: int
    ) -> AsyncIterator[tuple[Gates, Endpoints]]:
        async with gated(config, replicas, endpoints=0) as (gates, _):
            gates.settings = settings_of(config, drain_s=HOUR_S)
            gates.die()
            await gates.start()
            endpoints = Endpoints(gates, monkeypatch)
            try:
                for _ in range(number):
                    await endpoints.start()
                yield gates, endpoints
            finally:
                replicas.go_on.set()
                await endpoints.client.aclose()
                for each in [*endpoints.running]:
                    await endpoints.end(each)

    return started


@in_virtual_time
@pytest.mark.parametrize("dies", [True, False])
async def test_it_is_healthy_as_long_as_it_listens(
    at_port: Callable[..., Any], config: EndpointConfig, *, dies: bool
) -> None:
    """A server that has ended is found out, and the port is free after the end."""
    async with at_port(config, 1) as (_, endpoints):
        [endpoint] = endpoints.running
        assert (await endpoints.client.get("/health")).status_code == 200
        endpoint.check_health()
        if dies:
            endpoint._server.stop()
            await asyncio.wait({endpoint._serving})
            with pytest.raises(RuntimeError, match=str(endpoints.port)):
                endpoint.check_health()
    socket.create_server((HERE, endpoints.port)).close()


@in_virtual_time
async def test_one_that_cannot_begin_says_why(
    at_port: Callable[..., Any],
    config: EndpointConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Serve has it fail to start; it does not wait for the gate for ever."""
    async with at_port(config, 0) as (_, endpoints):
        monkeypatch.setenv("MINICLUSTER_API_KEYS", "alice")
        with pytest.raises(InputError, match="MINICLUSTER_API_KEYS"):
            await endpoints.start()


@in_virtual_time
async def test_endpoints_at_one_port_share_all_counts(
    at_port: Callable[..., Any],
    config: EndpointConfig,
    monkeypatch: pytest.MonkeyPatch,
    replicas: Replicas,
) -> None:
    """Whichever of them a request comes to, its key's limit is one, and so are the metrics."""
    monkeypatch.setenv("MINICLUSTER_API_KEYS", f"alice:{KEY}:4")
    replicas.go_on.clear()
    async with at_port(config, 2) as (gates, endpoints):
        endpoints.client.headers["Authorization"] = f"Bearer {KEY}"
        streams = await endpoints.streams(4)
        answers = await asyncio.gather(*(endpoints.ask() for _ in range(12)))
        assert {each.status_code for each in answers} == {429}
        replicas.go_on.set()
        assert {(await each).status_code for each in streams} == {200}
        found = await endpoints.series()
        assert found['minicluster_requests_total{outcome="ok",path="remote"}'] == 4
        assert found['minicluster_shed_total{reason="key"}'] == 12
        assert found['minicluster_outstanding_requests{stage="all"}'] == 0
        route = 'minicluster_http_responses_total{route="/v1/completions",status='
        assert [found[f'{route}"{status}"}}'] for status in (200, 429)] == [4, 12]
        assert gates.gate.is_empty


@in_virtual_time
async def test_another_plan_takes_the_next_request(
    at_port: Callable[..., Any],
    config: EndpointConfig,
    monkeypatch: pytest.MonkeyPatch,
    replicas: Replicas,
) -> None:
    """The stream in flight ends where it began; counts and keys go on, limits are the new ones."""
    monkeypatch.setenv("MINICLUSTER_API_KEYS", f"alice:{KEY}:2")
    others = replace(config, plan_hash="other", slo=SloSpec(ttft_s=0.7, tpot_s=0.05))
    other = settings_of(others, "2", drain_s=HOUR_S)
    replicas.go_on.clear()
    async with at_port(config, 1) as (gates, endpoints):
        client, gate = endpoints.client, gates.gate
        client.headers["Authorization"] = f"Bearer {KEY}"
        [stream] = await endpoints.streams(1)
        await replicas.start("Prefill2", "p2")
        await replicas.start("Decode2")
        assert await gate.prepare(other) == ["no decode replica is up"]
        await replicas.start("Decode2", "d2")
        assert await gate.prepare(other) == []
        assert (await client.get("/plan")).json()["planned"]["plan_hash"] == config.plan_hash
        await gate.reconfigure(other)
        draining = asyncio.create_task(gate.drain_former())
        await serving_by(gate, "Decode2")
        assert (await client.get("/plan")).json()["planned"]["plan_hash"] == "other"
        replicas.answered.clear()
        assert (await endpoints.ask()).status_code == 200
        assert replicas.answered == {"d2": 1}
        # The key may have two requests in flight, and one of them is at the former plan's replicas.
        [second] = await endpoints.streams(1)
        assert (await endpoints.ask()).status_code == 429
        assert not draining.done()
        replicas.go_on.set()
        assert (await stream).text.endswith(WHOLE)
        assert await draining == 0
        assert (await second).text.endswith(WHOLE)
        found = await endpoints.series()
        assert found['minicluster_slo_seconds{quantity="ttft"}'] == 0.7
        assert found['minicluster_requests_total{outcome="ok",path="remote"}'] == 3
        assert await gate.drain() == 0


@in_virtual_time
async def test_a_plan_that_comes_back_serves_and_drains_as_any_other(
    at_port: Callable[..., Any], config: EndpointConfig, replicas: Replicas
) -> None:
    """Also while its first requests go on: each drain waits for all of them."""
    other = settings_of(replace(config, plan_hash="other"), "2", drain_s=HOUR_S)
    replicas.go_on.clear()
    async with at_port(config, 1) as (gates, endpoints):
        await replicas.start("Decode2", "d2")
        await replicas.start("Prefill2", "p2")
        streams = await endpoints.streams(1)
        for each in (other, gates.settings):
            await gates.gate.reconfigure(each)
            await serving_by(gates.gate, each["servers"]["d0"])
            streams += await endpoints.streams(1)
        assert replicas.answered == {"d": 2, "d2": 1}
        draining = asyncio.create_task(gates.gate.drain())
        await asyncio.sleep(0.5)
        assert (await endpoints.ask()).status_code == 503
        assert not draining.done()
        replicas.go_on.set()
        assert await draining == 0
        for stream in streams:
            assert (await stream).text.endswith(WHOLE)


@in_virtual_time
async def test_the_end_of_a_lone_endpoint_refuses_new_work_until_the_last_answer(
    at_port: Callable[..., Any], config: EndpointConfig, replicas: Replicas
) -> None:
    """Nothing else answers at its port; clients are told to come again."""
    replicas.go_on.clear()
    async with at_port(config, 1) as (gates, endpoints):
        [stream] = await endpoints.streams(1)
        ending = asyncio.create_task(endpoints.end(endpoints.running[0]))
        await asyncio.sleep(0.5)
        late = await endpoints.ask()
        assert (late.status_code, late.json()["error"]["code"]) == (503, "stopping")
        assert not ending.done()
        replicas.go_on.set()
        assert (await stream).text.endswith(WHOLE)
        await ending
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty
        with pytest.raises(httpx.ConnectError):
            await endpoints.ask()


@in_virtual_time
async def test_the_end_of_one_of_two_endpoints_is_not_noticed(
    at_port: Callable[..., Any], config: EndpointConfig, replicas: Replicas
) -> None:
    """It listens no more at once, and its streams end first; the other has all new requests."""
    replicas.go_on.clear()
    async with at_port(config, 2) as (gates, endpoints):
        streams = await endpoints.streams(6)
        ending = asyncio.create_task(endpoints.end(endpoints.running[0]))
        await asyncio.sleep(0.5)
        answers = [await endpoints.ask() for _ in range(6)]
        assert {each.status_code for each in answers} == {200}
        replicas.go_on.set()
        for stream in streams:
            assert (await stream).text.endswith(WHOLE)
        await ending
        await asyncio.sleep(0.1)
        assert gates.gate.is_empty
        assert await gates.gate.serves() == {"d0": "Decode"}


@in_virtual_time
@pytest.mark.parametrize("dies", [True, False])
async def test_endpoints_serve_again_when_a_gate_that_had_them_drain_has_a_successor(
    at_port: Callable[..., Any], config: EndpointConfig, replicas: Replicas, *, dies: bool
) -> None:
    """Whether its drain was over or not; the streams in flight are not touched."""
    replicas.go_on.clear()
    async with at_port(config, 2) as (gates, endpoints):
        [stream] = await endpoints.streams(1)
        draining = asyncio.create_task(gates.gate.drain())
        await asyncio.sleep(0.5)
        assert (await endpoints.ask()).status_code == 503
        if dies:
            draining.cancel()
        else:
            replicas.go_on.set()
            assert await draining == 0
        gates.die()
        gate = await gates.start()
        while len(gate._endpoints) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await serving_by(gate, "Decode")
        answers = [await endpoints.ask() for _ in range(4)]
        assert {each.status_code for each in answers} == {200}
        replicas.go_on.set()
        assert (await stream).text.endswith(WHOLE)
        await asyncio.sleep(0.1)
        assert gate.is_empty
        assert await gate.drain() == 0


@in_virtual_time
async def test_requests_wait_while_there_is_no_gate(
    at_port: Callable[..., Any],
    config: EndpointConfig,
    monkeypatch: pytest.MonkeyPatch,
    replicas: Replicas,
) -> None:
    """Streams in flight go on; whoever has waited too long is told to come again."""
    replicas.go_on.clear()
    monkeypatch.setattr(ingress, "WAIT_S", HOUR_S)
    async with at_port(config, 2) as (gates, endpoints):
        streams = await endpoints.streams(4)
        gates.die()
        waiting = [asyncio.create_task(endpoints.ask()) for _ in range(4)]
        await asyncio.sleep(2.0)
        assert not any(each.done() for each in (*waiting, *streams))
        gate = await gates.start()
        assert [(await each).status_code for each in waiting] == [200] * 4
        while len(gate._endpoints) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert gate.outstanding == {"prefill": 0, "all": 4}
        replicas.go_on.set()
        for stream in streams:
            assert (await stream).text.endswith(WHOLE)
        await asyncio.sleep(0.1)
        assert gate.is_empty
        gates.die()
        monkeypatch.setattr(ingress, "WAIT_S", 15.0)
        refused = await endpoints.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gate_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await endpoints.client.get("/health")).status_code == 200
        await gates.start()
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_all_end_with_the_last_answer(
    at_port: Callable[..., Any], config: EndpointConfig, replicas: Replicas
) -> None:
    """Where gate and endpoints are ended at once, the gate is there until they have ended."""
    replicas.go_on.clear()
    async with at_port(config, 2) as (gates, endpoints):
        streams = await endpoints.streams(4)
        ending = [asyncio.create_task(endpoints.end(each)) for each in [*endpoints.running]]
        # Time is virtual, what sockets carry is not: on a busy machine it takes a while.
        async with asyncio.timeout(60.0):
            while not all(each.ends for each in gates.gate._endpoints.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        gone = asyncio.create_task(GateServer.__del__(gates.gate))
        await asyncio.sleep(60.0)
        # The kernel may hand all streams to one endpoint: the other one ends at once.
        assert not gone.done()
        assert not all(endpoint.done() for endpoint in ending)
        replicas.go_on.set()
        for stream in streams:
            assert (await stream).text.endswith(WHOLE)
        await asyncio.gather(gone, *ending)
        assert gates.gate.is_empty


async def serving_by(gate: OneGate, deployment: str) -> None:
    """Wait until all endpoints have the plan of a deployment."""
    while await gate.serves() != {"d0": deployment}:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
