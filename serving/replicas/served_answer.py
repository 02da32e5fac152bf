"""An answer of a replica, as the endpoint has it: a call on its channel, with time limits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from serving.protocol.frames import Kind
from serving.protocol.messages import AnswerEnd, EngineFailed, RequestRefused
from serving.request.prefill import late

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.protocol.messages import AnswerReader, FirstChunk
    from serving.replicas.channels import Call, ChannelLostError


class ServedAnswer:
    """An answer that has begun; see `serving.protocol.messages.Answer`."""

    def __init__(
        self, chunk: FirstChunk, call: Call, limit_s: float, over: Callable[[], None]
    ) -> None:
        """Take what came first; each event may take *limit_s*, and *over* is told of the end."""
        self.chunk = chunk
        self._call = call
        self._limit_s = limit_s
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._reader: AnswerReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._held = self._late = False
        self._done = not call.streams
        if self._done:
            over()

    def forward(self, reader: AnswerReader) -> None:
        """Give *reader* the events that the replica sends."""
        self._reader = reader
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        self._call.forward(self)

    def events(self, text: bytes) -> None:
        """Pass events on."""
        self._heard_s, self._late = self._loop.time(), False
        if self._reader is not None:
            self._reader.events(text)

    def ended(self, ending: dict[str, Any]) -> None:
        """Pass the end on."""
        error = EngineFailed(ending["error"]) if ending["error"] else None
        text, usage = ending.get("text", ""), ending.get("usage")
        self._finish(AnswerEnd(text=text, usage=usage, error=error))

    def lost(self, error: ChannelLostError) -> None:
        """End the answer of a replica that is gone."""
        self._finish(AnswerEnd(error=error))

    def hold(self, *, on: bool) -> None:
        """Have the replica wait with further events, or go on."""
        self._held = on
        self._heard_s = self._loop.time()
        if not self._done:
            self._call.tell(Kind.HOLD if on else Kind.GO_ON)

    def close(self) -> None:
        """End the work; nothing is left to do for an answer that has ended."""
        if not self._done:
            self._call.cancel()
            self._finish(None)

    def _look(self) -> None:
        """Give the answer up if no event has come for too long; there is one timer for all."""
        left_s = self._heard_s + self._limit_s - self._loop.time()
        if self._held:
            left_s = self._limit_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif not self._late:  # events may have come that this process has not read yet
            self._late = True
            self._timer = self._loop.call_later(0.0, self._look)
        else:
            self._call.cancel()
            self._finish(AnswerEnd(error=RequestRefused(late("token-timeout", self._limit_s))))

    def _finish(self, end: AnswerEnd | None) -> None:
        reader, self._reader = self._reader, None
        if self._timer is not None:
            self._timer.cancel()
        if not self._done:
            self._done = True
            self._over()
        if reader is not None and end is not None:
            reader.ended(end)
