"""
The endpoint's own HTTP server, inside its Serve replica.

Ray Serve's proxy would send each request and token through one more process: 10 ms of a TTFT on
two cores, and half a minute without an answer if it dies (docs/adr/0113).
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEEP_ALIVE_S = 90
"""Idle time of a connection until the server closes it; longer than clients keep theirs."""

BACKLOG = 2048
PARTS_AHEAD = 4
"""Parts of a request's body that are read before the application asks for them."""


class HttpServer:
    """A uvicorn server of one application, with a socket of its own."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """
        Bind the port, without accepting requests yet.

        Raises:
            OSError: the port cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        config = uvicorn.Config(
            CancelOnDisconnect(app),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)

    async def serve(self) -> None:
        """Answer until stopped, and release the port."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Stop accepting requests; `serve` returns after the last answer."""
        self._server.should_exit = True


class CancelOnDisconnect:
    """Cancels the application's work when the client disconnects, as Ray Serve's proxy does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        messages: asyncio.Queue[Message] = asyncio.Queue(PARTS_AHEAD)
        answered = False

        async def passed(message: Message) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, messages.get, passed))

        async def listen() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" and not answered:
                    answering.cancel()
                    return
                await messages.put(message)
                if message["type"] == "http.disconnect":
                    return

        listening = asyncio.ensure_future(listen())
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()
            listening.cancel()
        if not answering.cancelled():
            answering.result()
