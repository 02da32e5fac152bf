"""
The calling end of the channels: one connection to each process that is called.

All calls of a process go over it. What one read brings for a call goes on to its reader as one
piece, so that events are joined where either side falls behind, and never wait where neither does.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import secrets
from typing import TYPE_CHECKING, Any, Protocol, cast

from serving.protocol.messages import (
    EngineFailed,
    message_in,
    to_json,
)
from serving.replicas.call_listener import (
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
    from collections.abc import Callable, Mapping

    from serving.protocol.messages import ChannelPlace


logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Longest time until a process has greeted and proved itself."""

PINGS = int(SILENT_S / PING_S)
"""Unanswered pings after which a connection counts as lost."""

OF_CALLS = frozenset({Kind.RESULT, Kind.BEGUN, Kind.EVENTS, Kind.END})
"""Frames that answer a call."""

RECONNECT_S = 0.5
"""Time until a lost connection is tried again, for as long as its process is expected to run."""


class ChannelLostError(Exception):
    """The connection to a process could not be made, or has ended, in the middle of a call."""


class CallReader(Protocol):
    """What takes what comes of a call after its beginning."""

    def events(self, text: bytes) -> None:
        """Take server-sent events with tokens."""

    def ended(self, ending: dict[str, Any]) -> None:
        """Take the end; `error` says why the call failed, and is empty if it did not."""

    def lost(self, error: ChannelLostError) -> None:
        """Take note that nothing more will come."""


