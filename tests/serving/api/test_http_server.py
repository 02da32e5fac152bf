"""The endpoint's own server: answers, clients that disconnect, and its port."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from serving.api.http_server import PARTS_AHEAD, HttpServer

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
        self.listener = HttpServer(Starlette(routes=routes), HOST, 0)

    async def echo(self, request: Request) -> JSONResponse:
        return JSONResponse({"size": len(await request.body())})

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

    async def send(
        self, path: str, body: bytes = b"", header: bytes = b"x"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request and leave the connection open."""
        reader, writer = await asyncio.open_connection(HOST, self.listener.port)
        writer.write(request_of(path, body, header))
        await writer.drain()
        return reader, writer

    async def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request, and read its answer."""
        reader, writer = await self.send(path, body)
        with closing(writer):
            return await answer_in(reader)


def request_of(path: str, body: bytes, header: bytes = b"x") -> bytes:
    head = f"POST /{path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\nX-Request-Id: "
    return head.encode() + header + b"\r\n\r\n" + body


async def answer_in(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(size)


@asynccontextmanager
async def listening() -> AsyncIterator[Server]:
    server = Server()
    serving = asyncio.create_task(server.listener.serve())
    try:
        yield server
    finally:
        server.listener.stop()
        await serving


def within_limit(asked: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(asked, LIMIT_S))


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
def test_bodies_arrive_whole_and_connections_are_used_again(size: int) -> None:
    """Also ones of far more parts than are read ahead."""
    assert size < 2 or size > PARTS_AHEAD

    async def asked() -> None:
        async with listening() as server:
            reader, writer = await server.send("echo", b"x" * size)
            with closing(writer):
                status, body = await answer_in(reader)
                assert (status, json.loads(body)) == (200, {"size": size})
                writer.write(request_of("echo", b"ab"))
                assert await answer_in(reader) == (200, b'{"size":2}')

    within_limit(asked())


@pytest.mark.parametrize("path", ["hang", "stream"])
def test_clients_that_hang_up_end_the_work(path: str) -> None:
    """Before the answer, and in the middle of it."""

    async def asked() -> None:
        async with listening() as server:
            _, writer = await server.send(path)
            await asyncio.wait_for(server.begun.wait(), LIMIT_S)
            assert not server.cancelled.is_set()
            writer.transport.abort()
            await asyncio.wait_for(server.cancelled.wait(), LIMIT_S / 2)
            assert await server.answer("echo", b"y") == (200, b'{"size":1}')

    within_limit(asked())


def test_an_exception_is_a_500_without_details() -> None:
    """The endpoint answers its own; this is for what it did not foresee."""

    async def asked() -> None:
        async with listening() as server:
            assert await server.answer("fail", b"") == (500, b"Internal Server Error")

    within_limit(asked())


def test_a_taken_port_is_an_error_at_once() -> None:
    """Ray Serve then starts the replica again."""
    with (
        closing(HttpServer(Starlette(), HOST, 0)) as first,
        pytest.raises(OSError, match="in use"),
    ):
        HttpServer(Starlette(), HOST, first.port)


@pytest.mark.parametrize(
    ("name", "status"),
    [(b"\x00", b"400"), (b"forged\rline", b"400"), (b"x" * (1 << 20), b"200")],
    ids=["NUL", "line", "1 MiB"],
)
def test_a_header_of_any_content_ends_nothing_but_its_request(name: bytes, status: bytes) -> None:
    """Control characters are refused, any length is read; the server answers the next one."""

    async def asked() -> None:
        async with listening() as server:
            reader, writer = await server.send("echo", header=name)
            with closing(writer):
                assert (await reader.readline()).split()[1] == status
            assert await server.answer("echo", b"y") == (200, b'{"size":1}')

    within_limit(asked())
