"""
The endpoint: what its requests share, and the routes that generate.

The work per token is only to forward and to time it (`serving.api.stream`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from starlette.responses import JSONResponse, Response

from serving.admission.controller import KEY_IS_FULL, key_is_full
from serving.admission.policy import request_size
from serving.admission.tenants import INTERNAL, TIMING
from serving.api.access import require, salted
from serving.api.errors import with_param
from serving.api.record import record_of
from serving.api.stream import AnswerStream, ReadAhead
from serving.protocol.messages import PATH_HEADER, Refusal, RequestRefused, refuse
from serving.request.length import apply_token_limit
from serving.request.prefill import DECODE_FAILED, may_retry
from serving.request.validation import check, parse_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.requests import Request

    from serving.admission.tenants import KeyHolder
    from serving.api.access import AccessControl
    from serving.api.gate import Tickets
    from serving.api.record import AnswerRecord
    from serving.api.tracing import RequestTracer
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Answer, Backend

Parsed = TypeVar("Parsed")

BYTES_PER_TOKEN = 16
"""Bytes of a body for each token of the model's context: about four times those of text."""

BASE_BYTES = 64 << 10
"""Bytes of a body beside its prompt: parameters, tools, a schema."""

SHORT_BYTES = 64 << 10
"""Length up to which a body is read at once, if it is announced."""

LONG_BYTES = 256 << 10
"""Length from which a body is checked in a thread."""

MEMORY_BYTES = 32 << 20
"""Memory for longer bodies that are being read."""

MAX_WAITING = 64
"""Most requests of a client that wait for that memory; each holds up to 300 kB of its body."""


class Endpoint:
    """
    One endpoint process by one plan.

    Attributes:
        config: the plan.
        backend: the pools.
        gate: admits requests and counts them, for all endpoint processes.
        access: keys and origins.
        tracer: writes traces; `None`: nothing does.
        cache_secret: keeps the prefix caches of keys apart.
    """

    tickets = itertools.count(1)
    """Numbers of admitted requests, never the same in one process."""

    def __init__(  # noqa: PLR0913  (what an endpoint is told, by name)
        self,
        config: EndpointConfig,
        backend: Backend,
        gate: Tickets,
        access: AccessControl,
        *,
        tracer: RequestTracer | None,
        token_limit: int | None,
        cache_secret: bytes,
    ) -> None:
        """Start without requests; an answer has at most *token_limit* tokens, if that is given."""
        self.config = config
        self.backend = backend
        self.gate = gate
        self.access = access
        self.tracer = tracer
        self.cache_secret = cache_secret
        self._token_limit = token_limit
        self._bodies = BodyReader(config.max_model_len)
        self._ongoing: Counter[str] = Counter()
        self._ahead = ReadAhead()

    async def answer(self, kind: str, request: Request) -> Response:
        """
        Answer with JSON, or with server-sent events as they arrive.

        Args:
            kind: `chat` or `completions`.
            request: the HTTP request.

        Raises:
            RequestRefused: for an error of the client or of the backend.
        """
        client = self._client(request)
        record, body = await self._admitted(kind, request, client)
        with record:
            answer = await self._begun(kind, body, record)
            if isinstance(answer, Refusal):
                raise RequestRefused(with_param(answer, body))
            first, phases = answer.chunk.first, answer.chunk.phases
            headers = phases.headers
            if TIMING not in client.rights:
                headers = {PATH_HEADER: headers[PATH_HEADER]}
            record.first_token(phases)
            if isinstance(first, str):
                return AnswerStream(answer, record, headers=headers, ahead=self._ahead)
            record.count(first.get("usage"))
            record.end("ok")
            return JSONResponse(first, headers=headers)

    async def _begun(
        self, kind: str, body: dict[str, Any], record: AnswerRecord
    ) -> Answer | Refusal:
        """
        Return an answer that has begun.

        Where the replica is gone before its first token, the client has received nothing, and the
        request is answered by another one, in another domain if one is live. Its prompt is computed
        anew, because a KV cache can be fetched only once.
        """
        tried: list[str] = []
        lost = ""
        while True:
            try:
                answer = await self.backend.answer(record.domain, kind, body, tried)
            except RequestRefused as refused:
                answer = refused.refusal
            if not isinstance(answer, Refusal):
                if lost:
                    answer.chunk = answer.chunk.retried_for(lost)
                return answer
            spent_s = time.perf_counter() - record.started_s
            if lost or not may_retry(answer, spent_s, self.config):
                return answer
            lost = DECODE_FAILED
            record.domain = await self.gate.move(record.ticket)

    async def time_prefill(self, request: Request) -> Response:
        """Run a completion's prompt through the prefill pool alone; `PrefillTiming` as JSON."""
        client = self._client(request, right=INTERNAL)
        record, body = await self._admitted("completions", request, client)
        with record:
            timing = await self.backend.time_prefill(body)
            if isinstance(timing, Refusal):
                raise RequestRefused(timing)
            record.end("prefill")
            return JSONResponse(asdict(timing))

    def _client(self, request: Request, right: str | None = None) -> KeyHolder:
        """Return the client of a request; raise its refusal, also for want of a *right*."""
        client = self.access.client(request)
        record_of(request).key = client.name
        require(right, client)
        return client

    async def _admitted(
        self, kind: str, request: Request, client: KeyHolder
    ) -> tuple[AnswerRecord, dict[str, Any]]:
        """Check a request and admit it; raise the refusal of either."""
        record = record_of(request)
        if key_is_full(client, self._ongoing[client.name] + self._bodies.reading[client.name]):
            self.gate.shed(KEY_IS_FULL.reason)
            record.outcome = "shed"
            raise RequestRefused(KEY_IS_FULL.refusal)
        with self._bodies.counted(client):
            checked = await self._bodies.read(request, client, partial(self._checked, kind))
            # Engines name the request by its id, in their logs and answers.
            named = {**checked, "request_id": record.request_id}
            body = salted(named, client, self.cache_secret)
            await self._admit(record, client, kind, body)
        return record, body

    async def _admit(
        self, record: AnswerRecord, client: KeyHolder, kind: str, body: dict[str, Any]
    ) -> None:
        size, streamed = request_size(kind, body), body.get("stream") is True
        ticket = next(self.tickets)
        admitted = await self.gate.admit(ticket, client, size, streamed=streamed)
        if isinstance(admitted, Refusal):
            record.outcome = "shed"
            raise RequestRefused(admitted)
        self._ongoing[client.name] += 1
        record.admit(
            self.gate, ticket, domain=admitted, sequences=size.sequences, streamed=streamed
        )
        record.on_end = partial(self._ended, client.name)

    def _ended(self, key: str) -> None:
        self._ongoing[key] -= 1

    def _checked(self, kind: str, raw: bytes) -> dict[str, Any]:
        """Return the body to pass on, or raise its refusal; needs nothing of the event loop."""
        longest = self.config.max_model_len
        body = parse_body(raw, longest)
        checked = check(
            kind,
            body,
            models=self.config.models,
            max_model_len=longest,
            vocab_size=self.config.vocab_size,
        )
        return apply_token_limit(kind, checked, self._token_limit, longest)


