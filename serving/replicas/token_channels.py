"""
The endpoint's end of the token channels: one connection to each replica that answers.

All answers of a replica come on it. What one read brings for an answer goes on to its client as one
piece, so that events are joined where either side falls behind, and never wait where neither does.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from typing import TYPE_CHECKING, Any, Protocol, cast

from serving.protocol.frames import (
    MOST_BYTES,
    NONCE_BYTES,
    PING_S,
    SILENT_S,
    FrameError,
    FrameReader,
    Kind,
    frame,
    hello,
    nonce_in,
    proof,
)

if TYPE_CHECKING:
    import ssl

    from serving.protocol.messages import ChannelPlace

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Longest time until a replica has greeted and proved itself."""

PINGS = int(SILENT_S / PING_S)
"""Unanswered pings after which a connection counts as lost."""


class ChannelLostError(Exception):
    """The connection to a replica could not be made, or has ended, in the middle of an answer."""


class AnswerEvents(Protocol):
    """What receives the events of one answer."""

    def events(self, text: bytes) -> None:
        """Take server-sent events with tokens."""

    def ended(self, ending: dict[str, Any]) -> None:
        """Take the end: `usage`, the `text` that remains, and `error`, empty if there is none."""

    def lost(self, error: ChannelLostError) -> None:
        """Take note that nothing more will come."""


class TokenChannels:
    """The connections to all replicas, made when they are first needed."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        """Connect with *tls*, or without."""
        self._tls = tls
        self._channels: dict[str, _Channel] = {}

    def attach(self, place: ChannelPlace, reader: AnswerEvents) -> None:
        """Have the events of the answer at *place* go to *reader*."""
        channel = self._channels.get(place.secret)
        if channel is None or channel.closed:
            self._channels = {of: each for of, each in self._channels.items() if not each.closed}
            channel = self._channels[place.secret] = _Channel(place, self._tls)
        channel.attach(place.answer, reader)

    def tell(self, place: ChannelPlace, kind: Kind) -> None:
        """Send a frame about an answer; after a `DETACH` nothing more comes of it."""
        channel = self._channels.get(place.secret)
        if channel is not None:
            channel.tell(place.answer, kind)

    def close(self) -> None:
        """Cut all connections."""
        for channel in self._channels.values():
            channel.give_up("the endpoint ends")


class _Channel(asyncio.Protocol):
    """
    The connection to one replica.

    Attributes:
        closed: it has ended, or could not be made.
    """

    transport: asyncio.Transport

    def __init__(self, place: ChannelPlace, tls: ssl.SSLContext | None) -> None:
        self.closed = False
        self._host, self._port = place.host, place.port
        self._secret = bytes.fromhex(place.secret)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._readers: dict[int, AnswerEvents] = {}
        self._waiting: list[bytes] = []
        self._frames = FrameReader(MOST_BYTES)
        self._greeted = self._proved = False
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._theirs = b""
        self._timer = self._loop.call_later(CONNECT_S, self.give_up, "no greeting came in time")
        self._connecting = asyncio.create_task(self._connect(tls))

    async def _connect(self, tls: ssl.SSLContext | None) -> None:
        try:
            await self._loop.create_connection(lambda: self, self._host, self._port, ssl=tls)
        except OSError as error:
            self._end(f"cannot connect: {error}")

    def attach(self, answer: int, reader: AnswerEvents) -> None:
        """Ask for the events of an answer."""
        self._readers[answer] = reader
        self.tell(answer, Kind.ATTACH)

    def tell(self, answer: int, kind: Kind) -> None:
        """Send a frame about an answer, once the greeting is over."""
        if kind == Kind.DETACH and self._readers.pop(answer, None) is None:
            return  # it has ended
        if self._greeted and not self.closed:
            self.transport.write(frame(kind, answer))
        else:
            self._waiting.append(frame(kind, answer))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's have no such base
        if self.closed:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"it ended: {exc}" if exc else "it ended")

    def data_received(self, data: bytes) -> None:
        self._unanswered = 0
        arrived: dict[int, list[bytes]] = {}
        try:
            for kind, answer, payload in self._frames.feed(data):
                if kind == Kind.EVENTS and self._proved:
                    arrived.setdefault(answer, []).append(payload)
                elif kind == Kind.END and self._proved:
                    ending = _ending_in(payload)
                    self._pass_on(answer, arrived.pop(answer, []))
                    self._tell_reader(self._readers.pop(answer, None), "ended", ending)
                else:
                    self._greet(kind, payload)
        except FrameError as error:
            self.give_up(str(error))
            return
        for answer, texts in arrived.items():
            self._pass_on(answer, texts)

    def _pass_on(self, answer: int, texts: list[bytes]) -> None:
        if texts:
            text = texts[0] if len(texts) == 1 else b"".join(texts)
            if not self._tell_reader(self._readers.get(answer), "events", text):
                self.tell(answer, Kind.DETACH)

    @staticmethod
    def _tell_reader(reader: AnswerEvents | None, what: str, value: object) -> bool:
        """Call a reader; its errors are its own, and no other answer's."""
        try:
            if reader is not None:
                getattr(reader, what)(value)
        except Exception:
            logger.exception("an answer was dropped")
            return False
        return True

    def _greet(self, kind: int, payload: bytes) -> None:
        """Take the replica's greeting, answer it with a proof, then check the replica's own."""
        if kind == Kind.PONG and self._proved:
            return
        if kind == Kind.HELLO and not self._greeted:
            theirs = nonce_in(payload)
            mine = proof(self._secret, b"endpoint", theirs, self._nonce)
            written = frame(Kind.HELLO, 0, hello(self._nonce) + mine)
            self.transport.write(b"".join((written, *self._waiting)))
            self._waiting.clear()
            self._greeted, self._theirs = True, theirs
        elif kind == Kind.PROOF and self._greeted and not self._proved:
            expected = proof(self._secret, b"replica", self._theirs, self._nonce)
            if not hmac.compare_digest(payload, expected):
                raise FrameError("its proof is wrong: another process listens there")
            self._proved = True
            self._timer.cancel()
            self._timer = self._loop.call_later(PING_S, self._ping)
        else:
            raise FrameError(f"a frame of kind {kind} came; expected one that a replica sends now")

    def _ping(self) -> None:
        if self._unanswered >= PINGS:
            self.give_up(f"no sign of life for {PINGS * PING_S:.0f} s")
            return
        self._unanswered += 1
        self.transport.write(frame(Kind.PING))
        self._timer = self._loop.call_later(PING_S, self._ping)

    def give_up(self, reason: str) -> None:
        self._connecting.cancel()
        if hasattr(self, "transport"):
            self.transport.abort()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        if self._readers or not self._proved:
            logger.warning(
                "token channel to %s:%d, with %d answers: %s",
                self._host,
                self._port,
                len(self._readers),
                reason,
            )
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            error = ChannelLostError(f"the connection to the replica was lost: {reason}")
            self._tell_reader(reader, "lost", error)


def _ending_in(payload: bytes) -> dict[str, Any]:
    """Return what an END holds, or raise FrameError."""
    try:
        ending = json.loads(payload)
    except ValueError as error:
        raise FrameError(f"the end of an answer is no JSON: {error}") from None
    if not isinstance(ending, dict) or ending.keys() != {"usage", "text", "error"}:
        raise FrameError("the end of an answer is no object of usage, text and error")
    return ending
