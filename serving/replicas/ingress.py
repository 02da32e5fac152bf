"""
The endpoint processes as a Ray Serve deployment: each answers HTTP at the same port.

It replaces Ray's `OpenAiIngress`, which imports the engine (8 s of start, 0.6 GB), batches, hides
errors in 500s and lets clients forge KV transfers (docs/adr/0102). This module must not import
vLLM.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.api.app import api_app
from serving.api.http_server import HttpLimits, HttpServer
from serving.api.record import write_access_log
from serving.cluster.logs import access_log_name
from serving.cluster.serve_compat import before_sigterm, keep_log_open, serve_logs
from serving.cluster.token import channel_tls
from serving.protocol.app_spec import GATE
from serving.protocol.endpoint_config import from_plain
from serving.replicas.backend import ReplicaBackend
from serving.replicas.gate_server import plan_key
from serving.replicas.remote_gate import GateConnection

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from serving.api.tls import TlsFiles
    from serving.protocol.messages import ChannelPlace

CLOSE_S = 5.0
"""Time for connections to close, after the last answer or the limit."""

IDLE_CONNECTIONS = 1024
"""Connections beyond two for each sequence that the plan's replicas decode at once."""


@serve.ingress()
class Ingress:
    """
    An endpoint process: checks requests, sends them to replicas, reports times in `Server-Timing`.

    The gate tells it the plan. With another one a request in flight ends as it began, and the next
    one goes by the new plan to the new replicas.
    """

    def __init__(
        self,
        *,
        pools: object = None,  # noqa: ARG002
        address: tuple[str, int] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """
        Begin to look for the gate.

        With an *address* it listens there itself, with *tls* by HTTPS; without one Ray Serve's
        proxy forwards requests. Through *pools* Ray Serve finds the deployments to start.
        """
        keep_log_open()
        rank = serve.get_replica_context().rank.rank
        write_access_log(serve_logs() / access_log_name(rank))
        self._address = address
        self._tls = tls
        self._app: Starlette | None = None
        self._key = ""
        self._drain_s = 0.0
        self._drains: set[asyncio.Task[None]] = set()
        self._refuses = self._ends = False
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, once the gate has told the plan; Ray calls this once."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(news: dict[str, Any]) -> None:
            try:
                self._serve_by(news)
            except Exception as error:
                if not told.done():
                    told.set_exception(error)  # this process cannot start
                raise
            if not told.done():
                told.set_result(None)

        self._gate = GateConnection(_find_gate, channel_tls(os.environ, listens=False), take)
        await told

        # A function, because uvicorn takes a bound method for the older interface.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            assert self._app is not None  # noqa: S101  (for the type checker)
            await self._app(scope, receive, send)

        if self._address is not None:
            host, port = self._address
            limits = HttpLimits(connections=self._connections)
            self._server = HttpServer(
                answer, host, port, limits=limits, tls=self._tls, count=self._count
            )
            self._serving = asyncio.create_task(self._server.serve())
        loop = asyncio.get_running_loop()
        before_sigterm(lambda: asyncio.run_coroutine_threadsafe(self._end(), loop).result())
        return answer

    def _serve_by(self, news: dict[str, Any]) -> None:
        """Serve by the plan of the gate's news from the next request on."""
        settings, draining = news["settings"], news["draining"]
        key = plan_key(settings)
        # A gate that had all drain may have died, and its successor has them serve again.
        if key != self._key or (self._refuses and not draining and not self._ends):
            self._begin(key, settings, bytes.fromhex(news["cache_secret"]))
        if draining:
            self._drain()

    def _begin(self, key: str, settings: dict[str, Any], cache_secret: bytes) -> None:
        """Serve by a plan; requests by the former one end as they began."""
        config, gate = from_plain(settings["config"]), self._gate.by_plan(key)
        app = api_app(
            config,
            ReplicaBackend(config, gate),
            gate,
            os.environ,
            host="" if self._address is None else self._address[0],
            cache_secret=cache_secret,
            former=self._app,
        )
        self._drain()
        self._app, self._refuses = app, False
        self._key, self._drain_s = key, settings["drain_s"]
        self._connections = IDLE_CONNECTIONS + 2 * config.answering.sequences
        self._gate.serve_by([*self._gate.plans, key])
        if self._server is not None:
            self._server.allow(self._connections)

    def _drain(self) -> None:
        """Refuse new work of the application, and tell the gate when the last has ended."""
        if self._app is None or self._refuses:
            return
        self._refuses = True
        task = asyncio.create_task(self._drained(self._key, self._app, self._drain_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drained(self, key: str, app: Starlette, limit_s: float) -> None:
        await app.state.drain(limit_s)
        plans = [*self._gate.plans]
        plans.remove(key)
        self._gate.serve_by(plans)

    def _count(self, status: int) -> None:
        assert self._app is not None  # noqa: S101  (for the type checker)
        self._app.state.count(status)

    def check_health(self) -> None:
        """
        Have Ray Serve replace this replica if its HTTP server has ended; Ray calls this.

        Raises:
            RuntimeError: it has.
        """
        if self._serving is not None and self._serving.done():
            error = None if self._serving.cancelled() else self._serving.exception()
            raise RuntimeError(f"the HTTP server at {self._address} has ended: {error!r}")

    async def _end(self) -> None:
        """
        Let answers end, without new ones.

        Where there are other endpoints, this one stops listening at first, so that the kernel gives
        them the next connections; a lone one refuses new work until then.
        """
        if self._app is None:
            return
        self._ends = True
        self._gate.notify("ends")
        alone = self._gate.news["endpoints"] <= 1 or self._gate.news["draining"]
        if alone:
            self._drain()
            await asyncio.gather(*self._drains)
        if self._server is not None and self._serving is not None:
            self._server.stop()
            limit_s = CLOSE_S if alone else self._drain_s
            await asyncio.wait({self._serving}, timeout=limit_s)

    async def __del__(self) -> None:
        """End; Ray Serve, past which clients connect, knows of no request."""
        await self._end()
        self._gate.close()


async def _find_gate() -> ChannelPlace:
    handle = serve.get_deployment_handle(GATE, serve.get_replica_context().app_name)
    place: ChannelPlace = await handle.channel_place.remote()
    return place