class BodyReader:
    """
    Reads the bodies of all requests of an endpoint, within bounds, so that none stops the others.

    JSON is parsed with Python's lock held: what a body costs is bounded before it is parsed
    (`serving.request.validation.parse_body`), and long ones are checked beside the event loop.

    Attributes:
        max_bytes: longest body.
        reading: requests that have not been admitted yet, by the client's name.
    """

    def __init__(self, max_model_len: int) -> None:
        """Start without requests; *max_model_len* is the model's context, tokens."""
        self.max_bytes = max_model_len * BYTES_PER_TOKEN + BASE_BYTES
        places = max(2, MEMORY_BYTES // self.max_bytes)
        self._places = asyncio.Semaphore(places)
        # One client takes at most half of them, so that slow bodies of one key stop no other key.
        self._places_of: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(places // 2)
        )
        self._waiting: Counter[str] = Counter()
        self.reading: Counter[str] = Counter()
        self._checking = asyncio.Lock()

    @contextmanager
    def counted(self, client: KeyHolder) -> Iterator[None]:
        """Count a request of *client* among `reading` until it is admitted."""
        self.reading[client.name] += 1
        try:
            yield
        finally:
            self.reading[client.name] -= 1

    async def read(
        self, request: Request, client: KeyHolder, check: Callable[[bytes], Parsed]
    ) -> Parsed:
        """
        Read the body of a request, and no more of it than is allowed; return what *check* does.

        Raises:
            RequestRefused: 413 for a long body, 503 if too many are being read; or as *check*.
        """
        announced = request.headers.get("content-length")
        length = int(announced) if announced is not None and announced.isdecimal() else None
        if length is not None and length > self.max_bytes:
            self._refuse_length()
        if length is not None and length <= SHORT_BYTES:
            return check(await self._whole(request))
        async with self._place(client):
            raw = await self._whole(request)
            if len(raw) <= LONG_BYTES:
                return check(raw)
            async with self._checking:
                return await asyncio.to_thread(check, raw)

    async def _whole(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_bytes:
                self._refuse_length()
        return bytes(body)

    def _refuse_length(self) -> NoReturn:
        message = f"The body exceeds {self.max_bytes} bytes, the most for this model's context."
        refuse(413, message, code="too_long")

    @asynccontextmanager
    async def _place(self, client: KeyHolder) -> AsyncIterator[None]:
        """Wait for memory for a long body."""
        name = client.name
        if self._waiting[name] >= MAX_WAITING:
            message = "Too many long requests arrive at once; try again."
            refuse(503, message, code="too_many_bodies", retry_after_s=1)
        async with AsyncExitStack() as held:
            self._waiting[name] += 1
            try:
                await held.enter_async_context(self._places_of[name])
                await held.enter_async_context(self._places)
            finally:
                self._waiting[name] -= 1
            yield
