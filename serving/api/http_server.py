"""
An HTTP server of the front door's own, in its replica.

Ray Serve's proxy would take each request and token through one more process: 10 ms of a TTFT on
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
"""Longer than clients keep a connection that they mean to use again."""

BACKLOG = 2048
PARTS_AHEAD = 4
"""Of a request's body, read before the application asks for them."""


class Listener:
    """A server of one application."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """
        Take the port; nobody is answered yet.

        Raises:
            OSError: it cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        config = uvicorn.Config(
            WhileListened(app),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    async def serve(self) -> None:
        """Answer until stopped."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self.close()

    def stop(self) -> None:
        """Take no more requests; `serve` ends with the last answer."""
        self._server.should_exit = True

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


class WhileListened:
    """Ends an application's work for a client that has gone, as Ray Serve's proxy does."""

    def __init__(self, app: ASGIApp) -> None:
        """Keep the application."""
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
