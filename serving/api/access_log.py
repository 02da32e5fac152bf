"""What is recorded of every answer, whatever its route: a counter, a line of the log, a trace."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from serving.protocol.messages import RequestPhases

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.api.metrics import Metrics
    from serving.api.tracing import RequestTracer

RECORD = "minicluster.record"
"""Key of a request's record in its ASGI scope."""

NO_ROUTE = "none"
"""Route of a request for a path that there is not: each would be a series of its own."""

CLIENT_GONE = 499
"""Status, as nginx writes it, of a request whose client was gone before the answer began."""

FILE_BYTES, FILES = 32 << 20, 4
"""Size at which the log is rotated, and how many rotated files are kept."""

access_log = logging.getLogger("minicluster.access")
access_log.propagate = False
access_log.setLevel(logging.INFO)
access_log.addHandler(logging.NullHandler())


@dataclass(slots=True)
class AnswerRecord:
    """
    One request, filled in while it is answered; times by `time.perf_counter`.

    Attributes:
        key: name of the API key, never the key.
        admitted_s, first_s, last_s: when it was admitted, and its first and its last token came.
        outcome: as in `minicluster_requests_total`; empty where nothing was generated.
        error: code of the error that it was answered with.
    """

    started_s: float
    request_id: str = ""
    route: str = NO_ROUTE
    key: str = ""
    status: int = CLIENT_GONE
    outcome: str = ""
    error: str = ""
    phases: RequestPhases | None = None
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def line(self, scope: Scope) -> str:
        """Return the line of the log: JSON without empty fields, and nothing of any body."""
        client, now_s = scope.get("client"), time.perf_counter()
        found = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "client": client[0] if client else "",
            "key": self.key,
            "method": scope["method"],
            "route": self.route,
            "status": self.status,
            "seconds": round(now_s - self.started_s, 4),
            "outcome": self.outcome,
            "error": self.error,
            "path": self.phases.path_and_reason if self.phases else "",
            "prefill_replica": self.phases.prefill_replica if self.phases else "",
            "decode_replica": self.phases.decode_replica if self.phases else "",
            "ttft_s": round(self.first_s - self.started_s, 4) if self.first_s else "",
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        return json.dumps({name: each for name, each in found.items() if each not in {"", None}})


def record_of(request: Request) -> AnswerRecord:
    """Return the record of a request."""
    record: AnswerRecord = request.scope[RECORD]
    return record


class RecordAnswers:
    """ASGI middleware that records each answer when it has ended, a stream after its last event."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: RequestTracer | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        record = scope[RECORD] = AnswerRecord(started_s=time.perf_counter())

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.answered(record.route, record.status)
            access_log.info(record.line(scope))
            if self._tracer is not None:
                self._tracer.export(record, scope)


def write_access_log(file: Path) -> None:
    """Write the access log into a *file*, which is rotated."""
    handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES)
    access_log.addHandler(handler)
