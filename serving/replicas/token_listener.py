"""
The replica's end of the token channels: it sends the events of its answers to the endpoint.

A token through here costs a third of what it costs through Ray Serve's streams (docs/adr/0117).
Ray Serve still starts, places, limits, cancels and drains: the call of an answer lasts until its
last event.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import secrets
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from serving.protocol.frames import (
    MOST_CONTROL_BYTES,
    NONCE_BYTES,
    SILENT_S,
    FrameError,
    FrameReader,
    Kind,
    frame,
    hello,
    nonce_in,
    proof,
    proof_in,
)
from serving.protocol.messages import ChannelPlace

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator

    from serving.request.usage import EventSplitter

logger = logging.getLogger(__name__)

GREETING_S = 10.0
"""Longest time from a connection to its proof."""

EARLY_FRAMES = 256
"""Most frames of an answer that wait until the endpoint asks for it."""

ATTACH_S = 30.0
"""Longest wait for that, once there are so many, or the answer has ended."""

PIECE_BYTES = 1 << 20
"""Most bytes of events in one frame."""

MOST_ERROR = 1000
"""Most characters of what broke an answer off; the endpoint logs it."""

HIGH_BYTES = 1 << 20
"""Bytes that a connection holds before its answers wait for it."""

MOST_STRANGERS = 64
"""Most connections that have not proved anything yet."""


class TokenListener:
    """Listens for endpoints, which ask for the events of the answers of this replica."""

    def __init__(self) -> None:
        """Have a secret; `listen` begins."""
        self.secret = secrets.token_bytes(32)
        self.answers: dict[int, SentAnswer] = {}
        self.connections: set[_Connection] = set()
        self.strangers: dict[_Connection, None] = {}
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._place = ("", 0)

    async def listen(self, host: str, tls: ssl.SSLContext | None) -> None:
        """Listen at a free port of *host*."""
        loop = asyncio.get_running_loop()
        made = partial(_Connection, self)
        handshake_s = None if tls is None else GREETING_S
        self._server = await loop.create_server(
            made, host, 0, ssl=tls, ssl_handshake_timeout=handshake_s
        )
        self._place = (host, self._server.sockets[0].getsockname()[1])

    @contextmanager
    def answering(self) -> Iterator[SentAnswer]:
        """Have an answer whose events the endpoint may ask for."""
        number = next(self._numbers)
        host, port = self._place
        place = ChannelPlace(host=host, port=port, secret=self.secret.hex(), answer=number)
        self.answers[number] = answer = SentAnswer(place)
        try:
            yield answer
        finally:
            self.answers.pop(number, None)
            if answer.connection is not None:
                answer.connection.answers.pop(number, None)

    def close(self) -> None:
        """Stop listening, and cut what is connected."""
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.transport.abort()


class SentAnswer:
    """
    One answer as it is sent: its frames wait until the endpoint has asked for them.

    Attributes:
        place: where the endpoint asks.
        connection: of the endpoint that has asked; `None`: none has.
    """

    def __init__(self, place: ChannelPlace) -> None:
        self.place = place
        self.connection: _Connection | None = None
        self._early: list[bytes] = []
        self._attached, self._may_go_on = asyncio.Event(), asyncio.Event()
        self._may_go_on.set()
        self._gone = False

    async def send(self, items: AsyncIterator[list[str]], splitter: EventSplitter) -> None:
        """Send all events and the end, as long as the endpoint wants them; raises as *items* do."""
        failure: Exception | None = None
        try:
            async for events in items:
                self._write_events(splitter.tokens(events).encode())
                if self._must_wait():
                    await self._wait()
                if self._gone:
                    return
        except Exception as error:  # noqa: BLE001  (raised below, when the endpoint knows)
            failure = error
        reason = "" if failure is None else str(failure) or type(failure).__name__
        self._write(_ending(self.place.answer, splitter.usage, splitter.ending, reason))
        await self._until_attached()
        await asyncio.sleep(0)  # what has been written is sent in this turn of the loop
        await self._until_room()
        if failure is not None:
            raise failure

    def attach(self, connection: _Connection) -> None:
        """Send what has come so far, and what comes, to *connection*."""
        if self._attached.is_set():
            raise FrameError(f"answer {self.place.answer} was asked for twice")
        self.connection = connection
        for waiting in self._early:
            connection.write(waiting)
        self._early.clear()
        self._attached.set()

    def hold(self, *, on: bool) -> None:
        """Stop reading the engine's events, or go on."""
        if on:
            self._may_go_on.clear()
        else:
            self._may_go_on.set()

    def leave(self) -> None:
        """Have nobody any more to send to."""
        self._gone = True
        self._may_go_on.set()

    def _write_events(self, text: bytes) -> None:
        """Write events in frames that are not too long; they may be cut anywhere."""
        for begin in range(0, len(text), PIECE_BYTES):
            piece = text[begin : begin + PIECE_BYTES]
            self._write(frame(Kind.EVENTS, self.place.answer, piece))

    def _write(self, written: bytes) -> None:
        if self.connection is None:
            self._early.append(written)
        else:
            self.connection.write(written)

    def _must_wait(self) -> bool:
        if self.connection is None:
            return len(self._early) >= EARLY_FRAMES
        return not self._may_go_on.is_set() or self.connection.is_full

    async def _wait(self) -> None:
        await self._until_attached()
        await self._may_go_on.wait()
        await self._until_room()

    async def _until_attached(self) -> None:
        try:
            async with asyncio.timeout(ATTACH_S):
                await self._attached.wait()
        except TimeoutError:
            logger.warning("the endpoint did not ask for an answer within %g s", ATTACH_S)
            self._gone = True

    async def _until_room(self) -> None:
        if self.connection is not None:
            await self.connection.has_room.wait()


