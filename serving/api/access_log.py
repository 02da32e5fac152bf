"""
What is recorded of every answer, whatever its route: a counter, a line of the log, a trace.

What a request that generates is measured by is in its record too: its times and its tokens.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request

from serving.api.errors import REQUEST_ID, request_id_of
from serving.protocol.messages import RequestPhases

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.api.metrics import Metrics
    from serving.api.tracing import RequestTracer

RECORD = "minicluster.record"
"""Key of a request's record in its ASGI scope."""

NO_ROUTE = "none"
"""Route of a request for a path that there is not: each would be a series of its own."""

CLIENT_GONE = 499
"""Status, as nginx writes it, of a request whose client was gone before the answer began."""

METHOD_LENGTH = 20
"""Characters of a method that are kept: the longest one that IANA registers has 17."""

FILE_BYTES, FILES = 32 << 20, 4
"""Size at which the log is rotated, and how many rotated files are kept."""

access_log = logging.getLogger("minicluster.access")
access_log.propagate = False
access_log.setLevel(logging.INFO)
access_log.addHandler(logging.NullHandler())


@dataclass(slots=True, kw_only=True)
class AnswerRecord:
    """
    One request, filled in while it is answered; times by `time.perf_counter`.

    Attributes:
        key: name of the API key, never the key.
        outcome: as in `minicluster_requests_total`; empty where nothing was generated.
        error: code of the error that it was answered with.
        admitted_s, first_s, last_s: when it was admitted, and its first and its last token came.
        gaps_s: between the chunks of a stream.
        prompt_tokens, output_tokens: as the engine counts them; `None` until it reports them.
        sequences: answers of which these are the tokens.
    """

    started_s: float
    request_id: str
    key: str = ""
    status: int = CLIENT_GONE
    outcome: str = ""
    error: str = ""
    phases: RequestPhases | None = None
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    sequences: int = 1

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request to its first token."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, if the answer has been counted."""
        if self.first_s is None or self.last_s is None or self.output_tokens is None:
            return None
        after = self.output_tokens / self.sequences - 1
        return (self.last_s - self.first_s) / after if after > 0 else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the request to its last token."""
        return None if self.last_s is None else self.last_s - self.started_s

    def count(self, usage: Any) -> None:  # noqa: ANN401  (whatever the engine sends)
        """Take the tokens of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")

    def facts(self, scope: Scope) -> dict[str, str | int | float]:
        """Return what is known of the request and may be shown: nothing of any body."""
        phases = self.phases
        found = {
            "request_id": self.request_id,
            "key": self.key,
            "method": scope["method"][:METHOD_LENGTH],
            "route": route_of(scope),
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "path": phases and phases.path_and_reason,
            "prefill_replica": phases and phases.prefill_replica,
            "decode_replica": phases and phases.decode_replica,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 4),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        return {name: each for name, each in found.items() if each not in {"", None}}

    def line(self, scope: Scope) -> str:
        """Return the line of the log: JSON, with when, how long and from where."""
        client = scope.get("client")
        seen = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.perf_counter() - self.started_s, 4),
            **({"client": client[0]} if client else {}),
        }
        return json.dumps(seen | self.facts(scope))


def record_of(request: Request) -> AnswerRecord:
    """Return the record of a request."""
    record: AnswerRecord = request.scope[RECORD]
    return record


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
        metrics: Metrics,
        tracer: RequestTracer | None,
        headers: Mapping[str, str],
    ) -> None:
        self._app = app
        self._metrics = metrics
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
            self._metrics.answered(route_of(scope), record.status)
            access_log.info(record.line(scope))
            if self._tracer is not None:
                self._tracer.export(record, scope)


def write_access_log(file: Path) -> None:
    """Write the access log into a *file*, which is rotated."""
    handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES)
    access_log.addHandler(handler)