class Call:
    """
    One call of a process.

    Attributes:
        result: what it returns, or what comes before events. Its errors are EngineFailed, where
            the call failed there, and ChannelLostError.
        streams: whether events come after the result.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.result: asyncio.Future[Any] = channel.loop.create_future()
        self.streams = False
        self._channel = channel
        self._number = number
        self._reader: CallReader | None = None
        self._early: list[tuple[str, Any]] = []

    def forward(self, reader: CallReader) -> None:
        """Give *reader* what has come since the result, and what comes."""
        self._reader = reader
        for what, value in self._early:
            getattr(reader, what)(value)
        self._early.clear()

    def tell(self, kind: Kind) -> None:
        """Send `HOLD` or `GO_ON`."""
        self._channel.send(kind, self._number)

    def cancel(self) -> None:
        """End the work; nothing comes any more, and nothing happens to a call that has ended."""
        self._reader = None
        self._channel.forget(self._number)
        self.result.cancel()

    def take(self, kind: int, payload: bytes) -> None:
        """Take a frame of the process; raises FrameError."""
        if kind == Kind.EVENTS:
            self._pass_on("events", payload)
            return
        try:
            value = message_in(json.loads(payload))
        except ValueError as error:
            raise FrameError(f"the result of a call cannot be read: {error}") from None
        if kind == Kind.END and not self.result.done():
            self._fail(EngineFailed(value["error"]))
        elif kind == Kind.END:
            self._pass_on("ended", value)
        elif not self.result.done():
            self.streams = kind == Kind.BEGUN
            self.result.set_result(value)

    def lost(self, error: ChannelLostError) -> None:
        """Take note that nothing more will come."""
        if self.result.done():
            self._pass_on("lost", error)
        else:
            self._fail(error)

    def refuse(self, reason: str) -> None:
        """Take note that it cannot be sent."""
        self._fail(EngineFailed(reason))

    def _fail(self, error: Exception) -> None:
        self.result.set_exception(error)
        self.result.exception()  # asyncio would log that nobody looked, of a call that is given up

    def _pass_on(self, what: str, value: object) -> None:
        if self._reader is None:
            self._early.append((what, value))
        else:
            getattr(self._reader, what)(value)


class Channel(asyncio.Protocol):
    """
    The connection to one process.

    Attributes:
        place: of the process.
        closed: it has ended, or could not be made.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        place: ChannelPlace,
        tls: ssl.SSLContext | None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to connect to *place*; *ended* is called when that fails, or has ended."""
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self.place = place
        self._secret = bytes.fromhex(place.secret)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._unsent: list[bytes] = []
        self._frames = FrameReader(MOST_BYTES)
        self._greeted = self._proved = False
        self._unanswered = 0
        self._theirs = b""
        self._ended = ended
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._timer = self.loop.call_later(CONNECT_S, self.give_up, "no greeting came in time")
        self._connecting = asyncio.create_task(self._connect(tls))

    async def _connect(self, tls: ssl.SSLContext | None) -> None:
        place = self.place
        try:
            await self.loop.create_connection(lambda: self, place.host, place.port, ssl=tls)
        except OSError as error:
            self._end(f"cannot connect: {error}")

    async def ready(self) -> None:
        """Wait until both sides have proved themselves; raises ChannelLostError."""
        await asyncio.shield(self._ready)

    def when_ready(self, act: Callable[[], None]) -> None:
        """Call *act* once both sides have proved themselves."""
        self._ready.add_done_callback(lambda done: None if done.exception() else act())

    def call(self, method: str, arguments: dict[str, Any]) -> Call:
        """Call a method of the process, with arguments as `to_json` takes them."""
        number = next(self._numbers)
        call = Call(self, number)
        if self.closed:
            call.lost(ChannelLostError(f"the connection to {self._name} has ended"))
            return call
        asked = to_json({"method": method, "arguments": arguments})
        if len(asked) > MOST_BYTES:  # it would end the connection, and all other calls on it
            call.refuse(f"a call has {len(asked)} bytes; expected at most {MOST_BYTES}")
            return call
        self._calls[number] = call
        self.send(Kind.CALL, number, asked)
        return call

    def notify(self, method: str, arguments: dict[str, Any]) -> None:
        """Tell the process something that it does not answer."""
        self.send(Kind.NOTICE, 0, to_json({"method": method, "arguments": arguments}))

    def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        """Send a frame with others of this turn of the loop, once the greeting is over."""
        if not self._unsent and self._proved:
            self.loop.call_soon(self._flush)
        self._unsent.append(frame(kind, number, payload))

    def forget(self, number: int) -> None:
        """Cancel a call, unless it has ended."""
        if self._calls.pop(number, None) is not None:
            self.send(Kind.CANCEL, number)

    def _flush(self) -> None:
        written, self._unsent = b"".join(self._unsent), []
        if not self.closed:
            self.transport.write(written)

    @property
    def _name(self) -> str:
        return f"{self.place.host}:{self.place.port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the greeting."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's have no such base
        if self.closed:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is under way."""
        self._end(f"it ended: {exc}" if exc else "it ended")

    def data_received(self, data: bytes) -> None:
        """Give each call what came for it."""
        self._unanswered = 0
        arrived: dict[int, list[bytes]] = {}
        try:
            for kind, number, payload in self._frames.feed(data):
                if kind not in OF_CALLS or not self._proved:
                    self._greet(kind, payload)
                elif kind == Kind.EVENTS:
                    arrived.setdefault(number, []).append(payload)
                else:
                    self._pass_on(number, Kind.EVENTS, arrived.pop(number, []))
                    self._pass_on(number, kind, [payload])
                    if kind != Kind.BEGUN:
                        self._calls.pop(number, None)
        except FrameError as error:
            self.give_up(str(error))
            return
        for number, texts in arrived.items():
            self._pass_on(number, Kind.EVENTS, texts)

    def _pass_on(self, number: int, kind: int, payloads: list[bytes]) -> None:
        """Give a call what came for it; the errors of its reader are its own, and of no other."""
        call = self._calls.get(number)
        if call is None or not payloads:
            return
        try:
            call.take(kind, payloads[0] if len(payloads) == 1 else b"".join(payloads))
        except FrameError:
            raise
        except Exception:
            logger.exception("an answer was dropped")
            call.cancel()

    def _greet(self, kind: int, payload: bytes) -> None:
        """Take the listener's greeting, answer it with a proof, then check the listener's own."""
        if kind == Kind.PONG and self._proved:
            return
        if kind == Kind.HELLO and not self._greeted:
            theirs = nonce_in(payload)
            mine = proof(self._secret, b"caller", theirs, self._nonce)
            self.transport.write(frame(Kind.HELLO, 0, hello(self._nonce) + mine))
            self._greeted, self._theirs = True, theirs
        elif kind == Kind.PROOF and self._greeted and not self._proved:
            expected = proof(self._secret, b"listener", self._theirs, self._nonce)
            if not hmac.compare_digest(payload, expected):
                raise FrameError("its proof is wrong: another process listens there")
            self._proved = True
            self._timer.cancel()
            self._timer = self.loop.call_later(PING_S, self._ping)
            self._ready.set_result(None)
            self._flush()
        else:
            raise FrameError(f"a frame of kind {kind} came; expected one that a listener sends now")

    def _ping(self) -> None:
        if self._unanswered >= PINGS:
            self.give_up(f"no sign of life for {PINGS * PING_S:.0f} s")
            return
        self._unanswered += 1
        self.transport.write(frame(Kind.PING))
        self._timer = self.loop.call_later(PING_S, self._ping)

    def give_up(self, reason: str) -> None:
        """Cut the connection."""
        self._connecting.cancel()
        if hasattr(self, "transport"):
            self.transport.abort()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        calls, self._calls = self._calls, {}
        if calls or not self._proved:
            logger.warning("channel to %s, with %d calls: %s", self._name, len(calls), reason)
        error = ChannelLostError(f"the connection to {self._name} was lost: {reason}")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may have waited
        for call in calls.values():
            try:
                call.lost(error)
            except Exception:
                logger.exception("an answer was dropped")
        self._ended()


