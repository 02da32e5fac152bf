"""The one record of a request: filled in while it is answered, then counted, logged and traced."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any, Self

from starlette.datastructures import MutableHeaders
from starlette.requests import Request

from serving.api.errors import REQUEST_ID, request_id_of
from serving.api.gate import AnswerReport, Tickets
from serving.protocol.messages import RequestPhases, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.api.tracing import RequestTracer

RECORD = "minicluster.record"
"""Key of a request's record in its ASGI scope."""

CLIENT_GONE = 499
"""Status, as nginx writes it, of a request whose client was gone before the answer began."""

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


@dataclass(slots=True, kw_only=True)
class AnswerRecord:
    """
    One request; times by `time.perf_counter`.

    As a context, an admitted request ends with an exception, and otherwise goes on.

    Attributes:
        key: name of the API key, never the key.
        outcome: as in `minicluster_requests_total`; empty where nothing was generated.
        error: code of the error that it was answered with.
        gate: what has admitted it; `None`: it is not admitted.
        ticket: its number there.
        on_end: is called when it ends.
        domain: the domain that answers it.
        streamed: whether its answer comes in events; one in one piece has no gaps, and the backend
            reports when its first token was there.
        sequences: answers of which the tokens are.
        admitted_s, first_s, last_s: when it was admitted, and its first and its last token came.
        gaps_s: between the chunks of a stream.
        prompt_tokens, output_tokens: as the engine counts them; `None` until it reports them.
    """

    started_s: float
    request_id: str
    key: str = ""
    status: int = CLIENT_GONE
    outcome: str = ""
    error: str = ""
    gate: Tickets | None = None
    ticket: int = 0
    on_end: Callable[[], None] | None = None
    domain: str = ""
    streamed: bool = False
    sequences: int = 1
    phases: RequestPhases | None = None
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End the request if it was refused, failed or was cancelled."""
        if isinstance(error, RequestRefused):
            self.end("failed" if error.refusal.status >= 500 else "refused")  # noqa: PLR2004
        elif error is not None:
            self.end("failed" if isinstance(error, Exception) else "cancelled")

    def admit(
        self, gate: Tickets, ticket: int, *, domain: str, sequences: int, streamed: bool
    ) -> None:
        """Take note that *gate* has admitted it, by the number *ticket*."""
        self.gate, self.ticket, self.domain = gate, ticket, domain
        self.sequences, self.streamed = sequences, streamed
        self.admitted_s = time.perf_counter()

    def first_token(self, phases: RequestPhases) -> None:
        """Record the first token."""
        now_s = time.perf_counter()
        reported_s = self.started_s + phases.prefill_s + phases.decode_s
        self.first_s = now_s if self.streamed else min(reported_s, now_s)
        self.phases, self.last_s = phases, now_s
        assert self.gate is not None  # noqa: S101  (only admitted requests have one)
        self.gate.first_token(self.ticket, phases, self.first_s - self.started_s)

    def token(self) -> None:
        """Record a chunk after the first."""
        now_s = time.perf_counter()
        self.gaps_s.append(now_s - (self.last_s or now_s))
        self.last_s = now_s

    def count(self, usage: Any) -> None:  # noqa: ANN401  (whatever the engine sends)
        """Take the tokens of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")

    def end(self, outcome: str) -> None:
        """Report the end of an admitted request; later calls change nothing."""
        if self.outcome:
            return
        self.outcome = outcome
        assert self.gate is not None  # noqa: S101  (only admitted requests end)
        report = AnswerReport(
            outcome=outcome,
            path="none" if self.phases is None else self.phases.path,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            e2e_s=self.e2e_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            gaps_s=self.gaps_s,
        )
        self.gate.ended(self.ticket, report)
        if self.on_end is not None:
            self.on_end()


def record_of(request: Request) -> AnswerRecord:
    """Return the record of a request."""
    record: AnswerRecord = request.scope[RECORD]
    return record


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
