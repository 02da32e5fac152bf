"""
The channels of the application's processes, both ends: calls, and the events of answers.

All calls of a process to another go over one connection. What one read brings for a call goes on to
its reader as one piece, so that events are joined where either side falls behind, and never wait
where neither does. A call costs half of what a call of Ray Serve costs, and a token a third of what
it costs through Ray Serve's streams (docs/adr/0117).
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from serving.protocol.messages import (
    MOST_BYTES,
    MOST_STRANGER_BYTES,
    NONCE_BYTES,
    PING_S,
    SILENT_S,
    ChannelPlace,
    EngineFailed,
    FrameError,
    FrameReader,
    Kind,
    frame,
    hello,
    message_in,
    nonce_in,
    proof,
    proof_in,
    to_json,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    Method = Callable[..., Awaitable[object]]
    """Takes a `ServedCall` and arguments; what it returns is the result of the call."""
    Notice = Callable[..., None]
    """Takes the caller's connection and arguments."""


logger = logging.getLogger(__name__)

Asked = TypeVar("Asked")

GREETING_S = 10.0
"""Longest time from a connection to its proof."""

PIECE_BYTES = 1 << 20
"""Most bytes of events in one frame."""

MOST_ERROR = 1000
"""Most characters of what broke a call off; the caller logs it."""

HIGH_BYTES = 1 << 20
"""Bytes that a connection holds before its calls wait for it."""

MOST_STRANGERS = 64
"""Most connections that have not proved anything yet."""


