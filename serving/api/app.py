"""The ASGI application: its routes, and what becomes of every request before and after them."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route

from minicluster.workload.engine_steps import PATH as ENGINE_STEPS_PATH
from serving.api.access import HOSTS, ORIGINS, AccessControl, KeyStore, names_in
from serving.api.endpoint import Endpoint
from serving.api.errors import REQUEST_ID, error_response, refusal_of
from serving.api.record import NO_ROUTE, RecordAnswers, record_of
from serving.api.status_routes import StatusRoutes
from serving.api.tracing import request_tracer
from serving.protocol.messages import PATH_HEADER, Refusal, RequestRefused
from serving.request.length import read_token_limit
from serving.request.prefill import RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from serving.api.gate import Tickets
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Backend

    Handler = Callable[[Request], Awaitable[Response]]
    from starlette.types import ASGIApp, Receive, Scope, Send

ENGINE = "X-Minicluster-Engine"
"""Header of every answer of simulated engines: how slow they are, and how they count text."""

EXPOSED = (REQUEST_ID, PATH_HEADER, "Server-Timing", "Retry-After", "X-Should-Retry", ENGINE)
"""Headers of answers that pages of other origins may read."""

STOPPING = Refusal(
    status=503,
    message="The endpoint is stopping; send the request again.",
    code="stopping",
    retry_after_s=RETRY_AFTER_S,
)


def api_app(  # noqa: PLR0913  (what an endpoint is told, by name)
    config: EndpointConfig,
    backend: Backend,
    gate: Tickets,
    environment: Mapping[str, str],
    *,
    host: str = "",
    cache_secret: bytes = b"",
    former: Starlette | None = None,
) -> Starlette:
    """
    Build the application of one plan.

    Its `state` has `endpoint`, `count`, which counts answers that others give in its place, and
    `drain`, which ends its work (`Drain.finish`).

    Args:
        config: the plan.
        backend: the pools.
        gate: admits requests.
        environment: names API keys, allowed origins and host names, the longest answer and the
            exporter of traces (`serving.api.access`, `serving.request.length`,
            `serving.api.tracing`). By default no key is needed, no other site is allowed, the
            model's context is the limit, and nothing is traced.
        host: where the application listens; a name by which it may be called.
        cache_secret: keeps the prefix caches of keys apart; by default it is random.
        former: the application of the plan before, whose keys and secret are kept.

    Raises:
        InputError: a key or limit that cannot be used.
    """
    origins = names_in(environment, ORIGINS)
    hosts = tuple(map(str.lower, (*names_in(environment, HOSTS), host)))
    if former is None:
        access = AccessControl(KeyStore(environment), origins, hosts)
        tracer = request_tracer(environment)
        secret = cache_secret or secrets.token_bytes(32)
    else:
        before: Endpoint = former.state.endpoint
        access, tracer, secret = before.access, before.tracer, before.cache_secret
    endpoint = Endpoint(
        config,
        backend,
        gate,
        access,
        tracer=tracer,
        token_limit=read_token_limit(environment),
        cache_secret=secret,
    )
    drain = Drain()
    recorded = Middleware(
        RecordAnswers,
        gate=gate,
        tracer=tracer,
        headers={} if config.simulated is None else {ENGINE: str(config.simulated)},
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", REQUEST_ID],
        expose_headers=EXPOSED,
    )
    app = Starlette(
        routes=_routes(endpoint),
        middleware=[
            recorded,
            *([cors] if origins else []),
            Middleware(ExceptionMiddleware, handlers={Exception: _refused}),
            Middleware(drain.guarded),
        ],
        exception_handlers={HTTPException: _refused},  # of an unknown path, or a wrong method
    )
    app.router.redirect_slashes = False  # it would answer before keys and host are checked
    app.state.endpoint = endpoint
    app.state.count = partial(gate.answered, NO_ROUTE)
    app.state.drain = drain.finish
    return app


def _routes(endpoint: Endpoint) -> list[Route]:
    """Return all routes; none answers by a name that the endpoint does not have."""

    def route(method: str, path: str, handler: Handler) -> Route:
        async def checked(request: Request) -> Response:
            endpoint.access.check_host(request)
            return await handler(request)

        return Route(path, checked, methods=[method])

    status = StatusRoutes(endpoint)
    return [
        route("POST", "/v1/completions", partial(endpoint.answer, "completions")),
        route("POST", "/v1/chat/completions", partial(endpoint.answer, "chat")),
        route("POST", "/internal/prefill", endpoint.time_prefill),
        route("GET", "/v1/models", status.models),
        route("GET", "/v1/models/{model:path}", status.model),
        route("GET", "/health", status.health),
        route("GET", "/ready", status.ready),
        route("GET", "/metrics", status.metrics),
        route("GET", "/plan", status.plan),
        route("GET", ENGINE_STEPS_PATH, status.engine_steps),
        route("GET", "/openapi.json", status.schema),
        route("GET", "/", status.page),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    """Answer any exception with an error in OpenAI's shape; the client sees no internals."""
    record = record_of(request)
    refusal = refusal_of(error, record.request_id)
    record.error = refusal.name
    return error_response(refusal, getattr(error, "headers", None) or {})


class Drain:
    """
    What is under way, and whether more may begin; what only looks (`GET`) is answered to the end.

    `/ready` is refused with the work, so that load balancers send no more.
    """

    def __init__(self) -> None:
        """Start without work."""
        self._draining = False
        self._under_way = 0
        self._idle = asyncio.Event()

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Return *app* until it is drained; then it raises RequestRefused for new work."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] != "/ready"):
                await app(scope, receive, send)
                return
            if self._draining:
                raise RequestRefused(STOPPING)
            self._under_way += 1
            try:
                await app(scope, receive, send)
            finally:
                self._under_way -= 1
                if self._draining and not self._under_way:
                    self._idle.set()

        return answer

    async def finish(self, limit_s: float) -> int:
        """Refuse new work from now on; return how much is under way at the end, or the limit."""
        self._draining = True
        if self._under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._under_way