class _Connection(asyncio.Protocol):
    """A connection of an endpoint, or of somebody who claims to be one."""

    transport: asyncio.Transport

    def __init__(self, listener: TokenListener) -> None:
        self.is_full = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.answers: dict[int, SentAnswer] = {}
        self._listener = listener
        self._reader = FrameReader(MOST_CONTROL_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._proved = False
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's have no such base
        self.transport.set_write_buffer_limits(high=HIGH_BYTES)
        self._listener.connections.add(self)
        self._listener.strangers[self] = None
        if len(self._listener.strangers) > MOST_STRANGERS:
            next(iter(self._listener.strangers)).refuse(f"{MOST_STRANGERS} others came since")
        self._expect(GREETING_S, "no proof came in time")
        self.write(frame(Kind.HELLO, 0, hello(self._nonce)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._listener.connections.discard(self)
        self._listener.strangers.pop(self, None)
        self.resume_writing()
        if self.answers:
            logger.warning("an endpoint is gone, with %d answers: %s", len(self.answers), exc)
        for answer in self.answers.values():
            answer.leave()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, number, payload in self._reader.feed(data):
                self._take(kind, number, payload)
        except FrameError as error:
            self.refuse(str(error))

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if not self._proved:
            self._greet(kind, payload)
        elif kind == Kind.ATTACH:
            self._attach(number)
        elif kind in {Kind.HOLD, Kind.GO_ON}:
            if (answer := self.answers.get(number)) is not None:
                answer.hold(on=kind == Kind.HOLD)
        elif kind == Kind.DETACH:
            if (answer := self.answers.pop(number, None)) is not None:
                answer.leave()
        elif kind == Kind.PING:
            self._expect(SILENT_S, f"no sign of life for {SILENT_S:g} s")
            self.write(frame(Kind.PONG))
        else:
            raise FrameError(f"a frame of kind {kind} came; expected one that an endpoint sends")

    def _attach(self, number: int) -> None:
        answer = self._listener.answers.get(number)
        if answer is None:
            self.write(_ending(number, None, "", "no such answer"))
            return
        answer.attach(self)
        self.answers[number] = answer

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind != Kind.HELLO:
            raise FrameError("another frame came before the greeting")
        theirs, secret = nonce_in(payload), self._listener.secret
        expected = proof(secret, b"endpoint", self._nonce, theirs)
        if not hmac.compare_digest(proof_in(payload), expected):
            raise FrameError("its proof is wrong: it does not know this replica's secret")
        self._proved = True
        self._listener.strangers.pop(self, None)
        self._expect(SILENT_S, f"no sign of life for {SILENT_S:g} s")
        self.write(frame(Kind.PROOF, 0, proof(secret, b"replica", self._nonce, theirs)))

    def _expect(self, limit_s: float, otherwise: str) -> None:
        """Close the connection after *limit_s*, unless something else is expected by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(limit_s, self.refuse, otherwise)

    def write(self, written: bytes) -> None:
        """Send a frame, together with those that others send in this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(written)

    def _flush(self) -> None:
        written, self._unsent = b"".join(self._unsent), []
        if not self.transport.is_closing():
            self.transport.write(written)

    def pause_writing(self) -> None:
        self.is_full = True
        self.has_room.clear()

    def resume_writing(self) -> None:
        self.is_full = False
        self.has_room.set()

    def refuse(self, reason: str) -> None:
        """Close the connection."""
        peer = self.transport.get_extra_info("peername")
        logger.warning("token channel of %s closed: %s", peer, reason)
        self.transport.abort()


def _ending(number: int, usage: dict[str, Any] | None, text: str, error: str) -> bytes:
    """Return the last frame of an answer."""
    ending = {"usage": usage, "text": text, "error": error[:MOST_ERROR]}
    return frame(Kind.END, number, json.dumps(ending).encode())
