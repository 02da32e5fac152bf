"""
The completion routes: admit a request, pass its answer on, measure it.

One process handles all requests and shares the machine with the engines of the demo, so that the
work per token is only to forward and to time it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from serving.admission.controller import AdmissionController
from serving.admission.policy import Shed, request_cost
from serving.api.auth import read_body
from serving.api.errors import error_event, refusal_of, shed_refusal, with_param
from serving.api.metrics import Metrics, RecentLatencies
from serving.api.readiness import ReadyCheck
from serving.api.sse import UsageReader, with_usage
from serving.protocol.messages import FirstChunk, Refusal, RequestRefused, refuse
from serving.request.length import TokenCounts, apply_token_limit, counted_text_bytes
from serving.request.validation import check, parse_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from serving.admission.controller import InflightRequest
    from serving.api.auth import AccessControl, ApiKey
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Backend, RequestPhases


class CompletionRoutes:
    """The routes that generate, with the state that all requests share."""

    def __init__(
        self,
        config: EndpointConfig,
        backend: Backend,
        access: AccessControl,
        *,
        token_limit: int | None = None,
        sheds: bool = True,
    ) -> None:
        """
        Start without requests.

        Args:
            config: the plan.
            backend: the pools.
            access: keys and origins.
            token_limit: most tokens of one answer; `None`: what the context has room for.
            sheds: whether requests that would miss the SLO are refused.
        """
        self.config = config
        self.backend = backend
        self.access = access
        self.token_limit = token_limit
        self.admission = AdmissionController(config, sheds=sheds)
        self.metrics = Metrics(config)
        self.recent = RecentLatencies()
        self.readiness = ReadyCheck(config, backend, self.admission, self.metrics)
        self._refreshing: asyncio.Task[object] | None = None
        self._token_counts = {kind: TokenCounts() for kind in ("chat", "completions")}

    async def answer(self, kind: str, request: Request, request_id: str) -> Response:
        """
        Answer with JSON, or with server-sent events as they arrive.

        Args:
            kind: `chat` or `completions`.
            request: the HTTP request.
            request_id: names it in logs.

        Raises:
            RequestRefused: for an error of the client or of the backend.
        """
        started_s = time.perf_counter()
        key = self.access.key(request)
        body = await self._read(kind, request)
        self._refresh_replicas()
        tracker = self._admit(key, kind, body, started_s)
        try:
            return await self._forward(kind, body, tracker, request_id)
        except RequestRefused as refused:
            tracker.end("failed" if refused.refusal.status >= 500 else "refused")  # noqa: PLR2004
            raise
        except BaseException as error:
            tracker.end("failed" if isinstance(error, Exception) else "cancelled")
            raise

    async def time_prefill(self, request: Request, _request_id: str) -> Response:
        """Run a completion's prompt through the prefill pool alone; `PrefillTiming` as JSON."""
        key = self.access.key(request)
        body = await self._read("completions", request)
        tracker = self._admit(key, "completions", body, time.perf_counter())
        try:
            timing = await self.backend.time_prefill(body)
            tracker.outcome = "refused" if isinstance(timing, Refusal) else "prefill"
        finally:
            tracker.end()
        if isinstance(timing, Refusal):
            raise RequestRefused(timing)
        return JSONResponse(asdict(timing))

    async def _read(self, kind: str, request: Request) -> dict[str, Any]:
        body = parse_body(await read_body(request))
        longest = self.config.max_model_len
        checked = check(kind, body, model_id=self.config.model_id, max_model_len=longest)
        return apply_token_limit(kind, checked, self.token_limit, longest)

    def _admit(
        self, key: ApiKey | None, kind: str, body: dict[str, Any], started_s: float
    ) -> RequestTracker:
        """Admit a request, or raise the 429 of its key or of the admission policy."""
        counts = self._token_counts[kind]
        cost = request_cost(kind, body, self.config, counts.estimate)
        if not self.access.start(key):
            self._count_shed("key")
            message = "This key has as many requests under way as it may; wait for one to end."
            refuse(429, message, code="rate_limit_exceeded", retry_after_s=1.0)
        found = self.admission.admit(cost)
        if isinstance(found, Shed):
            self.access.end(key)
            self._count_shed(found.reason)
            if found.retry_after_s is None and counted_text_bytes(kind, body):
                counts.discount()
            raise RequestRefused(shed_refusal(found))
        streamed = body.get("stream") is True
        return RequestTracker(self, found, key, streamed=streamed, started_s=started_s)

    def _refresh_replicas(self) -> None:
        if self.readiness.stale and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self.readiness.running())

    def _count_shed(self, reason: str) -> None:
        self.metrics.shed(reason)
        self.recent.ended(f"shed: {reason}")

    async def _forward(
        self, kind: str, body: dict[str, Any], tracker: RequestTracker, request_id: str
    ) -> Response:
        sent, remove_usage = with_usage(body)
        expected = tracker.expect_first_token()
        items = aiter(self.backend.answer(tracker.domain, kind, sent))
        try:
            chunk = await anext(items)
        finally:
            if expected is not None:
                expected.cancel()
        if isinstance(chunk, Refusal):
            raise RequestRefused(with_param(chunk, body))
        assert isinstance(chunk, FirstChunk)  # noqa: S101  (for the type checker)
        phases, first = chunk.phases, chunk.first
        first_s = tracker.first_token(phases)
        self.readiness.answered(tracker.domain, phases, first_s)
        usage = UsageReader(keep_usage=not remove_usage)
        if isinstance(first, dict):
            usage.read(first.get("usage"))
            tracker.outcome = "ok"
            self._finish(kind, tracker, usage, body)
            return JSONResponse(first, headers=phases.headers)
        stream = self._stream(first, items, usage, tracker, request_id)
        on_end = partial(self._finish, kind, tracker, usage, body)
        return AnswerStream(stream, on_end, phases.headers)

    async def _stream(
        self,
        first: list[str],
        items: AsyncIterator[Any],
        usage: UsageReader,
        tracker: RequestTracker,
        request_id: str,
    ) -> AsyncIterator[str]:
        """Forward events; if the engine fails midway, send an error and end without [DONE]."""
        tracker.outcome = "cancelled"  # unless the stream reaches its end
        yield usage.filter(first)
        try:
            async for events in items:
                if usage.has_token(events):
                    tracker.token()
                if text := usage.filter(events):
                    yield text
            tracker.outcome = "ok"
        except Exception as error:  # noqa: BLE001  (sent to the client, and logged)
            tracker.outcome = "broken"
            yield error_event(refusal_of(error, request_id))

    def _finish(
        self, kind: str, tracker: RequestTracker, usage: UsageReader, body: dict[str, Any]
    ) -> None:
        """Take the token counts of an answer, for its pace and for later estimates, and end it."""
        if usage.prompt_tokens is not None and usage.output_tokens is not None:
            tracker.tokens = (usage.prompt_tokens, usage.output_tokens)
            if size_bytes := counted_text_bytes(kind, body):
                self._token_counts[kind].add(size_bytes, usage.prompt_tokens)
        tracker.end()


