"""
The endpoint: what its requests share, the routes that generate, and the streams of answers.

The work per token is only to forward and to time it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from serving.admission.controller import INTERNAL, KEY_IS_FULL, TIMING, key_is_full
from serving.api.access import require, salted
from serving.api.gate import AnswerReport, Tickets
from serving.protocol.messages import (
    DECODE_FAILED,
    ENGINE_DIED,
    NO_ANSWERING_REPLICA,
    PATH_HEADER,
    Refusal,
    RequestPhases,
    RequestRefused,
    refuse,
)
from serving.request.cost import apply_token_limit, request_size
from serving.request.validation import check, parse_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from types import TracebackType

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from serving.admission.controller import KeyHolder
    from serving.api.access import AccessControl
    from serving.protocol.messages import Answer, AnswerEnd, Backend, EndpointConfig

logger = logging.getLogger(__name__)


def may_retry(refusal: Refusal, spent_s: float, config: EndpointConfig) -> bool:
    """
    Return whether another replica may answer a request that one has refused before its first token.

    Only where the replica is gone, and while there is time for another attempt: 504 and refusals
    of the request itself would be the same elsewhere. *spent_s* is the time since the request.
    """
    return refusal in (NO_ANSWERING_REPLICA, ENGINE_DIED) and spent_s < config.prefill_deadline_s


def refusal_of(error: Exception, request_id: str) -> Refusal:
    """
    Turn any exception into the client's error.

    Args:
        error: what was raised.
        request_id: names the request in the log.
    """
    if isinstance(error, RequestRefused):
        return error.refusal
    if isinstance(error, HTTPException):
        return Refusal(status=error.status_code, message=str(error.detail))
    logger.error("request %s failed", request_id, exc_info=error)
    return Refusal(status=500, message=f"The server failed to answer; its log names {request_id}.")


def with_param(refusal: Refusal, body: Mapping[str, object]) -> Refusal:
    """Name the parameter at fault where the engine's message does and its error object does not."""
    if refusal.param is not None or refusal.status >= 500:  # noqa: PLR2004
        return refusal
    message = refusal.message.lower()
    for name in sorted(body, key=len, reverse=True):
        if len(name) > 1 and (name in message or name.replace("_", " ") in message):
            return replace(refusal, param=name)
    return refusal


RECORD = "minicluster.record"
"""Key of a request's record in its ASGI scope."""

CLIENT_GONE = 499
"""Status, as nginx writes it, of a request whose client was gone before the answer began."""


@dataclass(slots=True, kw_only=True)
class AnswerRecord:
    """
    One request; times by `time.perf_counter`.

    As a context, an admitted request ends with an exception, and otherwise goes on.

    Attributes:
        key: name of the API key, never the key.
        outcome: as in `minicluster_requests_total`; empty where nothing was generated.
        error: code of the error that it was answered with.
        gate, ticket: what has admitted it, and its number there; `None`: it is not admitted.
        on_end: callback at its end.
        domain: the domain that answers it.
        streamed: whether its answer comes in events; of one in one piece the backend reports when
            its first token was there.
        sequences: number of answers.
        gaps_s: times between the chunks of a stream.
        prompt_tokens, output_tokens: counts of the engine; `None` until it reports them.
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
        cache_secret: keeps the prefix caches of keys apart.
    """

    tickets = itertools.count(1)
    """Numbers of admitted requests, never the same in one process."""

    def __init__(
        self,
        config: EndpointConfig,
        backend: Backend,
        gate: Tickets,
        access: AccessControl,
        *,
        token_limit: int | None,
        cache_secret: bytes,
    ) -> None:
        """Start without requests; an answer has at most *token_limit* tokens, if that is given."""
        self.config = config
        self.backend = backend
        self.gate = gate
        self.access = access
        self.cache_secret = cache_secret
        self._token_limit = token_limit
        self._bodies = BodyReader(config.max_model_len)
        self._ongoing: Counter[str] = Counter()
        self._ahead = ReadAhead()

    async def answer(self, kind: str, request: Request) -> Response:
        """
        Answer a request of *kind* (`chat` or `completions`) with JSON, or with events.

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
        client = self.access.client(request)
        record_of(request).key = client.name
        require(right, client)
        return client

    async def _admitted(
        self, kind: str, request: Request, client: KeyHolder
    ) -> tuple[AnswerRecord, dict[str, Any]]:
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


WRITE_CHUNK = "write_chunk"
"""
Key of a request's state: writes a chunk of its answer into the connection, past ASGI. It returns
whether the client keeps up; if not, nothing was written.
"""


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
    with an error and without [DONE]. The record gets the outcome once, even if the stream never
    began: `ok` and `broken` as soon as the engine is done, or `cancelled`.
    """

    def __init__(
        self, answer: Answer, record: AnswerRecord, *, headers: dict[str, str], ahead: ReadAhead
    ) -> None:
        """Take an *answer* whose first events are there."""
        super().__init__(self._texts(), headers=headers, media_type="text/event-stream")
        self._answer = answer
        self._record = record
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
            self._record.end("cancelled")  # unless the engine has finished
            self._take()
            self._answer.close()

    def events(self, text: bytes) -> None:
        """Take events with tokens, at the engine's pace as long as there is room for them."""
        self._record.token()
        if self._all_sent and self._write_chunk is not None and self._write_chunk(text):
            return
        self._keep(text)
        if self._ahead.bytes >= self._ahead.max_bytes and not self._held:
            self._held = True
            self._answer.hold(on=True)

    def ended(self, end: AnswerEnd) -> None:
        """Take the end, or the error that is it."""
        record, outcome, text = self._record, "ok", end.text
        record.count(end.usage)
        if end.error is not None:
            outcome = "broken"
            refusal = refusal_of(end.error, record.request_id)
            record.error = refusal.name
            text = f"data: {json.dumps(refusal.body)}\n\n"
        self._keep(text.encode())
        record.end(outcome)
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
        while not self._ended or self._unsent:
            self._all_sent = not self._unsent
            await self._news.wait()
            self._all_sent = False
            self._news.clear()
            if text := self._take():
                yield text
