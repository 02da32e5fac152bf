"""
The front door: an ASGI application over the pools, whatever runs them.

It is one process for all requests and shares the machine with the engines of the demo, so that
it does nothing per token but to pass it on and to stamp it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from serving.admission.controller import AdmissionController
from serving.admission.policy import Shed
from serving.admission.request_cost import asked_of
from serving.api.concurrency_limit import ConcurrencyLimit
from serving.api.errors import error_event, refusal_of, shed_refusal, with_param
from serving.api.metrics import Metrics
from serving.api.readiness import ReadyCheck
from serving.api.recent_latencies import Measured
from serving.api.request_tracking import RequestTracker
from serving.api.sse import Events, with_usage
from serving.protocol.phases import FirstChunk
from serving.protocol.refusal import Refusal
from serving.request.body_checks import check_sound
from serving.request.learned_length import LearnedSize, teaching_bytes
from serving.request.token_limit import within
from serving.request.validation import RequestRefused, check, parse_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from serving.admission.controller import AdmittedRequest
    from serving.api.api_keys import ApiKey
    from serving.api.auth import RequestChecks
    from serving.protocol.backend import Backend
    from serving.protocol.endpoint_config import EndpointConfig


class CompletionRoutes:
    """Lets requests in, passes answers out, and keeps the books."""

    def __init__(
        self,
        front: EndpointConfig,
        servers: Backend,
        entrance: RequestChecks,
        *,
        sheds: bool = True,
    ) -> None:
        """Open, with nobody in; without *sheds*, whoever may come is admitted, however late."""
        self.front = front
        self.servers = servers
        self.entrance = entrance
        self.guard = AdmissionController(front, sheds=sheds)
        self.metrics = Metrics(front)
        self.measured = Measured()
        self.ready = ReadyCheck(front, servers, self.guard, self.metrics)
        self._turnstile = ConcurrencyLimit()
        self._looking: asyncio.Task[object] | None = None
        self._sizes = {kind: LearnedSize() for kind in ("chat", "completions")}

    async def answer(self, kind: str, request: Request, at: str) -> Response:
        """
        Answer with JSON, or with events as they come.

        Args:
            kind: `chat` or `completions`.
            request: as it came.
            at: its id.

        Raises:
            Refused: whatever is wrong with it, or with us.
        """
        started_s = time.perf_counter()
        key = self.entrance.key(request)
        body = await self._read(kind, request)
        self._look()
        journey = self._admit(key, kind, body, started_s)
        try:
            return await self._pass(kind, body, journey, at)
        except RequestRefused as refused:
            journey.outcome = "failed" if refused.refusal.status >= 500 else "refused"  # noqa: PLR2004
            self._end(journey)
            raise
        except BaseException as error:
            journey.outcome = "failed" if isinstance(error, Exception) else "cancelled"
            self._end(journey)
            raise

    async def time_prefill(self, request: Request, _at: str) -> Response:
        """Run a completion's prompt through the prefill pool alone; `PrefillTiming` as JSON."""
        key = self.entrance.key(request)
        body = await self._read("completions", request)
        journey = self._admit(key, "completions", body, time.perf_counter())
        try:
            timing = await self.servers.time_prefill(body)
            journey.outcome = "refused" if isinstance(timing, Refusal) else "prefill"
        finally:
            self._end(journey)
        if isinstance(timing, Refusal):
            raise RequestRefused(timing)
        return JSONResponse(asdict(timing))

    async def _read(self, kind: str, request: Request) -> dict[str, Any]:
        """Read and check a request."""
        raw = await self.entrance.body(request)
        body = parse_body(raw)
        check_sound(raw, body)
        room = self.front.max_model_len
        checked = check(kind, body, model_id=self.front.model_id, max_model_len=room)
        return within(kind, checked, self.entrance.token_limit, room)

    def _admit(
        self, key: ApiKey | None, kind: str, body: dict[str, Any], started_s: float
    ) -> RequestTracker:
        """Let a request in, or shed it."""
        asked = asked_of(kind, body, self.front, self._sizes[kind].size)
        if not self._turnstile.enter(key):
            self._shed("key")
            message = "This key has as many requests under way as it may; wait for one to end."
            refusal = Refusal(
                status=429, message=message, code="rate_limit_exceeded", retry_after_s=1.0
            )
            raise RequestRefused(refusal)
        found: AdmittedRequest | Shed = self.guard.enter(asked)
        if isinstance(found, Shed):
            self._turnstile.leave(key)
            self._shed(found.reason)
            if found.retry_after_s is None and teaching_bytes(kind, body):
                self._sizes[kind].doubt()
            raise RequestRefused(shed_refusal(found))
        return RequestTracker(
            found,
            streamed=body.get("stream") is True,
            started_s=started_s,
            leave=partial(self._turnstile.leave, key),
        )

    def _look(self) -> None:
        """Have the guard learn, now and then, how many replicas live; nobody waits for it."""
        if self.ready.stale and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self.ready.running())

    def _shed(self, reason: str) -> None:
        """Count a request that stays outside."""
        self.metrics.shed(reason)
        self.measured.ended(f"shed: {reason}")

    async def _pass(
        self, kind: str, body: dict[str, Any], journey: RequestTracker, at: str
    ) -> Response:
        """Send a request on, and its answer back."""
        asked, kept_back = with_usage(body)
        due = journey.count_on(self.guard)
        items = aiter(self.servers.answer(journey.domain, kind, asked))
        try:
            begun = await anext(items)
        finally:
            if due is not None:
                due.cancel()
        if isinstance(begun, Refusal):
            raise RequestRefused(with_param(begun, body))
        assert isinstance(begun, FirstChunk)  # noqa: S101  (for the type checker)
        phases, first = begun.phases, begun.first
        first_s = journey.begin(phases, self.guard, self.metrics)
        self.ready.saw(journey.domain, phases, first_s)
        events = Events(keep_usage=not kept_back)
        if isinstance(first, dict):
            events.count(first.get("usage"))
            journey.outcome = "ok"
            self._learn(kind, journey, events, body)
            self._end(journey)
            return JSONResponse(first, headers=phases.headers)
        stream = self._stream(first, items, events, journey, at)
        return AnswerStream(
            stream, partial(self._ended, kind, journey, events, body), phases.headers
        )

    async def _stream(
        self,
        first: list[str],
        items: AsyncIterator[Any],
        events: Events,
        journey: RequestTracker,
        at: str,
    ) -> AsyncIterator[str]:
        """Pass on events; if the engine fails midway, say so and end without [DONE]."""
        journey.outcome = "cancelled"  # unless it comes to an end
        yield events.passed(first)
        try:
            async for later in items:
                if events.token_in(later):
                    journey.token()
                if text := events.passed(later):
                    yield text
            journey.outcome = "ok"
        except Exception as error:  # noqa: BLE001  (told to the client, and logged)
            journey.outcome = "broken"
            yield error_event(refusal_of(error, at))

    def _ended(
        self, kind: str, journey: RequestTracker, events: Events, body: dict[str, Any]
    ) -> None:
        """Close the books of a stream."""
        self._learn(kind, journey, events, body)
        self._end(journey)

    def _learn(
        self, kind: str, journey: RequestTracker, events: Events, body: dict[str, Any]
    ) -> None:
        """Take the token counts of an answer: for its pace, and to size the next text."""
        if events.prompt_tokens is None or events.output_tokens is None:
            return
        journey.tokens = (events.prompt_tokens, events.output_tokens)
        if size_bytes := teaching_bytes(kind, body):
            self._sizes[kind].learn(size_bytes, events.prompt_tokens)

    def _end(self, journey: RequestTracker) -> None:
        """Let a request out."""
        journey.end(self.guard, self.metrics, self.measured)


class AnswerStream(StreamingResponse):
    """Events on their way out; says when it is over, even if it never began."""

    def __init__(
        self, content: AsyncIterator[str], ended: Callable[[], None], headers: dict[str, str]
    ) -> None:
        """*ended* is called once, whatever happens."""
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