class CallListener:
    """
    Listens for callers.

    Attributes:
        place: where they find it; it tells its secret.
        calls: those under way.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        notices: Mapping[str, Notice] | None = None,
        group: str | None = None,
        left: Callable[[object], None] = lambda _connection: None,
    ) -> None:
        """
        Answer calls by *methods*, by name, and take *notices*, in order; `listen` begins.

        *group* is that of replicas that step together; *left* is told of each connection
        (`ServedCall.connection`) that has ended.
        """
        self.methods = methods
        self.notices = notices or {}
        self.calls: set[ServedCall] = set()
        self.connections: set[_Connection] = set()
        self.strangers: dict[_Connection, None] = {}
        self.left = left
        self._group = group
        self._idle = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, tls: ssl.SSLContext | None) -> None:
        """Listen at a free port of *host*."""
        loop = asyncio.get_running_loop()
        made = partial(_Connection, self)
        handshake_s = None if tls is None else GREETING_S
        self._server = await loop.create_server(
            made, host, 0, ssl=tls, ssl_handshake_timeout=handshake_s
        )
        self.place = ChannelPlace(
            host=host,
            port=self._server.sockets[0].getsockname()[1],
            secret=secrets.token_bytes(32).hex(),
            group=self._group,
        )

    def ended(self, call: ServedCall) -> None:
        """Take note that a call has ended."""
        self.calls.discard(call)
        if not self.calls:
            self._idle.set()

    async def drain(self) -> None:
        """Wait until no call is under way."""
        while self.calls:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """Stop listening, and cut what is connected."""
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.transport.abort()


class ServedCall:
    """
    One call as it is answered.

    Attributes:
        connection: of its caller.
    """

    def __init__(self, connection: _Connection, number: int) -> None:
        self.connection = connection
        self._number = number
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self._ended = False
        self.task: asyncio.Task[None] | None = None

    async def run(self, method: Method, arguments: dict[str, Any]) -> None:
        """Answer by *method*; its errors are the caller's to know."""
        try:
            result = await method(self, **arguments)
            if not self._ended:
                self._write(Kind.RESULT, to_json(result))
        except Exception as error:
            if not isinstance(error, EngineFailed):
                logger.exception("a call failed")
            self.end(error=str(error) or type(error).__name__)

    def begin(self, value: object) -> None:
        """Send what comes before events."""
        self._write(Kind.BEGUN, to_json(value))

    def events(self, text: bytes) -> None:
        """Send events in frames that are not too long; they may be cut anywhere."""
        for begin in range(0, len(text), PIECE_BYTES):
            self._write(Kind.EVENTS, text[begin : begin + PIECE_BYTES])

    def end(self, **ending: object) -> None:
        """Send the end; nothing comes after it."""
        if not self._ended:
            self._ended = True
            error = str(ending.get("error") or "")[:MOST_ERROR]
            self._write(Kind.END, json.dumps({**ending, "error": error}).encode())

    @property
    def must_wait(self) -> bool:
        """Whether the caller reads too slowly to be sent more now."""
        return self.connection.is_full or not self._may_go_on.is_set()

    async def room(self) -> None:
        """Wait until the caller takes more."""
        await self._may_go_on.wait()
        await self.connection.has_room.wait()

    def told(self, kind: int) -> None:
        """Do what the caller wants: have `room` wait, let it go on, or end."""
        if kind == Kind.HOLD:
            self._may_go_on.clear()
        elif kind == Kind.GO_ON:
            self._may_go_on.set()
        elif self.task is not None:
            self.task.cancel()

    def _write(self, kind: Kind, payload: bytes) -> None:
        if len(payload) > MOST_BYTES:
            raise EngineFailed(f"an answer has {len(payload)} bytes; expected at most {MOST_BYTES}")
        self.connection.write(frame(kind, self._number, payload))


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, listener: CallListener) -> None:
        self.is_full = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.calls: dict[int, ServedCall] = {}
        self._listener = listener
        self._reader = FrameReader(MOST_STRANGER_BYTES)
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
        if self.calls:
            logger.warning("a caller is gone, with %d calls: %s", len(self.calls), exc)
        for call in self.calls.values():
            call.told(Kind.CANCEL)
        if self._proved:
            self._listener.left(self)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, number, payload in self._reader.feed(data):
                self._take(kind, number, payload)
        except FrameError as error:
            self.refuse(str(error))

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if not self._proved:
            self._greet(kind, payload)
        elif kind == Kind.CALL:
            self._call(number, payload)
        elif kind == Kind.NOTICE:
            self._notice(*_asked(payload, self._listener.notices))
        elif kind in {Kind.HOLD, Kind.GO_ON, Kind.CANCEL}:
            if (call := self.calls.get(number)) is not None:
                call.told(kind)
        elif kind == Kind.PING:
            self._expect(SILENT_S, f"no sign of life for {SILENT_S:g} s")
            self.write(frame(Kind.PONG))
        else:
            raise FrameError(f"a frame of kind {kind} came; expected one that a caller sends")

    def _call(self, number: int, payload: bytes) -> None:
        if number in self.calls:
            raise FrameError(f"the number {number} of a call came twice")
        method, arguments = _asked(payload, self._listener.methods)
        self.calls[number] = call = ServedCall(self, number)
        self._listener.calls.add(call)
        call.task = self._loop.create_task(call.run(method, arguments))
        call.task.add_done_callback(partial(self._call_ended, number))

    def _notice(self, take: Notice, arguments: dict[str, Any]) -> None:
        try:
            take(self, **arguments)
        except Exception:
            logger.exception("a notice was not taken")

    def _call_ended(self, number: int, _task: asyncio.Task[None]) -> None:
        self._listener.ended(self.calls.pop(number))

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind != Kind.HELLO:
            raise FrameError("another frame came before the greeting")
        theirs, secret = nonce_in(payload), bytes.fromhex(self._listener.place.secret)
        expected = proof(secret, b"caller", self._nonce, theirs)
        if not hmac.compare_digest(proof_in(payload), expected):
            raise FrameError("its proof is wrong: it does not know the secret of this process")
        self._proved = True
        self._reader.most_bytes = MOST_BYTES
        self._listener.strangers.pop(self, None)
        self._expect(SILENT_S, f"no sign of life for {SILENT_S:g} s")
        self.write(frame(Kind.PROOF, 0, proof(secret, b"listener", self._nonce, theirs)))

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
        logger.warning("channel of %s closed: %s", peer, reason)
        self._listener.strangers.pop(self, None)
        self.transport.abort()


def _asked(payload: bytes, names: Mapping[str, Asked]) -> tuple[Asked, dict[str, Any]]:
    try:
        message = json.loads(payload)
        return names[message["method"]], message["arguments"]
    except (ValueError, TypeError, KeyError) as error:
        raise FrameError(f"a call of nothing that is here: {error!r}") from None


def whole(answer: Callable[..., Awaitable[object]]) -> Method:
    """Return the method of a call whose result is all that there is to send."""

    async def method(_call: ServedCall, **arguments: Any) -> object:  # noqa: ANN401
        return await answer(**arguments)

    return method


CONNECT_S = 10.0
"""Longest time until a process has greeted and proved itself."""

PINGS = int(SILENT_S / PING_S)
"""Unanswered pings after which a connection counts as lost."""

OF_CALLS = frozenset({Kind.RESULT, Kind.BEGUN, Kind.EVENTS, Kind.END})
"""Frames that answer a call."""


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
        result: result, or what comes before events. Its errors are EngineFailed, where the call
            failed there, and ChannelLostError.
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
        payload = to_json({"method": method, "arguments": arguments})
        if len(payload) > MOST_BYTES:  # it would end the connection, and all other calls on it
            call.refuse(f"a call has {len(payload)} bytes; expected at most {MOST_BYTES}")
            return call
        self._calls[number] = call
        self.send(Kind.CALL, number, payload)
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
