"""One admitted request: its times, reported once to admission control and metrics, its stream."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Self

from starlette.responses import StreamingResponse

from serving.api.errors import refusal_of
from serving.protocol.messages import RequestRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from starlette.types import Receive, Scope, Send

    from serving.admission.controller import AdmissionController, InflightRequest
    from serving.api.access_log import AnswerRecord
    from serving.api.metrics import Metrics
    from serving.protocol.messages import Answer, AnswerEnd, RequestPhases

WRITE_CHUNK = "write_chunk"
"""
Key of a request's state: writes a chunk of its answer into the connection, past ASGI. It returns
whether the client keeps up; if not, nothing was written.
"""


class RequestTracker:
    """
    One admitted request; as a context it ends with an exception, and otherwise goes on.

    For an answer in one piece the backend reports when its first token was there; it has no gaps.
    """

    def __init__(
        self,
        request: InflightRequest,
        admission: AdmissionController,
        metrics: Metrics,
        record: AnswerRecord,
        *,
        streamed: bool,
    ) -> None:
        """Start; *record* gets what becomes known of the request."""
        self.request = request
        self.record = record
        self._admission = admission
        self._metrics = metrics
        self._streamed = streamed
        record.admitted_s = time.perf_counter()
        record.sequences = request.cost.sequences

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

    def expect_first_token(self) -> None:
        """Remove an answer in one piece from the prefill backlog when its first token is due."""
        forecast = self.request.forecast
        if not self._streamed and forecast is not None:
            on_time = self._admission.inflight.first_token
            asyncio.get_running_loop().call_later(forecast.ttft_s, on_time, self.request)

    def first_token(self, phases: RequestPhases) -> float:
        """Record the first token; return when it was there, by `time.perf_counter`."""
        record, now_s = self.record, time.perf_counter()
        reported_s = record.started_s + phases.prefill_s + phases.decode_s
        first_s = now_s if self._streamed else min(reported_s, now_s)
        record.phases, record.first_s, record.last_s = phases, first_s, now_s
        ttft_s = first_s - record.started_s
        self._metrics.first_token(ttft_s, phases)
        self._admission.first_token(self.request, ttft_s if phases.as_planned else None)
        return first_s

    def token(self) -> None:
        """Record a chunk after the first."""
        now_s = time.perf_counter()
        self.record.gaps_s.append(now_s - (self.record.last_s or now_s))
        self.record.last_s = now_s

    def end(self, outcome: str) -> None:
        """Report the request; later calls change nothing."""
        record = self.record
        if record.outcome:
            return
        record.outcome = outcome
        self._admission.end(self.request, record.tpot_s, record.prompt_tokens)
        self._metrics.ended(record)


class ReadAhead:
    """
    The bytes of all answers that their clients have yet to read, and the most of them.

    The engine ends a request whose client stands still, and so do its counts: its events are read
    on into memory, which is bounded. Beyond that an answer waits for its client.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        """Start with none."""
        self.max_bytes = max_bytes
        self.bytes = 0


class AnswerStream(StreamingResponse):
    """
    The events of an answer, written as they come.

    Where its client keeps up they go straight into the connection (`WRITE_CHUNK`), and otherwise,
    or where the server has no such way, through ASGI. If the engine fails midway the stream ends
    with an error and without [DONE]. The tracker gets the outcome once, even if the stream never
    began: `ok` and `broken` as soon as the engine is done, or `cancelled`.
    """

    def __init__(
        self, answer: Answer, tracker: RequestTracker, *, headers: dict[str, str], ahead: ReadAhead
    ) -> None:
        """Take an *answer* whose first events are there."""
        super().__init__(self._texts(), headers=headers, media_type="text/event-stream")
        self._answer = answer
        self._tracker = tracker
        self._ahead = ahead
        self._unsent: list[bytes] = []
        self._news = asyncio.Event()
        self._write_chunk: Callable[[bytes], bool] | None = None
        self._all_sent = self._held = self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        if scope.get("http_version") == "1.1":  # answers of 1.0 have no chunks
            self._write_chunk = scope.get("state", {}).get(WRITE_CHUNK)
        assert isinstance(self._answer.chunk.first, str)  # noqa: S101  (for the type checker)
        try:
            self._keep(self._answer.chunk.first.encode())
            self._answer.forward(self)
            await super().__call__(scope, receive, send)
        finally:
            self._tracker.end("cancelled")  # unless the engine has finished
            self._take()
            self._answer.close()

    def events(self, text: bytes) -> None:
        """Take events with tokens, at the engine's pace as long as there is room for them."""
        self._tracker.token()
        if self._all_sent and self._write_chunk is not None and self._write_chunk(text):
            return
        self._keep(text)
        if self._ahead.bytes >= self._ahead.max_bytes and not self._held:
            self._held = True
            self._answer.hold(on=True)

    def ended(self, end: AnswerEnd) -> None:
        """Take the end, or the error that is it."""
        record, outcome, text = self._tracker.record, "ok", end.text
        record.count(end.usage)
        if end.error is not None:
            outcome = "broken"
            refusal = refusal_of(end.error, record.request_id)
            record.error = refusal.name
            text = f"data: {json.dumps(refusal.body)}\n\n"
        self._keep(text.encode())
        self._tracker.end(outcome)
        self._ended = True

    def _keep(self, text: bytes) -> None:
        self._all_sent = False
        self._unsent.append(text)
        self._ahead.bytes += len(text)
        self._news.set()

    def _take(self) -> bytes:
        text = b"".join(self._unsent)
        self._unsent.clear()
        self._ahead.bytes -= len(text)
        if self._held:
            self._held = False
            self._answer.hold(on=False)
        return text

    async def _texts(self) -> AsyncIterator[bytes]:
        """Yield what has been kept since the last time, until there is no more."""
        while not self._ended or self._unsent:
            self._all_sent = not self._unsent
            await self._news.wait()
            self._all_sent = False
            self._news.clear()
            if text := self._take():
                yield text
