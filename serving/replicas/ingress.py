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

from serving.admission.controller import AdmissionController
from serving.api.access_log import write_access_log
from serving.api.app import api_app
from serving.api.http_server import HttpLimits, HttpServer
from serving.api.metrics import Metrics
from serving.api.readiness import ReadyCheck
from serving.cluster.logs import ACCESS_LOG
from serving.cluster.serve_compat import before_sigterm, keep_log_open, serve_logs
from serving.cluster.token import channel_tls
from serving.protocol.endpoint_config import from_plain
from serving.replicas.backend import ReplicaBackend
from serving.replicas.replica_seats import ReplicaSeats

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from serving.api.tls import TlsFiles

CLOSE_S = 5.0
"""Time for connections to close, after the last answer or the limit."""

IDLE_CONNECTIONS = 1024
"""Connections beyond two for each sequence that the plan's replicas decode at once."""


@serve.ingress()
class Ingress:
    """
    The endpoint: checks requests, sends them to decode, reports times in `Server-Timing`.

    Its settings are those of `serving.replicas.app.endpoint_settings`. With other ones a request
    in flight ends as it began, and the next one goes by the new plan to the new replicas.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        pools: object = None,  # noqa: ARG002
        address: tuple[str, int] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """
        Take the plan, and the names of the deployments that it calls.

        With an *address* it listens there itself, with *tls* by HTTPS; without one Ray Serve's
        proxy forwards requests. Through *pools* Ray Serve finds the deployments to start.
        """
        keep_log_open()
        write_access_log(serve_logs() / ACCESS_LOG)
        self._settings = settings
        self._address = address
        self._tls = tls
        self._app: Starlette | None = None
        self._tls_calls = channel_tls(os.environ, listens=False)
        self._backend: ReplicaBackend | None = None
        self._prepared: tuple[dict[str, Any], ReplicaBackend] | None = None
        self._draining: set[asyncio.Task[int]] = set()
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; Ray calls this once, in the replica."""
        self._backend = _backend(self._settings, self._tls_calls)
        self._app = app = self._built(self._settings, self._backend)

        # A function, because uvicorn takes a bound method for the older interface.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            assert self._app is not None  # noqa: S101  (for the type checker)
            await self._app(scope, receive, send)

        if self._address is not None:
            host, port = self._address
            limits = HttpLimits(connections=_connections(app))
            self._server = HttpServer(
                answer, host, port, limits=limits, tls=self._tls, count=app.state.count
            )
            self._serving = asyncio.create_task(self._server.serve())
        loop = asyncio.get_running_loop()
        before_sigterm(lambda: asyncio.run_coroutine_threadsafe(self.drain(), loop).result())
        return answer

    def _built(self, settings: dict[str, Any], backend: ReplicaBackend) -> Starlette:
        """Return the application of *settings*, which goes on where that of now ends."""
        config = from_plain(settings["config"])
        host = "" if self._address is None else self._address[0]
        return api_app(config, backend, os.environ, host=host, former=self._app)

    async def prepare(self, settings: dict[str, Any]) -> list[str]:
        """
        Have the handles of *settings* ready to switch to: send a request through every domain.

        Returns:
            What is lacking; nothing: requests get through.
        """
        config = from_plain(settings["config"])
        backend = _backend(settings, self._tls_calls)
        check = ReadyCheck(config, backend, AdmissionController(config), Metrics(config))
        _, lacking = await check.check()
        if lacking:
            backend.close()
            return lacking
        _, unused = self._prepared or (None, None)
        if unused is not None:
            unused.close()
        self._prepared = settings, backend
        return []

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Serve by *settings* from the next request on; Ray Serve calls this when they change."""
        former, left, drain_s = self._app, self._backend, self._settings["drain_s"]
        if settings == self._settings or former is None:
            return
        prepared, backend = self._prepared or (None, None)
        if backend is None or prepared != settings:
            if backend is not None:
                backend.close()
            backend = _backend(settings, self._tls_calls)
        self._app, self._prepared = self._built(settings, backend), None
        self._backend = backend
        self._settings = settings
        if self._server is not None:
            self._server.allow(_connections(self._app))
        draining: asyncio.Task[int] = asyncio.create_task(_drained(former, left, drain_s))
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)

    async def serves(self) -> dict[str, str]:
        """Return the deployment that answers in each domain."""
        servers: dict[str, str] = self._settings["servers"]
        return servers

    async def drain_former(self) -> int:
        """Wait until requests of former plans have ended; return how many are left at the limit."""
        return sum(await asyncio.gather(*self._draining))

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
        if self._app is None:
            return 0
        now = self._app.state.drain(self._settings["drain_s"])
        return sum(await asyncio.gather(now, *self._draining))

    async def __del__(self) -> None:
        """Drain, and stop listening: Ray Serve, past which clients connect, knows of no request."""
        await self.drain()
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await asyncio.wait({self._serving}, timeout=CLOSE_S)


def _backend(settings: Mapping[str, Any], tls: ssl.SSLContext | None) -> ReplicaBackend:
    """Return the pools of *settings*, which names a deployment of this application per domain."""
    config = from_plain(settings["config"])
    app = serve.get_replica_context().app_name
    named = ((config.answering.role, settings["servers"]), ("prefill", settings["prefill"]))
    handles = {
        (role, domain): serve.get_deployment_handle(name, app)
        for role, names in named
        for domain, name in names.items()
    }
    return ReplicaBackend(config, ReplicaSeats(config, handles, tls))


async def _drained(former: Starlette, backend: ReplicaBackend | None, drain_s: float) -> int:
    """Let the answers of a former plan end; return how many are left, which may still go on."""
    left: int = await former.state.drain(drain_s)
    if not left and backend is not None:
        backend.close()
    return left


def _connections(app: Starlette) -> int:
    sequences: int = app.state.completions.config.answering.sequences
    return IDLE_CONNECTIONS + 2 * sequences