class Channels:
    """
    The connections to several processes, by their names, kept up while those are expected to run.

    Attributes:
        connected: those that can be called.
    """

    def __init__(
        self, tls: ssl.SSLContext | None, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Connect with *tls*, or without; *changed* is called whenever `connected` has changed."""
        self.connected: dict[str, Channel] = {}
        self._tls = tls
        self._changed = changed
        self._places: dict[str, ChannelPlace] = {}
        self._open: dict[str, Channel] = {}

    def expect(self, places: Mapping[str, ChannelPlace]) -> None:
        """Connect to the processes at *places*; those of others end with what is under way."""
        former, self._places = self._places, dict(places)
        for name, place in places.items():
            if former.get(name) != place:
                self._connect(name)
        if gone := self.connected.keys() - places.keys():
            for name in gone:
                del self.connected[name]
            self._changed()

    def call(self, name: str, method: str, arguments: dict[str, Any]) -> Call:
        """Call a method of a process; raises ChannelLostError where there is no connection."""
        channel = self._open.get(name)
        if channel is None:
            raise ChannelLostError(f"there is no connection to {name}")
        return channel.call(method, arguments)

    def close(self) -> None:
        """Cut all connections."""
        self._places = {}
        for channel in [*self._open.values()]:
            channel.give_up("this process ends")

    def _connect(self, name: str) -> None:
        place = self._places.get(name)
        if place is None:
            return
        former = self._open.get(name)
        if former is not None and former.place == place:  # calls on it go on
            former.when_ready(lambda: self._ready(name, former))
            return
        channel = Channel(place, self._tls, ended=lambda: self._lost(name, channel))
        self._open[name] = channel
        channel.when_ready(lambda: self._ready(name, channel))
        if former is not None:
            former.give_up("its process has another place")
            if self.connected.pop(name, None) is not None:
                self._changed()

    def _ready(self, name: str, channel: Channel) -> None:
        known = self.connected.get(name) is channel
        if not known and self._open.get(name) is channel and name in self._places:
            self.connected[name] = channel
            self._changed()

    def _lost(self, name: str, channel: Channel) -> None:
        if self._open.get(name) is not channel:
            return
        del self._open[name]
        if self.connected.pop(name, None) is not None:
            self._changed()
        if name in self._places:
            channel.loop.call_later(RECONNECT_S, self._connect, name)
