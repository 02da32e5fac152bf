"""The stream of an answer: its events, written as they come."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from starlette.responses import StreamingResponse

from serving.api.errors import refusal_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from serving.api.record import AnswerRecord
    from serving.protocol.messages import Answer, AnswerEnd

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
        """Yield what has been kept since the last time, until there is no more."""
        while not self._ended or self._unsent:
            self._all_sent = not self._unsent
            await self._news.wait()
            self._all_sent = False
            self._news.clear()
            if text := self._take():
                yield text
