"""The endpoint's end: answers under way finish, and nothing else begins."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from serving.api.drain import DrainingApp
from serving.api.http_server import HttpServer
from serving.cluster.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

LIMIT_S = 30.0


class Endpoint:
    """A stream that ends when the test says so, behind our server."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()
        routes = [
            Route("/stream", self.stream, methods=["POST"]),
            Route("/health", self.look),
            Route("/ready", self.look),
        ]
        self.counted: list[int] = []
        self.app = DrainingApp(Starlette(routes=routes), self.counted.append)

    async def stream(self, _: Request) -> StreamingResponse:
        async def tokens() -> AsyncIterator[str]:
            yield "data: first\n\n"
            self.begun.set()
            await self.end.wait()
            yield "data: [DONE]\n\n"

        return StreamingResponse(tokens(), media_type="text/event-stream")

    async def look(self, _: Request) -> JSONResponse:
        return JSONResponse({})


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[Endpoint, httpx.AsyncClient, asyncio.Task[str]]]:
    """Yield an endpoint with one stream under way, a client, and that stream's text."""
    endpoint = Endpoint()
    [port] = free_ports(1)
    server = HttpServer(endpoint.app, "127.0.0.1", port)
    serving = asyncio.create_task(server.serve())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

        async def read() -> str:
            return (await client.post("/stream", timeout=LIMIT_S)).text

        answer = asyncio.create_task(read())
        await asyncio.wait_for(endpoint.begun.wait(), LIMIT_S)
        try:
            yield endpoint, client, answer
        finally:
            endpoint.end.set()
            await answer
    server.stop()
    await asyncio.wait_for(serving, LIMIT_S)


def test_a_stream_under_way_ends_and_no_other_begins() -> None:
    """New work is sent elsewhere (503, and the connection closed), as is the load balancer."""

    async def drained() -> None:
        async with streaming() as (endpoint, client, answer):
            assert (await client.get("/ready")).status_code == 200
            draining = asyncio.create_task(endpoint.app.drain(LIMIT_S))
            await asyncio.sleep(0)
            for refused in (await client.post("/stream"), await client.get("/ready")):
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "stopping"
                assert refused.headers["connection"] == "close"
                assert int(refused.headers["retry-after"]) > 0
                assert refused.headers["x-request-id"]
            assert endpoint.counted == [503, 503]
            assert (await client.get("/health")).status_code == 200
            assert not draining.done()
            endpoint.end.set()
            assert await asyncio.wait_for(draining, LIMIT_S) == 0
            assert (await answer).endswith("[DONE]\n\n")

    asyncio.run(drained())


def test_a_stream_that_goes_on_is_left_at_the_limit() -> None:
    async def left() -> None:
        async with streaming() as (endpoint, _, answer):
            assert await endpoint.app.drain(0.05) == 1
            assert not answer.done()

    asyncio.run(left())


def test_nothing_under_way_is_not_waited_for() -> None:
    async def drained() -> int:
        return await asyncio.wait_for(Endpoint().app.drain(1e9), LIMIT_S)

    assert asyncio.run(drained()) == 0
