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
from serving.cluster.serve_compat import keep_log_open, serve_logs
from serving.protocol.endpoint_config import from_plain
from serving.replicas.serve_backend import ServeBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.applications import Starlette

    from serving.api.tls import TlsFiles

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
    ) -> None:
        """
        Take the plan and the handles of all pools: see `serving.protocol.endpoint_config`.

        With an *address* it listens there itself, with *tls* by HTTPS; without one Ray Serve's
        proxy forwards requests.
        """
        keep_log_open()
        write_access_log(serve_logs() / ACCESS_LOG)
        self._config = from_plain(config)
        self._backend = ServeBackend(servers, prefill, self._config)
        self._address = address
        self._tls = tls
        self._serving: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray calls this once, in the replica."""
        host, port = self._address or ("", None)
        app = api_app(self._config, self._backend, os.environ, host=host)
        if port is not None:
            limits = HttpLimits(connections=IDLE_CONNECTIONS + 2 * self._config.answering.sequences)
            server = HttpServer(app, host, port, limits=limits, tls=self._tls)
            self._serving = asyncio.create_task(server.serve())
        return app
