"""The endpoint's end: answers under way finish, and nothing else begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette

from serving.protocol.messages import EndpointConfig
from tests.serving.endpoint_app import endpoint_app
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import ONE
from tests.serving.virtual_time import in_virtual_time

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def _streaming(
    config: EndpointConfig,
) -> AsyncIterator[tuple[Starlette, httpx.AsyncClient, asyncio.Task[httpx.Response]]]:
    """Yield an endpoint, a client, and its stream of three seconds that has just begun."""
    app = endpoint_app(config, FakeServers(itl_s=1.0), {})
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = asyncio.create_task(client.post(COMPLETIONS, json={**ONE, "stream": True}))
        await asyncio.sleep(0.5)
        yield app, client, answer
        assert (await answer).text.endswith("data: [DONE]\n\n")


@in_virtual_time
async def test_a_stream_under_way_ends_and_no_other_begins(config: EndpointConfig) -> None:
    """New work is sent elsewhere (503, and the connection closed), as is the load balancer."""
    async with _streaming(config) as (app, client, answer):
        assert (await client.get("/ready")).status_code == 200
        draining = asyncio.create_task(app.state.drain(60.0))
        await asyncio.sleep(0)
        for refused in (await client.post(COMPLETIONS, json=ONE), await client.get("/ready")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) > 0
            assert refused.headers["x-request-id"]
        assert (await client.get("/health")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'responses_total{route="none",status="503"} 2.0' in metrics
        assert not draining.done()
        assert await draining == 0
        await asyncio.sleep(0)
        assert answer.done()


@in_virtual_time
async def test_a_drain_ends_at_its_limit_and_at_once_without_work(config: EndpointConfig) -> None:
    async with _streaming(config) as (app, _, answer):
        assert await app.state.drain(0.05) == 1
        assert not answer.done()
    idle = endpoint_app(config, FakeServers(), {})
    assert await asyncio.wait_for(idle.state.drain(1e9), 1.0) == 0