class RequestTracker:
    """
    The times of one admitted request, reported once to admission control and metrics.

    For an answer in one piece the backend reports when its first token was there; it has no gaps.
    """

    def __init__(
        self,
        routes: CompletionRoutes,
        request: InflightRequest,
        key: ApiKey | None,
        *,
        streamed: bool,
        started_s: float,
    ) -> None:
        """Start; *started_s* by `time.perf_counter`."""
        self._routes = routes
        self._request = request
        self._key = key
        self._streamed = streamed
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._gaps_s: list[float] = []
        self._ended = False
        self.path = "none"
        self.outcome = "failed"
        self.tokens: tuple[int, int] | None = None

    @property
    def domain(self) -> str:
        """The domain that answers."""
        return self._request.domain

    def expect_first_token(self) -> asyncio.TimerHandle | None:
        """Remove an answer in one piece from the prefill backlog when its first token is due."""
        forecast = self._request.forecast
        if self._streamed or forecast is None:
            return None
        on_time = self._routes.admission.inflight.first_token
        return asyncio.get_running_loop().call_later(forecast.ttft_s, on_time, self._request)

    def first_token(self, phases: RequestPhases) -> float:
        """Record the first token; return when it was there, by `time.perf_counter`."""
        self.path = phases.path
        self._routes.metrics.phases(phases)
        now = time.perf_counter()
        reported_s = self._started_s + phases.prefill_s + phases.decode_s
        self._first_s = now if self._streamed else min(reported_s, now)
        self._last_s = now
        ttft_s = self._first_s - self._started_s
        self._routes.metrics.seconds("ttft", ttft_s)
        self._routes.admission.first_token(self._request, ttft_s)
        return self._first_s

    def token(self) -> None:
        """Record a chunk after the first."""
        now = time.perf_counter()
        self._gaps_s.append(now - self._last_s)
        self._last_s = now

    def end(self, outcome: str | None = None) -> None:
        """Report the request; later calls change nothing. Only a complete answer is measured."""
        if self._ended:
            return
        self._ended = True
        outcome = outcome or self.outcome
        metrics, recent = self._routes.metrics, self._routes.recent
        self._routes.access.end(self._key)
        tpot_s = self._tpot_s()
        self._routes.admission.end(self._request, tpot_s)
        metrics.ended(self.path, outcome)
        recent.ended(outcome)
        if outcome != "ok":
            return
        e2e_s = time.perf_counter() - self._started_s
        ttft_s = None if self._first_s is None else self._first_s - self._started_s
        metrics.seconds("e2e", e2e_s)
        for gap_s in self._gaps_s:
            metrics.seconds("itl", gap_s)
        if tpot_s is not None:
            metrics.seconds("tpot", tpot_s)
        if self.tokens is not None:
            metrics.tokens(*self.tokens)
        recent.add({"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}, self._gaps_s)

    def _tpot_s(self) -> float | None:
        """Return the time per token after the first, if the answer has been counted."""
        if self._first_s is None or self.tokens is None:
            return None
        after = self.tokens[1] / self._request.cost.sequences - 1
        return (self._last_s - self._first_s) / after if after > 0 else None


class AnswerStream(StreamingResponse):
    """A stream of events that reports its end, even if it never began."""

    def __init__(
        self, content: AsyncIterator[str], on_end: Callable[[], None], headers: dict[str, str]
    ) -> None:
        """*on_end* is called once, however the stream ends."""
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
