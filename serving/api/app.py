"""The ASGI application: its routes, and what becomes of every request before and after them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route

from minicluster.workload.engine_steps import PATH as ENGINE_STEPS_PATH
from serving.admission.controller import read_admission
from serving.api.access_log import NO_ROUTE, RecordAnswers, record_of
from serving.api.auth import HOSTS, ORIGINS, AccessControl, names_in
from serving.api.completions import CompletionRoutes
from serving.api.drain import Drain
from serving.api.errors import REQUEST_ID, error_response, refusal_of
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

    Handler = Callable[[Request], Awaitable[Response]]

ENGINE = "X-Minicluster-Engine"
"""Header of every answer of simulated engines: how slow they are, and how they count text."""

EXPOSED = (REQUEST_ID, PATH_HEADER, "Server-Timing", "Retry-After", "X-Should-Retry", ENGINE)
"""Headers of answers that pages of other origins may read."""


def api_app(
    config: EndpointConfig,
    backend: Backend,
    environment: Mapping[str, str],
    *,
    host: str = "",
    former: Starlette | None = None,
) -> Starlette:
    """
    Build the application of one plan.

    Its `state` has `count`, which counts answers that others give in its place, `drain`, which
    ends its work (`Drain.finish`), and `completions`.

    Args:
        config: the plan.
        backend: the pools.
        environment: names API keys, allowed origins and host names, the longest answer, the
            admission switch and the exporter of traces (`serving.api.keys`, `serving.api.auth`,
            `serving.request.length`, `serving.admission.controller`, `serving.api.tracing`). By
            default no key is needed, no other site is allowed, the model's context is the limit,
            requests that would miss the SLO are shed, and nothing is traced.
        host: where the application listens; a name by which it may be called.
        former: the application of the plan before, whose keys, tenants and counts are kept.

    Raises:
        InputError: a key, limit or switch that cannot be used.
    """
    origins = names_in(environment, ORIGINS)
    hosts = tuple(map(str.lower, (*names_in(environment, HOSTS), host)))
    if former is None:
        access = AccessControl(KeyStore(environment), origins, hosts)
        tracer = request_tracer(environment)
    else:
        access, tracer = former.state.completions.access, former.state.tracer
    completions = CompletionRoutes(
        config,
        backend,
        access,
        token_limit=read_token_limit(environment),
        sheds=read_admission(environment),
        former=None if former is None else former.state.completions,
    )
    drain = Drain()
    recorded = Middleware(
        RecordAnswers,
        metrics=completions.metrics,
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
        routes=_routes(completions),
        middleware=[
            recorded,
            *([cors] if origins else []),
            Middleware(ExceptionMiddleware, handlers={Exception: _refused}),
            Middleware(drain.guarded),
        ],
        exception_handlers={HTTPException: _refused},  # of an unknown path, or a wrong method
    )
    app.router.redirect_slashes = False  # it would answer before keys and host are checked
    app.state.completions, app.state.tracer = completions, tracer
    app.state.count = partial(completions.metrics.answered, NO_ROUTE)
    app.state.drain = drain.finish
    return app


def _routes(completions: CompletionRoutes) -> list[Route]:
    """Return all routes; none answers by a name that the endpoint does not have."""

    def route(method: str, path: str, handler: Handler) -> Route:
        async def checked(request: Request) -> Response:
            completions.access.check_host(request)
            return await handler(request)

        return Route(path, checked, methods=[method])

    status = StatusRoutes(completions)
    return [
        route("POST", "/v1/completions", partial(completions.answer, "completions")),
        route("POST", "/v1/chat/completions", partial(completions.answer, "chat")),
        route("POST", "/internal/prefill", completions.time_prefill),
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
