"""The ASGI application: its routes, and what becomes of every request before and after them."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import secrets
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from minicluster.workload.engine_steps import PATH as ENGINE_STEPS_PATH
from serving.api.access import HOSTS, ORIGINS, AccessControl, KeyStore, names_in
from serving.api.endpoint import RECORD, AnswerRecord, Endpoint, record_of, refusal_of
from serving.api.gate import Tickets
from serving.api.status_routes import StatusRoutes
from serving.api.tracing import Facts, request_tracer
from serving.protocol.messages import (
    PATH_HEADER,
    RETRY_AFTER_S,
    RETRY_SPREAD,
    Refusal,
    RequestRefused,
)
from serving.request.cost import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.api.gate import Tickets
    from serving.api.tracing import RequestTracer
    from serving.protocol.messages import Backend, EndpointConfig

    Handler = Callable[[Request], Awaitable[Response]]


REQUEST_ID = "X-Request-Id"

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The request ids of clients that are kept; others could forge lines of a log."""


def request_id_of(request: Request) -> str:
    """Return the id of a request: the client's, if it is safe in a log, or a new one."""
    sent = request.headers.get(REQUEST_ID, "")
    return sent if SAFE_REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"


def error_response(refusal: Refusal, headers: Mapping[str, str]) -> Response:
    """Answer a refusal, with *headers* besides its own; when to retry differs from call to call."""
    later = refusal
    if refusal.retry_after_s is not None:
        factor = random.uniform(1 - RETRY_SPREAD, 1 + RETRY_SPREAD)  # noqa: S311  (no secret)
        later = replace(refusal, retry_after_s=factor * refusal.retry_after_s)
    return JSONResponse(
        refusal.body, status_code=refusal.status, headers={**later.headers, **headers}
    )


NO_ROUTE = "none"
"""Route of a request for a path that there is not: each would be a series of its own."""

METHOD_LENGTH = 20
"""Characters of a method that are kept: the longest one that IANA registers has 17."""

FILE_BYTES, FILES = 32 << 20, 4
"""Size at which the log is rotated, and how many rotated files are kept."""

access_log = logging.getLogger("minicluster.access")

access_log.setLevel(logging.INFO)

access_log.addHandler(logging.NullHandler())

access_log.propagate = False


def facts_of(record: AnswerRecord, scope: Scope) -> Facts:
    """Return what is known of a request and may be shown: nothing of any body."""
    phases = record.phases
    facts = {
        "request_id": record.request_id,
        "key": record.key,
        "method": scope["method"][:METHOD_LENGTH],
        "route": route_of(scope),
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error,
        "path": phases and phases.path_and_reason,
        "prefill_replica": phases and phases.prefill_replica,
        "decode_replica": phases and phases.decode_replica,
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
    }
    return {name: fact for name, fact in facts.items() if fact not in {"", None}}


def log_line(record: AnswerRecord, facts: Facts, scope: Scope) -> str:
    """Return a request's line of the log: JSON, with when, how long and from where."""
    client = scope.get("client")
    seen = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "seconds": round(time.perf_counter() - record.started_s, 4),
        **({"client": client[0]} if client else {}),
    }
    return json.dumps(seen | facts)


def route_of(scope: Scope) -> str:
    """Return the path of the route that answered, with the names of its parameters."""
    return scope["route"].path if "route" in scope else NO_ROUTE


class RecordAnswers:
    """
    ASGI middleware that records each answer when it has ended, a stream after its last event.

    It gives every answer the id of its request, and *headers*.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: Tickets,
        tracer: RequestTracer | None,
        headers: Mapping[str, str],
    ) -> None:
        self._app = app
        self._gate = gate
        self._tracer = tracer
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Request(scope))
        record = AnswerRecord(started_s=time.perf_counter(), request_id=request_id)
        scope[RECORD] = record

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message).update({REQUEST_ID: request_id, **self._headers})
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._gate.answered(route_of(scope), record.status)
            facts = facts_of(record, scope)
            access_log.info(log_line(record, facts, scope))
            if self._tracer is not None:
                self._tracer.export(record, facts, Headers(scope=scope))


def write_access_log(file: Path) -> None:
    """Write the access log into a *file*, which is rotated."""
    handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES)
    access_log.addHandler(handler)


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

    Its `state` has `endpoint`, `tracer`, `count`, which counts answers that others give in its
    place, and `drain`, which ends its work (`Drain.finish`).

    Args:
        config: the plan.
        backend: the pools.
        gate: admits requests.
        environment: names API keys, origins and hosts (`serving.api.access`), the longest answer
            (`serving.request.cost`) and the exporter of traces (`serving.api.tracing`).
        host: address of the application, by which it may be called.
        cache_secret: keeps the prefix caches of keys apart; by default it is random.
        former: application of the plan before, whose keys and secret are kept.

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
        access, tracer, secret = before.access, former.state.tracer, before.cache_secret
    endpoint = Endpoint(
        config,
        backend,
        gate,
        access,
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
    app.state.endpoint, app.state.tracer = endpoint, tracer
    app.state.count = partial(gate.answered, NO_ROUTE)
    app.state.drain = drain.finish
    return app


def _routes(endpoint: Endpoint) -> list[Route]:
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
