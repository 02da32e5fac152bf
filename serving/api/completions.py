"""
The completion routes: admit a request, pass its answer on, measure it.

One process handles all requests and shares the machine with the engines of the demo, so that the
work per token is only to forward and to time it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.responses import JSONResponse, Response

from serving.admission.controller import TOO_MANY_ONGOING, AdmissionController
from serving.admission.policy import Shed
from serving.api.body import BodyReader
from serving.api.errors import with_param
from serving.api.metrics import Metrics
from serving.api.readiness import ReadyCheck
from serving.api.tracker import AnswerStream, ReadAhead, RequestTracker, with_usage
from serving.protocol.messages import FirstChunk, Refusal, RequestRefused
from serving.request.length import apply_token_limit
from serving.request.validation import check, parse_body

if TYPE_CHECKING:
    from starlette.requests import Request

    from serving.api.auth import AccessControl
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Backend


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
        self.bodies = BodyReader(config.max_model_len)
        self.ahead = ReadAhead()
        self.readiness = ReadyCheck(config, backend, self.admission, self.metrics)

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
        tracker, body = await self._admitted(kind, request)
        with tracker:
            sent = with_usage(body)
            tracker.usage.keep = sent is body
            tracker.expect_first_token()
            items = aiter(self.backend.answer(tracker.domain, kind, sent))
            chunk = await anext(items)
            if isinstance(chunk, Refusal):
                raise RequestRefused(with_param(chunk, body))
            assert isinstance(chunk, FirstChunk)  # noqa: S101  (for the type checker)
            first, headers = chunk.first, chunk.phases.headers
            first_s = tracker.first_token(chunk.phases)
            self.readiness.answered(tracker.domain, chunk.phases, first_s)
            if isinstance(first, list):
                return AnswerStream(
                    first, items, tracker, request_id, headers=headers, ahead=self.ahead
                )
            tracker.usage.read(first.get("usage"))
            tracker.end("ok")
            return JSONResponse(first, headers=headers)

    async def time_prefill(self, request: Request, _request_id: str) -> Response:
        """Run a completion's prompt through the prefill pool alone; `PrefillTiming` as JSON."""
        tracker, body = await self._admitted("completions", request)
        with tracker:
            timing = await self.backend.time_prefill(body)
            if isinstance(timing, Refusal):
                raise RequestRefused(timing)
            tracker.end("prefill")
            return JSONResponse(asdict(timing))

    async def _admitted(self, kind: str, request: Request) -> tuple[RequestTracker, dict[str, Any]]:
        """Check a request and admit it; raise the refusal of either."""
        started_s = time.perf_counter()
        client = self.access.client(request)
        ongoing = self.admission.ongoing(client) + self.bodies.reading[client.name]
        if client.max_ongoing is not None and ongoing >= client.max_ongoing:
            self._shed(TOO_MANY_ONGOING)
        with self.bodies.counted(client):
            body = await self.bodies.read(request, client, partial(self._checked, kind))
            self.readiness.running.refresh()
            found = self.admission.admit(self.admission.cost(kind, body), client)
        if isinstance(found, Shed):
            self._shed(found)
        tracker = RequestTracker(
            found,
            self.admission,
            self.metrics,
            streamed=body.get("stream") is True,
            started_s=started_s,
        )
        return tracker, body

    def _shed(self, shed: Shed) -> NoReturn:
        self.metrics.shed(shed.reason)
        raise RequestRefused(shed.refusal)

    def _checked(self, kind: str, raw: bytes) -> dict[str, Any]:
        """Return the body to pass on, or raise its refusal; needs nothing of the event loop."""
        longest = self.config.max_model_len
        body = parse_body(raw, longest)
        checked = check(kind, body, model_id=self.config.model_id, max_model_len=longest)
        return apply_token_limit(kind, checked, self.token_limit, longest)
