"""A small application behind our HTTP server on a free port, and clients that send raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import ParamSpec, Self

import httpx
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from serving.api.server import HttpLimits, HttpServer
from serving.api.tls import TlsFiles
from serving.cluster.ports import free_ports

HOST = "127.0.0.1"
LIMIT_S = 10.0
Given = ParamSpec("Given")
QUICK = HttpLimits(handshake_s=0.5, header_s=0.5, body_s=0.5, send_s=0.5, linger_s=0.5)
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


class Server:
    """An application that echoes, hangs, streams and fails, behind our server on a free port."""

    def __init__(self, limits: HttpLimits | None = None, tls: TlsFiles | None = None) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        routes = [
            Route(f"/{each.__name__}", each, methods=["POST"])
            for each in (self.echo, self.hang, self.stream, self.fail, self.flood)
        ]
        [self.port] = free_ports(1)
        app = Starlette(routes=routes)
        self.counted: list[int] = []
        self.listener = HttpServer(
            app, HOST, self.port, limits=limits, tls=tls, count=self.counted.append
        )

    async def echo(self, request: Request) -> JSONResponse:
        assert request.client
        host, port = request.client
        return JSONResponse({"size": len(await request.body()), "host": host, "port": port})

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

    async def flood(self, _: Request) -> StreamingResponse:
        async def much() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * (1 << 16)
                    await asyncio.sleep(0)
            finally:
                self.cancelled.set()

        return StreamingResponse(much())


@asynccontextmanager
async def listening(
    limits: HttpLimits | None = None, tls: TlsFiles | None = None
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """Yield a server and a client of it."""
    server = Server(limits, tls)
    serving = asyncio.create_task(server.listener.serve())
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}") as client:
            yield server, client
    finally:
        server.listener.stop()
        await serving


def on_uvloop(test: Callable[Given, Coroutine[None, None, None]]) -> Callable[Given, None]:
    """Run a test, for a while at most, on the event loop that Ray Serve's replicas have."""

    @wraps(test)
    def ran(*args: Given.args, **kwargs: Given.kwargs) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return ran


class Connection:
    """A client that sends and reads bytes as it likes."""

    def __init__(self, port: int, *, context: ssl.SSLContext | None = None) -> None:
        self._given = {"host": HOST, "port": port, "ssl": context}

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(**self._given)  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def says(self, sent: bytes) -> bytes:
        """Send bytes; return all that comes until the connection is closed."""
        self.writer.write(sent)
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""
