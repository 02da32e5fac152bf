"""
The completion routes: admit a request, pass its answer on, measure it.

One process handles all requests and shares the machine with the engines of the demo, so that the
work per token is only to forward and to time it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.responses import JSONResponse, Response

from serving.admission.controller import AdmissionController
from serving.admission.policy import Shed
from serving.admission.tenants import INTERNAL, TIMING
from serving.api.access_log import record_of
from serving.api.auth import require
from serving.api.body import BodyReader
from serving.api.errors import with_param
from serving.api.keys import salted
from serving.api.metrics import Metrics
from serving.api.readiness import ReadyCheck
from serving.api.tracker import AnswerStream, ReadAhead, RequestTracker
from serving.protocol.messages import PATH_HEADER, Refusal, RequestRefused
from serving.request.length import apply_token_limit
from serving.request.prefill import DECODE_FAILED, may_retry
from serving.request.validation import check, parse_body

if TYPE_CHECKING:
    from starlette.requests import Request

    from serving.api.access_log import AnswerRecord
    from serving.api.auth import AccessControl
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Answer, Backend


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
        former: CompletionRoutes | None = None,
    ) -> None:
        """
        Start without requests.

        Args:
            config: the plan.
            backend: the pools.
            access: keys and origins.
            token_limit: most tokens of one answer; `None`: what the context has room for.
            sheds: whether requests that would miss the SLO are refused.
            former: the routes of the plan before, whose last requests may still be in flight.
        """
        self.config = config
        self.backend = backend
        self.access = access
        self.token_limit = token_limit
        self._cache_secret = secrets.token_bytes(32)
        self.admission: AdmissionController = AdmissionController(
            config, sheds=sheds, former=None if former is None else former.admission
        )
        self.metrics: Metrics
        if former is None:
            self.metrics = Metrics(config)
        else:
            self.metrics = former.metrics
            self.metrics.take(config)
        self.bodies = BodyReader(config.max_model_len)
        self.ahead = ReadAhead()
        self.readiness = ReadyCheck(config, backend, self.admission, self.metrics)

    async def answer(self, kind: str, request: Request) -> Response:
        """
        Answer with JSON, or with server-sent events as they arrive.

        Args:
            kind: `chat` or `completions`.
            request: the HTTP request.

        Raises:
            RequestRefused: for an error of the client or of the backend.
        """
        tracker, body = await self._admitted(kind, request)
        with tracker:
            tracker.expect_first_token()
            answer = await self._begun(kind, body, tracker)
            if isinstance(answer, Refusal):
                raise RequestRefused(with_param(answer, body))
            first, phases = answer.chunk.first, answer.chunk.phases
            headers = phases.headers
            if TIMING not in tracker.request.client.rights:
                headers = {PATH_HEADER: headers[PATH_HEADER]}
            first_s = tracker.first_token(phases)
            self.readiness.answered(tracker.request.domain, phases, first_s)
            if isinstance(first, str):
                return AnswerStream(answer, tracker, headers=headers, ahead=self.ahead)
            tracker.record.count(first.get("usage"))
            tracker.end("ok")
            return JSONResponse(first, headers=headers)

    async def _begun(
        self, kind: str, body: dict[str, Any], tracker: RequestTracker
    ) -> Answer | Refusal:
        """
        Return an answer that has begun.

        Where the replica is gone before its first token, the client has received nothing, and the
        request is answered by another one, in another domain if one is live. Its prompt is computed
        anew, because a KV cache can be fetched only once.
        """
        tried: list[Any] = []
        lost = ""
        while True:
            try:
                answer = await self.backend.answer(tracker.request.domain, kind, body, tried)
            except RequestRefused as refused:
                answer = refused.refusal
            if not isinstance(answer, Refusal):
                if lost:
                    answer.chunk = answer.chunk.retried_for(lost)
                return answer
            spent_s = time.perf_counter() - tracker.record.started_s
            if lost or not may_retry(answer, spent_s, self.config):
                return answer
            lost = DECODE_FAILED
            self.admission.move(tracker.request)

    async def time_prefill(self, request: Request) -> Response:
        """Run a completion's prompt through the prefill pool alone; `PrefillTiming` as JSON."""
        tracker, body = await self._admitted("completions", request, right=INTERNAL)
        with tracker:
            timing = await self.backend.time_prefill(body)
            if isinstance(timing, Refusal):
                raise RequestRefused(timing)
            tracker.end("prefill")
            return JSONResponse(asdict(timing))

    async def _admitted(
        self, kind: str, request: Request, right: str | None = None
    ) -> tuple[RequestTracker, dict[str, Any]]:
        """Check a request and admit it; raise the refusal of either, or for want of a *right*."""
        record = record_of(request)
        client = self.access.client(request)
        record.key = client.name
        require(right, client)
        full = self.admission.full(client, self.bodies.reading[client.name])
        if full is not None:
            self._shed(full, record)
        with self.bodies.counted(client):
            checked = await self.bodies.read(request, client, partial(self._checked, kind))
            # Engines name the request by its id, in their logs and answers.
            named = {**checked, "request_id": record.request_id}
            body = salted(named, client, self._cache_secret)
            self.readiness.running.refresh()
            found = self.admission.admit(self.admission.cost(kind, body, client), client)
        if isinstance(found, Shed):
            self._shed(found, record)
        tracker = RequestTracker(
            found,
            self.admission,
            self.metrics,
            record,
            streamed=body.get("stream") is True,
        )
        return tracker, body

    def _shed(self, shed: Shed, record: AnswerRecord) -> NoReturn:
        record.outcome = "shed"
        self.metrics.shed(shed.reason)
        raise RequestRefused(shed.refusal)

    def _checked(self, kind: str, raw: bytes) -> dict[str, Any]:
        """Return the body to pass on, or raise its refusal; needs nothing of the event loop."""
        longest = self.config.max_model_len
        body = parse_body(raw, longest)
        checked = check(kind, body, models=self.config.models, max_model_len=longest)
        return apply_token_limit(kind, checked, self.token_limit, longest)
