"""
One admitted request: its times, reported once to admission control and metrics, and its stream.

Server-sent events are forwarded and counted, and our own usage event is removed.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

from starlette.responses import StreamingResponse

from serving.api.errors import refusal_of
from serving.protocol.messages import RequestRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from starlette.types import Receive, Scope, Send

    from serving.admission.controller import AdmissionController, InflightRequest
    from serving.api.access_log import AnswerRecord
    from serving.api.metrics import Metrics
    from serving.protocol.messages import RequestPhases

USAGE = '"choices":[]'
"""Occurs only in the event that holds the usage; the engine writes JSON without blanks."""

DONE = "data: [DONE]"


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    """
    Ask the engine to report the token counts at the end of a stream.

    Returns *body* itself if it is no stream, or its client asks for them already.
    """
    options = body.get("stream_options") or {}
    if body.get("stream") is not True or not isinstance(options, dict):
        return body
    if options.get("include_usage"):
        return body
    return {**body, "stream_options": {**options, "include_usage": True}}


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
    The events of an answer.

    If the engine fails midway it sends an error and ends without [DONE]. The tracker gets the
    outcome once, even if the stream never began: `ok` and `broken` as soon as the engine is done,
    or `cancelled`.
    """

    def __init__(
        self,
        first: list[str],
        items: AsyncIterator[Any],
        tracker: RequestTracker,
        *,
        headers: dict[str, str],
        ahead: ReadAhead,
        keeps_usage: bool,
    ) -> None:
        """Take the *first* events and the *items* that follow, of which clients may get usage."""
        super().__init__(self._texts(), headers=headers, media_type="text/event-stream")
        self._first = first
        self._items = items
        self._tracker = tracker
        self._ahead = ahead
        self._keeps_usage = keeps_usage
        self._unsent: list[str] = []
        self._news, self._taken = asyncio.Event(), asyncio.Event()
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        self._keep(self._for_client(self._first))
        reading = asyncio.ensure_future(self._read())
        try:
            await super().__call__(scope, receive, send)
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            self._take()
            self._tracker.end("cancelled")  # unless the engine has finished

    async def _read(self) -> None:
        """Read the engine's events, at its pace as long as there is room for them."""
        tracker, outcome = self._tracker, "cancelled"
        try:
            async with aclosing(self._items):  # type: ignore[type-var]
                async for events in self._items:
                    if any(USAGE not in each and not each.startswith(DONE) for each in events):
                        tracker.token()
                    self._keep(self._for_client(events))
                    if self._unsent and self._ahead.bytes >= self._ahead.max_bytes:
                        self._taken.clear()
                        await self._taken.wait()
            outcome = "ok"
        except Exception as error:  # noqa: BLE001  (sent to the client, and logged)
            outcome = "broken"
            refusal = refusal_of(error, tracker.record.request_id)
            tracker.record.error = refusal.name
            self._keep(f"data: {json.dumps(refusal.body)}\n\n")
        finally:
            tracker.end(outcome)
            self._ended = True
            self._news.set()

    def _for_client(self, events: list[str]) -> str:
        """Return what the client gets of *events*, which may be nothing, and read their usage."""
        if not any(USAGE in event for event in events):
            return "".join(events)
        kept = []
        for event in "".join(events).split("\n\n"):
            is_usage = USAGE in event and event.startswith("data: {")
            if is_usage:
                self._tracker.record.count(json.loads(event[6:]).get("usage"))
            if self._keeps_usage or not is_usage:
                kept.append(event)
        return "\n\n".join(kept)

    def _keep(self, text: str) -> None:
        self._unsent.append(text)
        self._ahead.bytes += len(text)
        self._news.set()

    def _take(self) -> str:
        text = "".join(self._unsent)
        self._unsent.clear()
        self._ahead.bytes -= len(text)
        self._taken.set()
        return text

    async def _texts(self) -> AsyncIterator[str]:
        """Yield what has been read since the last time, until there is no more."""
        while not self._ended or self._unsent:
            await self._news.wait()
            self._news.clear()
            if text := self._take():
                yield text
