"""Every answer is counted, logged and traced here, on all routes."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.requests import Request

from serving.api.errors import REQUEST_ID, request_id_of
from serving.api.record import RECORD, AnswerRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.api.gate import Tickets
    from serving.api.tracing import RequestTracer

NO_ROUTE = "none"
"""Route of a request for a path that there is not: each would be a series of its own."""

METHOD_LENGTH = 20
"""Characters of a method that are kept: the longest one that IANA registers has 17."""

FILE_BYTES, FILES = 32 << 20, 4
"""Size at which the log is rotated, and how many rotated files are kept."""

access_log = logging.getLogger("minicluster.access")
access_log.propagate = False
access_log.setLevel(logging.INFO)
access_log.addHandler(logging.NullHandler())


def facts_of(record: AnswerRecord, scope: Scope) -> dict[str, str | int | float]:
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


def log_line(record: AnswerRecord, scope: Scope) -> str:
    """Return a request's line of the log: JSON, with when, how long and from where."""
    client = scope.get("client")
    seen = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "seconds": round(time.perf_counter() - record.started_s, 4),
        **({"client": client[0]} if client else {}),
    }
    return json.dumps(seen | facts_of(record, scope))


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
            access_log.info(log_line(record, scope))
            if self._tracer is not None:
                self._tracer.export(record, scope)


def write_access_log(file: Path) -> None:
    """Write the access log into a *file*, which is rotated."""
    handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES)
    access_log.addHandler(handler)
