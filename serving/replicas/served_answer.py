"""An answer of a replica, as the endpoint has it: a call of Ray Serve, and events beside it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from serving.protocol.frames import Kind
from serving.protocol.messages import AnswerEnd, EngineFailed, RequestRefused
from serving.request.prefill import late

if TYPE_CHECKING:
    from serving.protocol.messages import AnswerReader, FirstChunk
    from serving.replicas.token_channels import ChannelLostError, TokenChannels

END_S = 5.0
"""Longest time between two frames after the end of the call: they were sent before it."""


class ServedAnswer:
    """
    An answer that has begun; see `serving.protocol.messages.Answer`.

    The call of the replica lasts as long as the answer: Ray Serve counts it, and the replica stays
    until it has ended. Cancelling it ends the work in the engine.
    """

    def __init__(
        self,
        chunk: FirstChunk,
        response: Any,  # noqa: ANN401  (Ray Serve's)
        channels: TokenChannels,
        limit_s: float,
    ) -> None:
        """Take the call's first item; each further event may take *limit_s*."""
        self.chunk = chunk
        self._response = response
        self._channels = channels
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._reader: AnswerReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._held = self._late = False
        self._failure: Exception | None = None
        self._over = chunk.place is None
        self._call: asyncio.Task[Any] = asyncio.ensure_future(anext(response, None))
        self._call.add_done_callback(self._call_ended)

    def forward(self, reader: AnswerReader) -> None:
        """Give *reader* the events that the replica sends."""
        assert self.chunk.place is not None  # noqa: S101  (a stream has one)
        self._reader = reader
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        if self._call.done():
            self._call_ended(self._call)
        self._channels.attach(self.chunk.place, self)

    def events(self, text: bytes) -> None:
        """Pass events on."""
        self._heard_s, self._late = self._loop.time(), False
        if self._reader is not None:
            self._reader.events(text)

    def ended(self, ending: dict[str, Any]) -> None:
        """Pass the end on."""
        error = EngineFailed(ending["error"]) if ending["error"] else None
        self._finish(AnswerEnd(text=ending["text"], usage=ending["usage"], error=error))

    def lost(self, error: ChannelLostError) -> None:
        """End the answer of a replica that is gone."""
        self._break_off(error)

    def hold(self, *, on: bool) -> None:
        """Have the replica wait with further events, or go on."""
        self._held = on
        self._heard_s = self._loop.time()
        if not self._over and self.chunk.place is not None:
            self._channels.tell(self.chunk.place, Kind.HOLD if on else Kind.GO_ON)

    def close(self) -> None:
        """End the work; nothing is left to do for an answer that has ended."""
        if self._over:
            return
        self._finish(None)
        self._response.cancel()
        if self.chunk.place is not None:
            self._channels.tell(self.chunk.place, Kind.DETACH)

    def _look(self) -> None:
        """Give the answer up if no event has come for too long; there is one timer for all."""
        limit_s = self._limit_s if self._failure is None else END_S
        left_s = self._heard_s + limit_s - self._loop.time()
        if self._held:
            left_s = limit_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif not self._late:  # events may have come that this process has not read yet
            self._late = True
            self._timer = self._loop.call_later(0.0, self._look)
        else:
            timeout = RequestRefused(late("token-timeout", limit_s))
            self._break_off(self._failure or timeout)

    def _call_ended(self, call: asyncio.Task[Any]) -> None:
        """Expect the last event soon; a call that failed sends none unless it has."""
        error = None if call.cancelled() else call.exception()
        if self._reader is None or self._timer is None:
            return
        missing = EngineFailed("the replica's answer has no end")
        self._failure = error if isinstance(error, Exception) else missing
        self._heard_s = self._loop.time()
        self._timer.cancel()
        self._look()

    def _break_off(self, error: Exception) -> None:
        reader = self._reader
        self.close()
        if reader is not None:
            reader.ended(AnswerEnd(error=error))

    def _finish(self, end: AnswerEnd | None) -> None:
        reader, self._reader, self._over = self._reader, None, True
        if self._timer is not None:
            self._timer.cancel()
        if reader is not None and end is not None:
            reader.ended(end)
