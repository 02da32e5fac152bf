"""The endpoint's own server: answers, clients that disconnect, and its port."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from serving.api.http_server import HttpServer
from serving.cluster.ports import free_ports
from tests.serving.command import taken_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from starlette.requests import Request

HOST = "127.0.0.1"
LIMIT_S = 10.0


class Server:
    """An application that echoes, hangs, streams and fails, behind our server on a free port."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        routes = [
            Route(f"/{each.__name__}", each, methods=["POST"])
            for each in (self.echo, self.hang, self.stream, self.fail)
        ]
        [self.port] = free_ports(1)
        self.listener = HttpServer(Starlette(routes=routes), HOST, self.port)

    async def echo(self, request: Request) -> JSONResponse:
        assert request.client
        return JSONResponse({"size": len(await request.body()), "port": request.client.port})

    async def hang(self, _: Request) -> JSONResponse:
        self.begun.set()
        try:
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return JSONResponse({})

    async def stream(self, _: Request) -> StreamingResponse:
        async def tokens() -> AsyncIterator[str]:
            try:
                while True:
                    yield "data: x\n\n"
                    self.begun.set()
                    await asyncio.sleep(0.01)
            finally:
                self.cancelled.set()

        return StreamingResponse(tokens(), media_type="text/event-stream")

    async def fail(self, _: Request) -> JSONResponse:
        raise RuntimeError("inside")


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """Yield a server and a client of it."""
    server = Server()
    serving = asyncio.create_task(server.listener.serve())
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}") as client:
            yield server, client
    finally:
        server.listener.stop()
        await serving


def within_limit(asked: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(asked, LIMIT_S))


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
def test_bodies_arrive_whole_and_connections_are_used_again(size: int) -> None:
    """Also ones of many parts, and after a header of 60 kB."""

    async def asked() -> None:
        async with listening() as (_, client):
            first = await client.post("/echo", content=b"x" * size)
            second = await client.post("/echo", content=b"ab", headers={"X": "x" * 60_000})
            assert [each.json()["size"] for each in (first, second)] == [size, 2]
            assert first.json()["port"] == second.json()["port"]

    within_limit(asked())


@pytest.mark.parametrize("path", ["hang", "stream"])
def test_clients_that_hang_up_end_the_work(path: str) -> None:
    """Before the answer, and in the middle of it."""

    async def asked() -> None:
        async with listening() as (server, client):
            asking = asyncio.create_task(client.post(path))
            await asyncio.wait_for(server.begun.wait(), LIMIT_S)
            assert not server.cancelled.is_set()
            asking.cancel()
            await asyncio.wait_for(server.cancelled.wait(), LIMIT_S / 2)
            assert (await client.post("/echo")).status_code == 200

    within_limit(asked())


def test_an_exception_is_a_500_without_details() -> None:
    """The endpoint answers its own; this is for what it did not foresee."""

    async def asked() -> None:
        async with listening() as (_, client):
            answer = await client.post("/fail")
            assert (answer.status_code, answer.text) == (500, "Internal Server Error")

    within_limit(asked())


def test_a_taken_port_is_an_error_at_once() -> None:
    """Ray Serve then starts the replica again."""
    with taken_port(HOST) as port, pytest.raises(OSError, match="in use"):
        HttpServer(Starlette(), HOST, int(port))


@pytest.mark.parametrize("value", [b"\x00", b"forged\rline"], ids=["NUL", "line"])
def test_a_header_with_control_characters_ends_nothing_but_its_request(value: bytes) -> None:
    """It is refused, and the server answers the next request."""

    async def asked() -> None:
        async with listening() as (server, client):
            reader, writer = await asyncio.open_connection(HOST, server.port)
            with closing(writer):
                writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + value)
                writer.write(b"\r\n\r\n")
                assert (await reader.readline()).split()[1] == b"400"
            assert (await client.post("/echo")).status_code == 200

    within_limit(asked())
