"""The ASGI application: its routes, and the id and error shape of every answer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from serving.admission.controller import read_admission
from serving.api.access_log import NO_ROUTE, RecordAnswers, record_of
from serving.api.auth import HOSTS, ORIGINS, AccessControl, names_in
from serving.api.completions import CompletionRoutes
from serving.api.errors import REQUEST_ID, error_response, refusal_of, request_id_of
from serving.api.keys import KeyStore
from serving.api.status_routes import StatusRoutes
from serving.api.tracing import request_tracer
from serving.protocol.messages import PATH_HEADER
from serving.request.length import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Backend

    Handler = Callable[[Request, str], Awaitable[Response]]

ENGINE = "X-Minicluster-Engine"
"""Header of every answer of simulated engines: how slow they are, and how they count text."""


EXPOSED = (REQUEST_ID, PATH_HEADER, "Server-Timing", "Retry-After", "X-Should-Retry", ENGINE)
"""Headers of answers that pages of other origins may read."""


def api_app(
    config: EndpointConfig, backend: Backend, environment: Mapping[str, str], *, host: str = ""
) -> Starlette:
    """
    Build the application; its `state.count` counts answers that others give in its place.

    Args:
        config: the plan.
        backend: the pools.
        environment: names API keys, allowed origins and host names, the longest answer, the
            admission switch and the exporter of traces (`serving.api.keys`, `serving.api.auth`,
            `serving.request.length`, `serving.admission.controller`, `serving.api.tracing`). By
            default no key is needed, no other site is allowed, the model's context is the limit,
            requests that would miss the SLO are shed, and nothing is traced.
        host: where the application listens; a name by which it may be called.

    Raises:
        InputError: a key, limit or switch that cannot be used.
    """
    origins = names_in(environment, ORIGINS)
    hosts = tuple(map(str.lower, (*names_in(environment, HOSTS), host)))
    access = AccessControl(KeyStore(environment), origins, hosts)
    completions = CompletionRoutes(
        config,
        backend,
        access,
        token_limit=read_token_limit(environment),
        sheds=read_admission(environment),
    )
    status = StatusRoutes(completions)
    tracer = request_tracer(environment)
    engine = {} if config.simulated is None else {ENGINE: str(config.simulated)}
    _route = partial(_made_route, access, engine)
    routes = [
        _route("POST", "/v1/completions", partial(completions.answer, "completions")),
        _route("POST", "/v1/chat/completions", partial(completions.answer, "chat")),
        _route("POST", "/internal/prefill", completions.time_prefill),
        _route("GET", "/v1/models", status.models),
        _route("GET", "/v1/models/{model:path}", status.model),
        _route("GET", "/health", status.health),
        _route("GET", "/ready", status.ready),
        _route("GET", "/metrics", status.metrics),
        _route("GET", "/plan", status.plan),
        _route("GET", "/openapi.json", status.schema),
        _route("GET", "/", status.page),
    ]
    recorded = Middleware(RecordAnswers, metrics=completions.metrics, tracer=tracer)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", REQUEST_ID],
        expose_headers=EXPOSED,
    )
    app = Starlette(
        routes=routes,
        middleware=[recorded, cors] if origins else [recorded],
        exception_handlers={HTTPException: _on_http},
    )
    app.state.count = partial(completions.metrics.answered, NO_ROUTE)
    return app


def _made_route(
    access: AccessControl, headers: Mapping[str, str], method: str, path: str, handler: Handler
) -> Route:
    async def checked(request: Request, request_id: str) -> Response:
        access.check_host(request)
        return await handler(request, request_id)

    return Route(path, _with_id(path, checked, headers), methods=[method])


def _with_id(
    path: str, handler: Handler, headers: Mapping[str, str]
) -> Callable[[Request], Awaitable[Response]]:
    """Give each request an id and *headers*, and turn each exception into an answer."""

    async def handle(request: Request) -> Response:
        record = record_of(request)
        record.route = path
        record.request_id = request_id = request_id_of(request)
        try:
            response = await handler(request, request_id)
        except Exception as error:  # noqa: BLE001  (logged; the client sees no internals)
            refusal = refusal_of(error, request_id)
            record.error = refusal.name
            response = error_response(refusal, {})
        response.headers[REQUEST_ID] = request_id
        response.headers.update(headers)
        return response

    return handle


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer errors of the framework: unknown path, wrong method."""
    record = record_of(request)
    record.request_id = request_id_of(request)
    refusal = refusal_of(error, record.request_id)
    record.error = refusal.name
    headers = getattr(error, "headers", None) or {}
    return error_response(refusal, {**headers, REQUEST_ID: record.request_id})
