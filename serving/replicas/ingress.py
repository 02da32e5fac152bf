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
from serving.api.http_server import HttpServer
from serving.cluster.logs import ACCESS_LOG
from serving.cluster.serve_compat import keep_log_open, serve_logs
from serving.protocol.endpoint_config import from_plain
from serving.replicas.serve_backend import ServeBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.applications import Starlette


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
    ) -> None:
        """
        Take the plan and the handles of all pools: see `serving.protocol.endpoint_config`.

        With an *address* it listens there itself; without one Ray Serve's proxy forwards requests.
        """
        keep_log_open()
        write_access_log(serve_logs() / ACCESS_LOG)
        self._config = from_plain(config)
        self._backend = ServeBackend(servers, prefill, self._config)
        self._address = address
        self._serving: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray calls this once, in the replica."""
        app = api_app(self._config, self._backend, os.environ)
        if self._address is not None:
            self._serving = asyncio.create_task(HttpServer(app, *self._address).serve())
        return app
