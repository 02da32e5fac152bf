"""
The OpenAI-compatible endpoint as Ray Serve runs it.

Not Ray's `OpenAiIngress`: that one imports the engine (8 s of start, 0.6 GB), batches, hides
errors in 500s and lets clients forge KV transfers; see docs/adr/0102.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.api.app import front_app
from serving.api.http_server import Listener
from serving.cluster.serve_compat import keep_log
from serving.protocol.endpoint_config import front_from
from serving.replicas.serve_backend import ServeBackend
from serving.replicas.timeouts import patience_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.applications import Starlette


@serve.ingress()
class Ingress:
    """Checks requests, sends them to decode, and says in `Server-Timing` where the time went."""

    def __init__(
        self,
        front: dict[str, Any],
        *,
        servers: Mapping[str, Any],
        prefill: Mapping[str, Any],
        address: tuple[str, int] | None = None,
    ) -> None:
        """
        Keep what the plan says and handles of all pools: see `serving.protocol.endpoint_config`.

        With an *address* it listens there itself; else Ray Serve's proxy brings requests.
        """
        keep_log()
        self._front = front_from(front)
        self._servers = ServeBackend(servers, prefill, patience_of(self._front))
        self._address = address
        self._listening: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray calls this once, in the replica."""
        app = front_app(self._front, self._servers, os.environ)
        if self._address is not None:
            self._listening = asyncio.create_task(Listener(app, *self._address).serve())
        return app
