"""
The frames of a channel, and its listening end: it answers calls of other processes.

A frame is a header (length of the payload, number of the call, kind) and the payload. Both sides
prove that they know the listener's secret, which it gives away only through a call of Ray, before
any other frame counts. A call through here costs half of what a call of Ray Serve costs, and a
token a third of what it costs through Ray Serve's streams (docs/adr/0117).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import struct
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from serving.protocol.messages import ChannelPlace, EngineFailed, to_json

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    Method = Callable[..., Awaitable[object]]
    """Takes a `ServedCall` and arguments; what it returns is the result of the call."""
    Notice = Callable[..., None]
    """Takes the caller's connection and arguments."""


HEADER = struct.Struct("!IQB")

VERSION = 2

MAGIC = b"minicluster"

NONCE_BYTES = 16

PING_S = 10.0
"""Interval at which the caller asks for a sign of life."""

SILENT_S = 35.0
"""
Time without one after which either side gives a connection up: it may be open on one side only.
"""

MOST_BYTES = 64 << 20
"""Longest payload: a request with the longest prompt, or a whole answer to it."""

MOST_STRANGER_BYTES = 256
"""Longest payload of a caller that has not proved anything yet."""


class Kind(IntEnum):
    """
    What a frame is for.

    Attributes:
        HELLO: of the listener: version and nonce; of the caller: these and its proof.
        PROOF: of the listener, in answer.
        CALL: the caller wants something: JSON with `method` and `arguments`.
        RESULT: JSON, after which nothing comes of a call.
        BEGUN: JSON, after which `EVENTS` and an `END` come.
        EVENTS: server-sent events with tokens, as the client gets them.
        END: JSON: what is left of a call that began, or why it failed, as `error`.
        HOLD, GO_ON: the reader of a call's events is too slow; it has caught up.
        CANCEL: the caller wants no more of a call.
        NOTICE: something that wants no answer: JSON as of a `CALL`.
        PING, PONG: the other side is alive.
    """

    HELLO = 1
    PROOF = 2
    CALL = 3
    RESULT = 4
    BEGUN = 5
    EVENTS = 6
    END = 7
    HOLD = 8
    GO_ON = 9
    CANCEL = 10
    NOTICE = 11
    PING = 12
    PONG = 13


KINDS = frozenset(map(int, Kind))


class FrameError(Exception):
    """What came is no frame, or not the one that was expected; the connection is closed."""


def frame(kind: Kind, call: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame as it is sent."""
    return HEADER.pack(len(payload), call, kind) + payload


class FrameReader:
    """Cuts what a connection receives into frames."""

    __slots__ = ("_needed_bytes", "_parts", "_parts_bytes", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        """Expect payloads of at most *most_bytes*, which may change."""
        self.most_bytes = most_bytes
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._needed_bytes = HEADER.size

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """
        Return kind, call and payload of each frame that *data* completes.

        Raises:
            FrameError: of a payload that is too long, or a kind that does not exist.
        """
        if self._parts:
            self._parts.append(data)
            self._parts_bytes += len(data)
            if self._parts_bytes < self._needed_bytes:
                return []  # joined once, however many parts a long payload comes in
            data = b"".join(self._parts)
        begin, end, needed = 0, len(data), HEADER.size
        frames = []
        while end - begin >= HEADER.size:
            length, call, kind = HEADER.unpack_from(data, begin)
            if length > self.most_bytes or kind not in KINDS:
                raise FrameError(
                    f"a frame of kind {kind} and {length} bytes came; expected kinds 1 to"
                    f" {len(KINDS)} and at most {self.most_bytes} bytes"
                )
            needed = HEADER.size + length
            if end - begin < needed:
                break
            frames.append((kind, call, data[begin + HEADER.size : begin + needed]))
            begin, needed = begin + needed, HEADER.size
        self._parts = [data[begin:]] if begin < end else []
        self._parts_bytes, self._needed_bytes = end - begin, needed
        return frames


def hello(nonce: bytes) -> bytes:
    """Return the payload of a HELLO without a proof."""
    return MAGIC + VERSION.to_bytes(2, "big") + nonce


def nonce_in(payload: bytes) -> bytes:
    """
    Return the nonce of a HELLO.

    Raises:
        FrameError: the other side speaks another version, or something else.
    """
    name, rest = payload[: len(MAGIC)], payload[len(MAGIC) :]
    version, nonce = int.from_bytes(rest[:2], "big"), rest[2 : 2 + NONCE_BYTES]
    if name != MAGIC or len(nonce) < NONCE_BYTES:
        raise FrameError("what came is no greeting of a channel")
    if version != VERSION:
        raise FrameError(f"the other side speaks version {version}; expected {VERSION}")
    return nonce


def proof_in(payload: bytes) -> bytes:
    """Return the proof behind the nonce of a HELLO; empty if there is none."""
    return payload[len(MAGIC) + 2 + NONCE_BYTES :]


def proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    """Return what only a *side* (`caller` or `listener`) that knows the secret can send."""
    return hmac.digest(secret, b"|".join((side, *nonces)), "sha256")


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
        Answer by *methods*; `listen` begins.

        Args:
            methods: what may be called, by name.
            notices: what takes notices, by name; they are taken in order.
            group: of replicas that step together; `None`: this one steps alone.
            left: is told of each connection that has ended (`ServedCall.connection`).
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
    """A connection of a caller, or of somebody who claims to be one."""

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
    """Return what a `CALL` or a `NOTICE` is for, and its arguments, or raise FrameError."""
    try:
        asked = json.loads(payload)
        return names[asked["method"]], asked["arguments"]
    except (ValueError, TypeError, KeyError) as error:
        raise FrameError(f"a call of nothing that is here: {error!r}") from None


def whole(answer: Callable[..., Awaitable[object]]) -> Method:
    """Return the method of a call whose result is all that there is to send."""

    async def method(_call: ServedCall, **arguments: Any) -> object:  # noqa: ANN401
        return await answer(**arguments)

    return method
