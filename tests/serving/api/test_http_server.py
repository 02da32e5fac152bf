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
    from collections.abc import AsyncIterator

    from starlette.requests import Request

HOST = "127.0.0.1"
LIMIT_S = 10.0


class Seen:
    """What became of the requests."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.finished = 0


@asynccontextmanager
async def listening(seen: Seen) -> AsyncIterator[int]:
    """Have an application up that echoes, hangs and streams; yields its port."""

    async def echo(request: Request) -> JSONResponse:
        size = len(await request.body())
        seen.finished += 1
        return JSONResponse({"size": size})

    async def hang(_: Request) -> JSONResponse:
        seen.begun.set()
        try:
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            seen.cancelled.set()
            raise
        return JSONResponse({})

    async def stream(_: Request) -> StreamingResponse:
        async def tokens() -> AsyncIterator[str]:
            try:
                while True:
                    yield "data: x\n\n"
                    seen.begun.set()
                    await asyncio.sleep(0.01)
            finally:
                seen.cancelled.set()

        return StreamingResponse(tokens(), media_type="text/event-stream")

    async def fail(_: Request) -> JSONResponse:
        raise RuntimeError("inside")

    routes = [
        Route(f"/{each.__name__}", each, methods=["POST"]) for each in (echo, hang, stream, fail)
    ]
    listener = HttpServer(Starlette(routes=routes), HOST, 0)
    serving = asyncio.create_task(listener.serve())
    try:
        yield listener.port
    finally:
        listener.stop()
        await serving


async def opened(
    port: int, path: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and leave the connection open."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(
        f"POST /{path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    writer.write(body)
    await writer.drain()
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one answer of known length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(size)


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
def test_bodies_arrive_whole_and_connections_are_used_again(size: int) -> None:
    """Also ones of far more parts than are read ahead."""
    assert size < 2 or size > PARTS_AHEAD

    async def asked() -> None:
        seen = Seen()
        async with listening(seen) as port:
            reader, writer = await opened(port, "echo", b"x" * size)
            for number in range(2):
                if number:
                    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
                status, body = await answer(reader)
                assert (status, json.loads(body)) == (200, {"size": 2 if number else size})
            writer.close()
        assert seen.finished == 2

    asyncio.run(asyncio.wait_for(asked(), LIMIT_S))


@pytest.mark.parametrize("path", ["hang", "stream"])
def test_who_hangs_up_ends_the_work(path: str) -> None:
    """Before the answer, and in the middle of it."""

    async def asked() -> None:
        seen = Seen()
        async with listening(seen) as port:
            _, writer = await opened(port, path)
            await asyncio.wait_for(seen.begun.wait(), LIMIT_S)
            assert not seen.cancelled.is_set()
            writer.transport.abort()
            await asyncio.wait_for(seen.cancelled.wait(), LIMIT_S / 2)
            reader, writer = await opened(port, "echo", b"y")
            assert await answer(reader) == (200, b'{"size":1}')
            writer.close()

    asyncio.run(asyncio.wait_for(asked(), LIMIT_S))


def test_an_exception_is_a_500_without_details() -> None:
    """The endpoint answers its own; this is for what it did not foresee."""

    async def asked() -> None:
        async with listening(Seen()) as port:
            reader, writer = await opened(port, "fail")
            status, body = await answer(reader)
            assert (status, body) == (500, b"Internal Server Error")
            writer.close()

    asyncio.run(asyncio.wait_for(asked(), LIMIT_S))


def test_a_taken_port_is_an_error_at_once() -> None:
    """Ray Serve then starts the replica again."""
    with closing(HttpServer(Starlette(), HOST, 0)) as first, pytest.raises(OSError, match="in use"):
        HttpServer(Starlette(), HOST, first.port)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        (b"\x00", 400),
        (b"a\x07b", 400),
        (b"forged\rline", 400),
        (b"x" * 65_536, 200),
        (b"x" * (1 << 20), 200),
    ],
    ids=["NUL", "bell", "line", "64 KiB", "1 MiB"],
)
def test_a_header_of_any_content_ends_nothing_but_its_request(name: bytes, status: int) -> None:
    """Control characters are refused, any length is read; the server answers the next one."""

    async def asked() -> int:
        async with listening(Seen()) as port:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + name)
            writer.write(b"\r\nContent-Length: 0\r\n\r\n")
            said = int((await reader.readline()).split()[1])
            writer.close()
            reader, writer = await opened(port, "echo", b"y")
            assert await answer(reader) == (200, b'{"size":1}')
            writer.close()
        return said

    assert asyncio.run(asyncio.wait_for(asked(), LIMIT_S)) == status
