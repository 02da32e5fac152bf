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
from serving.api.metrics import MeasuredAnswer
from serving.protocol.messages import RequestRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from starlette.types import Receive, Scope, Send

    from serving.admission.controller import AdmissionController, InflightRequest
    from serving.admission.tenants import KeyHolder
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


class UsageReader:
    """
    Reads the token counts of an answer, and removes the usage event if the client wants none.

    Attributes:
        keep: whether the client gets the event.
        prompt_tokens, output_tokens: as the engine counts them; `None` until it reports them.
    """

    def __init__(self) -> None:
        self.keep = True
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def filter(self, events: list[str]) -> str:
        """Return the part of *events* for the client; may be empty."""
        if not any(USAGE in event for event in events):
            return "".join(events)
        kept = []
        for event in "".join(events).split("\n\n"):
            if USAGE in event and event.startswith("data: {"):
                self.read(json.loads(event[6:]).get("usage"))
                if not self.keep:
                    continue
            kept.append(event)
        return "\n\n".join(kept)

    def read(self, usage: Any) -> None:  # noqa: ANN401
        """Take the counts of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")


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
        self.usage = UsageReader()
        self._request = request
        self._admission = admission
        self._metrics = metrics
        self._streamed = streamed
        self.record = record
        self._started_s = record.started_s
        record.admitted_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = record.started_s
        self._gaps_s: list[float] = []
        self._ended = False
        self._path = "none"

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

    @property
    def domain(self) -> str:
        """The domain that answers."""
        return self._request.domain

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._started_s

    def move(self) -> None:
        """Count the request in another domain, if one is live; no token has come."""
        self._admission.move(self._request)

    @property
    def client(self) -> KeyHolder:
        """Who sent it."""
        return self._request.client

    def expect_first_token(self) -> None:
        """Remove an answer in one piece from the prefill backlog when its first token is due."""
        forecast = self._request.forecast
        if not self._streamed and forecast is not None:
            on_time = self._admission.inflight.first_token
            asyncio.get_running_loop().call_later(forecast.ttft_s, on_time, self._request)

    def first_token(self, phases: RequestPhases) -> float:
        """Record the first token; return when it was there, by `time.perf_counter`."""
        self._path = phases.path
        now = time.perf_counter()
        reported_s = self._started_s + phases.prefill_s + phases.decode_s
        self._first_s = now if self._streamed else min(reported_s, now)
        self._last_s = now
        self.record.phases, self.record.first_s = phases, self._first_s
        ttft_s = self._first_s - self._started_s
        self._metrics.first_token(ttft_s, phases)
        self._admission.first_token(self._request, ttft_s if phases.as_planned else None)
        return self._first_s

    def token(self) -> None:
        """Record a chunk after the first."""
        now = time.perf_counter()
        self._gaps_s.append(now - self._last_s)
        self._last_s = now

    def end(self, outcome: str) -> None:
        """Report the request; later calls change nothing. Only a complete answer is measured."""
        if self._ended:
            return
        self._ended = True
        usage, answer, record = self.usage, None, self.record
        record.outcome, record.last_s = outcome, self._last_s
        record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.output_tokens
        tpot_s = self._tpot_s()
        self._admission.end(self._request, tpot_s, usage.prompt_tokens)
        if outcome == "ok" and self._first_s is not None:
            answer = MeasuredAnswer(
                ttft_s=self._first_s - self._started_s,
                tpot_s=tpot_s,
                e2e_s=time.perf_counter() - self._started_s,
                gaps_s=self._gaps_s,
                prompt_tokens=usage.prompt_tokens or 0,
                output_tokens=usage.output_tokens or 0,
            )
        self._metrics.ended(self._path, outcome, answer)

    def _tpot_s(self) -> float | None:
        """Return the time per token after the first, if the answer has been counted."""
        if self._first_s is None or self.usage.output_tokens is None:
            return None
        after = self.usage.output_tokens / self._request.cost.sequences - 1
        return (self._last_s - self._first_s) / after if after > 0 else None


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
        request_id: str,
        *,
        headers: dict[str, str],
        ahead: ReadAhead,
    ) -> None:
        """Take the *first* events and the *items* that follow; *request_id* is for the log."""
        super().__init__(self._texts(), headers=headers, media_type="text/event-stream")
        self._items = items
        self._tracker = tracker
        self._request_id = request_id
        self._ahead = ahead
        self._unsent: list[str] = [tracker.usage.filter(first)]
        self._unsent_bytes = 0
        self._news, self._taken = asyncio.Event(), asyncio.Event()
        self._ended = False
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        reading = asyncio.ensure_future(self._read())
        try:
            await super().__call__(scope, receive, send)
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            self._ahead.bytes -= self._unsent_bytes
            self._tracker.end("cancelled")  # unless the engine has finished

    async def _read(self) -> None:
        """Read the engine's events, at its pace as long as there is room for them."""
        tracker, usage, outcome = self._tracker, self._tracker.usage, "cancelled"
        try:
            async with aclosing(self._items):  # type: ignore[type-var]
                async for events in self._items:
                    if any(USAGE not in each and not each.startswith(DONE) for each in events):
                        tracker.token()
                    self._keep(usage.filter(events))
                    while self._unsent and self._ahead.bytes >= self._ahead.max_bytes:
                        self._taken.clear()
                        await self._taken.wait()
            outcome = "ok"
        except Exception as error:  # noqa: BLE001  (sent to the client, and logged)
            outcome = "broken"
            refusal = refusal_of(error, self._request_id)
            tracker.record.error = refusal.name
            self._keep(f"data: {json.dumps(refusal.body)}\n\n")
        finally:
            tracker.end(outcome)
            self._ended = True
            self._news.set()

    def _keep(self, text: str) -> None:
        self._unsent.append(text)
        self._unsent_bytes += len(text)
        self._ahead.bytes += len(text)
        self._news.set()

    async def _texts(self) -> AsyncIterator[str]:
        """Yield what has been read since the last time, until there is no more."""
        while not self._ended or self._unsent:
            await self._news.wait()
            self._news.clear()
            text = "".join(self._unsent)
            self._unsent.clear()
            self._ahead.bytes -= self._unsent_bytes
            self._unsent_bytes = 0
            self._taken.set()
            if text:
                yield text
