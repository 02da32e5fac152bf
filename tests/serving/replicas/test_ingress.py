"""The endpoint as Ray Serve has it: its health, and its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from minicluster.specs.slo import SloSpec
from serving.api.access_log import access_log
from serving.cluster.ports import free_ports
from serving.protocol.endpoint_config import EndpointConfig, to_plain
from serving.replicas.ingress import Ingress
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import KEY, ONE
from tests.serving.virtual_time import in_virtual_time

OURS: Any = Ingress.__wrapped__  # type: ignore[attr-defined]


class Endpoint(OURS):
    """Ours without Ray Serve around it."""

    def __del__(self) -> None:
        """Python's own end: Ray Serve awaits ours before."""


class Pools(FakeServers):
    """Servers that know whether they may still be called."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leave this process's signals and logs alone: it is no worker of Ray."""
    monkeypatch.setattr("serving.replicas.ingress.before_sigterm", lambda _wait: None)
    monkeypatch.setattr("serving.replicas.ingress.serve_logs", lambda: tmp_path)
    here = SimpleNamespace(get_replica_context=lambda: SimpleNamespace(app_name="minicluster"))
    monkeypatch.setattr("serving.replicas.ingress.serve", here)
    kept = [*access_log.handlers]
    yield
    for handler in {*access_log.handlers} - {*kept}:
        access_log.removeHandler(handler)
        handler.close()


def _settings(config: EndpointConfig, drain_s: float = 1.0) -> dict[str, Any]:
    """Return an endpoint's settings, without any deployment to call."""
    return {"config": to_plain(config), "servers": {}, "prefill": {}, "drain_s": drain_s}


@pytest.mark.parametrize("dies", [True, False])
def test_it_is_healthy_as_long_as_it_listens(config: EndpointConfig, *, dies: bool) -> None:
    """A server that has ended is found out, and the port is free after the end."""
    [port] = free_ports(1)

    async def used() -> None:
        address = ("127.0.0.1", port)
        ingress = Endpoint(_settings(config), address=address)
        await ingress.__serve_build_asgi_app__()
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.01)
        writer.close()
        ingress.check_health()
        if dies:
            ingress._server.stop()
            await asyncio.wait({ingress._serving})
            with pytest.raises(RuntimeError, match=str(port)):
                ingress.check_health()
        await OURS.__del__(ingress)

    asyncio.run(asyncio.wait_for(used(), 30))
    socket.create_server(("127.0.0.1", port)).close()


@in_virtual_time
async def test_another_plan_takes_the_next_request(
    config: EndpointConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream in flight ends where it began; counts and keys go on, limits are the new ones."""
    monkeypatch.setenv("MINICLUSTER_API_KEYS", f"alice:{KEY}:2")
    others = replace(config, plan_hash="other", slo=SloSpec(ttft_s=0.7, tpot_s=0.05))
    pools = {config.plan_hash: Pools(itl_s=1.0), "other": Pools()}
    monkeypatch.setattr(
        "serving.replicas.ingress._backend",
        lambda found, _tls: pools[found["config"]["plan_hash"]],
    )
    ingress = Endpoint(_settings(config, drain_s=60.0))
    transport = httpx.ASGITransport(app=await ingress.__serve_build_asgi_app__())
    headers = {"Authorization": f"Bearer {KEY}"}
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)
    streaming = asyncio.create_task(
        client.post("/v1/completions", json={**ONE, "max_tokens": 6, "stream": True})
    )
    await asyncio.sleep(0.5)

    lacking = pools["other"].up.pop(("decode", "d0"))
    assert await ingress.prepare(_settings(others)) == ["no decode replica is up"]
    assert pools["other"].closed == 1
    pools["other"].up["decode", "d0"] = lacking
    assert await ingress.prepare(_settings(others)) == []
    assert (await client.get("/plan")).json()["planned"]["plan_hash"] == config.plan_hash
    await ingress.reconfigure(_settings(others))
    draining = asyncio.create_task(ingress.drain_former())

    assert (await client.get("/plan")).json()["planned"]["plan_hash"] == "other"
    before = len(pools["other"].seen)
    assert (await client.post("/v1/completions", json=ONE)).status_code == 200
    assert (len(pools["other"].seen), pools[config.plan_hash].open) == (before + 1, 1)
    # The key may have two requests in flight, and one of them is at the former plan's replicas.
    pools["other"].itl_s = 1.0
    second = asyncio.create_task(client.post("/v1/completions", json=ONE))
    await asyncio.sleep(0.5)
    assert (await client.post("/v1/completions", json=ONE)).status_code == 429
    assert (draining.done(), pools[config.plan_hash].closed) == (False, 0)
    assert (await streaming).text.endswith("data: [DONE]\n\n")
    assert await draining == 0
    assert (pools[config.plan_hash].closed, pools["other"].closed) == (1, 1)
    assert (await second).status_code == 200
    found = (await client.get("/metrics")).text
    assert 'minicluster_slo_seconds{quantity="ttft"} 0.7' in found
    assert 'minicluster_requests_total{outcome="ok",path="remote"} 3.0' in found
    assert await asyncio.wait_for(ingress.drain(), 1.0) == 0
