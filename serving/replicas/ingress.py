"""
The OpenAI-compatible endpoint as a Ray Serve deployment.

It replaces Ray's `OpenAiIngress`, which imports the engine (8 s of start, 0.6 GB), batches, hides
errors in 500s and lets clients forge KV transfers (docs/adr/0102). This module must not import
vLLM.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.api.access_log import write_access_log
from serving.api.app import api_app
from serving.api.http_server import HttpLimits, HttpServer
from serving.cluster.logs import ACCESS_LOG
from serving.cluster.serve_compat import before_sigterm, keep_log_open, serve_logs
from serving.protocol.endpoint_config import from_plain
from serving.replicas.serve_backend import ServeBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.applications import Starlette

    from serving.api.tls import TlsFiles

CLOSE_S = 5.0
"""Time for connections to close, after the last answer or the limit."""

IDLE_CONNECTIONS = 1024
"""Connections beyond two for each sequence that the plan's replicas decode at once."""


@serve.ingress()
class Ingress:
    """The endpoint: checks requests, sends them to decode, reports times in `Server-Timing`."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        servers: Mapping[str, Any],
        prefill: Mapping[str, Any],
        address: tuple[str, int] | None = None,
        tls: TlsFiles | None = None,
        drain_s: float = 0.0,
    ) -> None:
        """
        Take the plan and the handles of all pools: see `serving.protocol.endpoint_config`.

        With an *address* it listens there itself, with *tls* by HTTPS; without one Ray Serve's
        proxy forwards requests. At its end it waits at most *drain_s* for answers under way.
        """
        keep_log_open()
        write_access_log(serve_logs() / ACCESS_LOG)
        self._config = from_plain(config)
        self._backend = ServeBackend(servers, prefill, self._config)
        self._address = address
        self._tls = tls
        self._drain_s = drain_s
        self._app: Starlette | None = None
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray calls this once, in the replica."""
        host, port = self._address or ("", None)
        self._app = app = api_app(self._config, self._backend, os.environ, host=host)
        if port is not None:
            limits = HttpLimits(connections=IDLE_CONNECTIONS + 2 * self._config.answering.sequences)
            self._server = HttpServer(
                app, host, port, limits=limits, tls=self._tls, count=app.state.count
            )
            self._serving = asyncio.create_task(self._server.serve())
        loop = asyncio.get_running_loop()
        before_sigterm(lambda: asyncio.run_coroutine_threadsafe(self.drain(), loop).result())
        return app

    def check_health(self) -> None:
        """
        Have Ray Serve replace this replica if its HTTP server has ended; Ray calls this.

        Raises:
            RuntimeError: it has.
        """
        if self._serving is not None and self._serving.done():
            error = None if self._serving.cancelled() else self._serving.exception()
            raise RuntimeError(f"the HTTP server at {self._address} has ended: {error!r}")

    async def drain(self) -> int:
        """Refuse new work, and let answers end; return how many are left at the limit."""
        return 0 if self._app is None else int(await self._app.state.drain(self._drain_s))

    async def __del__(self) -> None:
        """Drain, and stop listening: Ray Serve, past which clients connect, knows of no request."""
        await self.drain()
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await asyncio.wait({self._serving}, timeout=CLOSE_S)
