"""Door and lookout behind their paths, as one ASGI application."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from serving.admission.controller import read_guard
from serving.api.api_keys import read_keys
from serving.api.auth import ORIGINS, RequestChecks
from serving.api.completions import CompletionRoutes
from serving.api.errors import REQUEST_ID, error_response, refusal_of, request_id
from serving.api.status_routes import StatusRoutes
from serving.request.token_limit import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from serving.protocol.backend import Backend
    from serving.protocol.endpoint_config import EndpointConfig

    Handler = Callable[[Request, str], Awaitable[Response]]


def front_app(front: EndpointConfig, servers: Backend, environment: Mapping[str, str]) -> Starlette:
    """
    Build the application.

    Args:
        front: what is planned.
        servers: what answers.
        environment: where API keys, allowed origins, the longest answer and the guard are named
            (`serving.api.auth`, `serving.request.token_limit`,
            `serving.admission.controller`); none of them: no key is asked for, no other site is
            allowed, the model's context is the limit, what would miss the SLO is shed.

    Raises:
        InputError: a key, limit or guard that cannot be used.
    """
    origins = tuple(part.strip() for part in environment.get(ORIGINS, "").split(",") if part)
    limit = read_token_limit(environment)
    entrance = RequestChecks(read_keys(environment), origins, token_limit=limit)
    door = CompletionRoutes(front, servers, entrance, sheds=read_guard(environment))
    lookout = StatusRoutes(door)
    routes = [
        _post("/v1/completions", partial(door.answer, "completions")),
        _post("/v1/chat/completions", partial(door.answer, "chat")),
        _post("/internal/prefill", door.time_prefill),
        _get("/v1/models", lookout.models),
        _get("/v1/models/{model:path}", lookout.model),
        _get("/health", lookout.health),
        _get("/ready", lookout.ready),
        _get("/metrics", lookout.metrics),
        _get("/plan", lookout.plan),
        _get("/openapi.json", lookout.schema),
        _get("/", lookout.page),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", REQUEST_ID],
    )
    return Starlette(
        routes=routes,
        middleware=[cors] if origins else [],
        exception_handlers={HTTPException: _on_http},
    )


def _post(path: str, handler: Handler) -> Route:
    """Route what generates."""
    return Route(path, _answered(handler), methods=["POST"])


def _get(path: str, handler: Handler) -> Route:
    """Route what is looked at."""
    return Route(path, _answered(handler), methods=["GET"])


def _answered(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Give each request an id, and each exception an answer."""

    async def answered(request: Request) -> Response:
        at = request_id(request)
        try:
            response = await handler(request, at)
        except Exception as error:  # noqa: BLE001  (logged, and told without our insides)
            response = error_response(refusal_of(error, at), {})
        response.headers[REQUEST_ID] = at
        return response

    return answered


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer what the framework refuses: unknown path, wrong method."""
    at = request_id(request)
    headers = getattr(error, "headers", None) or {}
    return error_response(refusal_of(error, at), {**headers, REQUEST_ID: at})
