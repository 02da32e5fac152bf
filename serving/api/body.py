"""
The bodies of requests: read and parsed within bounds, so that none stops the others.

JSON is parsed with Python's lock held: what a body costs is bounded before it is parsed
(`serving.request.validation.parse_body`), and long ones are checked beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

from serving.protocol.messages import refuse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.requests import Request

    from serving.admission.tenants import KeyHolder

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


class BodyReader:
    """
    Reads the bodies of all requests of an endpoint.

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
