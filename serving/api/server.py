"""
The endpoint's own HTTP server, inside its Serve replica: uvicorn and h11, with limits.

Ray Serve's proxy would send each request and token through one more process: 10 ms of a TTFT on
two cores, and half a minute without an answer if it dies (docs/adr/0113).

h11 takes as long for a chunk of one byte, or a header of two, as for one of thousands, and uvicorn
parses at once whatever it has received: a few megabytes a second of tiny chunks would stop all
other clients. So what a client sends is parsed a bounded part at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.api.endpoint import WRITE_CHUNK
from serving.api.tls import TlsFiles, server_context
from serving.protocol.messages import Refusal

if TYPE_CHECKING:
    from asyncio import Handle, TimerHandle, Transport
    from collections.abc import Coroutine, Generator
    from typing import TypeAlias

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    Parsed: TypeAlias = h11.Event | type[h11.NEED_DATA | h11.PAUSED]


PIECE_BYTES = 4 << 10
"""Bytes that h11 is given at once; most bytes of a chunk's head, and of the trailers."""

EVENTS_PER_TURN = 32
"""
Events of one connection in a turn of the event loop: chunks of a body, pieces of a long one.
They take about half a millisecond (docs/adr/0113).
"""

MAX_HEADERS = 100
"""Most header lines of a request, and of trailers: parsed, a line takes ten times its bytes."""

FREE_CHUNKS, LEAST_CHUNK_BYTES = 256, 64
"""Chunks of a body that may be of any length; if it has more, the least mean length of all."""

PAST_BYTES = 64 << 10
"""Bytes read after an answer that did not wait for them, so that short requests end in order."""

MALFORMED = Refusal(
    status=400, message="The request is not valid HTTP, or its headers are too long."
)

MANY_HEADERS = Refusal(status=431, message=f"At most {MAX_HEADERS} headers are read.")

LENIENT_LINES = Refusal(
    status=400,
    message="A header line ends without CR LF, or continues the one before; "
    "send each header in one line with CR LF at its end.",
)

TWO_LENGTHS = Refusal(
    status=400,
    message="The request says its length twice; send one Content-Length of one number, or "
    "Transfer-Encoding, which HTTP/1.0 does not have.",
)

FIRST_LINE = Refusal(
    status=400, message="The request's first line is not a method, a target and HTTP/1.1."
)

TINY_CHUNKS = Refusal(
    status=400,
    message=f"The body has more than {FREE_CHUNKS} chunks, of less than {LEAST_CHUNK_BYTES} bytes "
    "in the mean; send longer chunks, or a Content-Length.",
)

LONG_CHUNK_HEAD = Refusal(
    status=400, message=f"A chunk's head, or the trailers, exceed {PIECE_BYTES} bytes."
)

BLANK_LINE = re.compile(rb"\n\r?\n")
"""The end of the headers as h11 finds it."""

LENIENT = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A line that ends with LF alone, or continues the one before; other servers read it otherwise."""

LENGTH = re.compile(rb"\ncontent-length:([^\r\n]*)")

CODING = b"\ntransfer-encoding:"

VERSION = re.compile(rb"[^\r\n]* http/1\.[0-9]\r\n")
"""What heads have, in lower case: lengths, a coding, and as first line one of a version we know."""

ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
"""A target with the host's name, as clients send it to proxies."""


class RequestParser(h11.Connection):
    """
    A server's side of h11 that gives it what was received piece by piece.

    Attributes:
        events_left: events that it parses before it asks for more bytes although it has some.
        refusal: what a request is answered with that raised RemoteProtocolError.
    """

    def __init__(self, header_bytes: int) -> None:
        """Start without a request; *header_bytes* is the most that its line and headers have."""
        super().__init__(h11.SERVER, max_incomplete_event_size=header_bytes)
        self.events_left = 0
        self.refusal = MALFORMED
        self._received = bytearray()
        self._searched_bytes = self._past_bytes = 0
        self._chunks = self._chunk_bytes = 0
        self._may_be_blank = True

    @property
    def has_bytes(self) -> bool:
        """Whether bytes were received that are of no event yet."""
        return bool(self._received or self.trailing_data[0])

    def receive_data(self, data: bytes) -> None:
        """Keep the bytes until `next_event` parses them."""
        self._received += data

    def next_event(self) -> Parsed:
        """
        Return the next event, NEED_DATA also where `events_left` is 0.

        Raises:
            RemoteProtocolError: the request cannot be read, and none after it.
        """
        if not self.events_left:
            return h11.NEED_DATA
        self.events_left -= 1
        event = self._checked_event()
        while event is h11.NEED_DATA and self._received:
            self._take_piece()
            event = self._checked_event()
        return event

    def _take_piece(self) -> None:
        piece = bytes(self._received[:PIECE_BYTES])
        del self._received[:PIECE_BYTES]
        if self.our_state is h11.DONE and self.their_state is h11.SEND_BODY:
            self._past_bytes += len(piece)
            if self._past_bytes > PAST_BYTES:
                self._refuse(MALFORMED)  # nobody sees it: the answer has been given
        super().receive_data(piece)

    def _checked_event(self) -> Parsed:
        before = self.trailing_data[0]
        if self.their_state is h11.IDLE:
            if self._may_be_blank and before[:1] == b"\r":
                if before == b"\r":
                    return h11.NEED_DATA
                before = self._past_blank_line(before)
            self._check_head(before)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._past_bytes = self._chunks = self._chunk_bytes = 0
            self._may_be_blank = True
            return _by_path(event)
        if isinstance(event, h11.Data):
            self._check_chunks(event)
        elif isinstance(event, h11.EndOfMessage):
            self._check_lines(before[: len(before) - len(self.trailing_data[0])])
        elif self.their_state is h11.SEND_BODY and len(before) > PIECE_BYTES:
            self._refuse(LONG_CHUNK_HEAD)
        return event

    def _past_blank_line(self, received: bytes) -> bytes:
        """Skip one line before a request, which some clients end their bodies with."""
        self._may_be_blank = False
        if received[:2] == b"\r\n":
            self._receive_buffer.maybe_extract_at_most(2)
        return self.trailing_data[0]

    def _check_head(self, received: bytes) -> None:
        """Check a request's line and headers before h11 parses them, if all have been received."""
        end = BLANK_LINE.search(received, max(0, self._searched_bytes - 2))
        self._searched_bytes = 0 if end else len(received)
        if end is None:
            return
        head = received[: end.end()].lower()
        self._check_lines(head)
        if not VERSION.match(head):
            self._refuse(FIRST_LINE)
        lengths, coded = LENGTH.findall(head), CODING in head
        if len(lengths) + coded > 1 or b"," in b"".join(lengths):
            self._refuse(TWO_LENGTHS)
        if coded and b" http/1.0\r\n" in head:
            self._refuse(TWO_LENGTHS)

    def _check_lines(self, lines: bytes) -> None:
        if lines.count(b"\n") > MAX_HEADERS + 2:
            self._refuse(MANY_HEADERS)
        # Those of trailers may begin with the LF of a chunk, whose CR came in the piece before.
        if lines == b"\n" or LENIENT.search(lines, 1):
            self._refuse(LENIENT_LINES)

    def _check_chunks(self, data: h11.Data) -> None:
        self._chunks += data.chunk_end
        self._chunk_bytes += len(data.data)
        few = self._chunks <= FREE_CHUNKS
        if not few and self._chunk_bytes < LEAST_CHUNK_BYTES * self._chunks:
            self._refuse(TINY_CHUNKS)

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self.refusal = refusal
        raise h11.RemoteProtocolError(refusal.message, refusal.status)


def _by_path(request: h11.Request) -> h11.Request:
    """
    Return a request whose target is a path, and whose host is the one that it was sent to.

    A host in the target replaces the header (RFC 9112, 3.2.2), so that the same one is checked.
    """
    absolute = ABSOLUTE.match(request.target)
    if absolute is None:
        return request
    host, path = absolute.groups()
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"Host", host), *others],
        http_version=request.http_version,
    )


logger = logging.getLogger(__name__)

BACKLOG = 128

DISCONNECTED = "disconnected"
"""Key of a request's state: an event that is set when its connection is closed."""

LINGER_BYTES = 32 << 20
"""Most bytes that are thrown away before a close: twice the longest body of most models."""

CERTIFICATE_INTERVAL_S = 5
"""Interval at which the certificate's files are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """
    What one client may take of the server.

    Attributes:
        connections: most connections at once; half of the process's files, if that is less.
        header_bytes: most bytes of a request's line and headers.
        handshake_s: from a connection to the end of its TLS handshake.
        header_s: from the first byte of a request, or a new connection, to the end of its headers.
        body_s: from there to the end of its body.
        send_s: longest time in which a client reads nothing of what is sent to it.
        linger_s: time for a client to read its answer and stop sending, before a close.
        keep_alive_s: idle time of a connection; longer than clients keep theirs.
    """

    connections: int = 1024
    header_bytes: int = 64 << 10
    handshake_s: float = 10.0
    header_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 30.0
    linger_s: float = 2.0
    keep_alive_s: int = 90


LATE = Refusal(status=408, message="The request did not arrive in time.")


def _answer(refusal: Refusal) -> bytes:
    status, body = HTTPStatus(refusal.status), json.dumps(refusal.body)
    return (
        f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()


class HttpServer:
    """
    A uvicorn server of one application, with a socket of its own.

    Attributes:
        limits, max_connections, count, context: what its connections share.
        waiting: those without a request, longest first.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        limits: HttpLimits | None = None,
        tls: TlsFiles | None = None,
        count: Callable[[int], None] = lambda _status: None,
    ) -> None:
        """
        Bind the port, without accepting requests yet.

        *count* is told the status of each answer that is not the application's.

        Raises:
            OSError: the port cannot be bound, or the certificate cannot be used.
        """
        self.limits = limits or HttpLimits()
        self.allow(self.limits.connections)
        self.count = count
        self.context = None if tls is None else server_context(tls)
        self.waiting: dict[LimitedConnection, None] = {}
        self._tls = tls
        self._loaded = None if tls is None else tls.changed_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Several endpoint processes listen at one port; the kernel deals connections out to them.
        self._socket = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=True
        )
        config = uvicorn.Config(
            HttpBoundary(app),
            http=partial(LimitedConnection, server=self),  # type: ignore[arg-type]
            backlog=BACKLOG,
            log_config=None,
            log_level="error",  # a line for each malformed request would fill the disk
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,  # any client on this machine could name another one in the log
            timeout_keep_alive=self.limits.keep_alive_s,
            timeout_notify=CERTIFICATE_INTERVAL_S,
            callback_notify=self.reload_certificate,
        )
        self._server = uvicorn.Server(config)

    async def serve(self) -> None:
        """Answer until stopped, and release the port."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Stop accepting requests; `serve` returns after the last answer."""
        self._server.should_exit = True

    def allow(self, connections: int) -> None:
        """Set the most connections at once, of which half of the process's files is the limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.max_connections = connections if hard < 0 else min(connections, hard // 2)

    async def reload_certificate(self) -> None:
        """Let new connections have the certificate in the files, if these have changed."""
        if self._tls is None or self.context is None:
            return
        try:
            changed = self._tls.changed_s
            if changed == self._loaded:
                return
            server_context(self._tls)  # files that do not fit would spoil the context in use
            self._tls.load(self.context)
        except OSError as error:
            logger.warning("the certificate in use stays: %s: %s", self._tls.cert, error)
            return
        self._loaded = changed


class LimitedConnection(H11Protocol):
    """
    A connection of uvicorn with time limits; beyond their number the longest idle one is closed.

    In a turn of the event loop it parses a bounded part of what was received, so that others have
    their turn. TLS begins here, and not in the event loop, so that connections count during their
    handshakes.
    """

    conn: RequestParser

    def __init__(self, *, server: HttpServer, **given: Any) -> None:  # noqa: ANN401  (uvicorn's)
        super().__init__(**given)
        shared = {DISCONNECTED: asyncio.Event(), WRITE_CHUNK: self.write_chunk}
        self.app_state = {**self.app_state, **shared}
        self._server, self._limits = server, server.limits
        self.conn = RequestParser(self._limits.header_bytes)
        self._timer: TimerHandle | None = None
        self._timed: tuple[object, object] | None = None
        self._send_timer: TimerHandle | None = None
        self._handshake: asyncio.Future[Any] | None = None
        self._early = b""
        self._next_turn: Handle | None = None
        self._lingering = False
        self._thrown_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Count the connection; begin TLS, or its first request."""
        self._server.waiting[self] = None
        self.connections.add(self)
        self.transport = transport
        if len(self.connections) > self._server.max_connections:
            oldest = next(iter(self._server.waiting))
            del self._server.waiting[oldest]
            oldest.transport.abort()
        # Bytes that the kernel does not take are a client that does not read.
        transport.set_write_buffer_limits(high=1, low=0)
        if self._server.context is None:
            self._begin(transport)
        elif not transport.is_closing():
            handshake = _Begun(
                self.loop.start_tls(
                    transport,
                    self,
                    self._server.context,
                    server_side=True,
                    ssl_handshake_timeout=self._limits.handshake_s,
                )
            )
            self._handshake = asyncio.ensure_future(handshake)
            self._handshake.add_done_callback(partial(self._after_handshake, transport))

    def _after_handshake(self, plain: Transport, handshake: asyncio.Future[Any]) -> None:
        # A connection that was closed meanwhile counts as a handshake without an error.
        if handshake.cancelled() or handshake.exception() is not None or plain.is_closing():
            plain.abort()
            self.connection_lost(None)
            return
        self._begin(handshake.result())
        self.transport.set_write_buffer_limits(high=1, low=0)
        if self._early:
            self.data_received(self._early)

    def _begin(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._expect((h11.IDLE, None), self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """End its timers, and tell the application."""
        self.app_state[DISCONNECTED].set()
        self._server.waiting.pop(self, None)
        self._expect(None)
        self._cancel_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take the next bytes of a request, which has to arrive in time."""
        if self.flow is None:
            self._early += data  # a request that came with the end of the handshake
        elif not self._lingering:
            super().data_received(data)
            self._watch(begun=True)
        else:
            self._thrown_bytes += len(data)
            if self._thrown_bytes > LINGER_BYTES:
                self.transport.close()

    def handle_events(self) -> None:
        """Parse a part of what was received, and the next part in the next turn of the loop."""
        self.conn.events_left = EVENTS_PER_TURN
        super().handle_events()
        if self._is_over():
            return
        if self.conn.events_left:
            if not self.flow.read_paused:
                self.transport.resume_reading()
            return
        # An application that takes its body resumes reading before this, each time.
        self.transport.pause_reading()
        if self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self._next_turn = None
        if not self._is_over():
            self.handle_events()
            self._watch(begun=True)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch(begun=self.conn.has_bytes)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (uvicorn's text)
        """Refuse what the parser refused."""
        self._refuse(self.conn.refusal)

    def write_chunk(self, text: bytes) -> bool:
        """Write a chunk of the answer under way; False: its client has yet to read the last."""
        if not text or self.flow.write_paused or self._is_over():
            return False  # an empty chunk would be the last
        self.transport.write(b"%x\r\n%b\r\n" % (len(text), text))
        return True

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if its client has yet to read an answer."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._await_reader(None)

    def resume_writing(self) -> None:
        """End that wait."""
        super().resume_writing()
        self._cancel_send_timer()

    def _watch(self, *, begun: bool) -> None:
        """Note whether the connection has a request, and limit it; *begun*: or a part of one."""
        if self._is_over():
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            self._server.waiting[self] = None
            if begun:
                self._expect((state, self.cycle), self._limits.header_s)
            return
        self._server.waiting.pop(self, None)
        # An early answer ends no body: what is left of it has to come, to be read past.
        self._expect((state, self.cycle) if state is h11.SEND_BODY else None, self._limits.body_s)

    def _expect(self, what: tuple[object, object] | None, limit_s: float = 0.0) -> None:
        """Start the timer of a part of a request, unless it runs; `None` ends it."""
        if what == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed = what
        self._timer = None if what is None else self.loop.call_later(limit_s, self._give_up)

    def _give_up(self) -> None:
        has_request = self.conn.their_state is h11.SEND_BODY or self.conn.has_bytes
        if has_request and not self._lingering:
            self._refuse(LATE)
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """
        Answer with *refusal*, unless an answer has begun, and close the connection after a while.

        What comes meanwhile is thrown away unparsed: a close with unread bytes resets the
        connection, and its client may then not get to read the answer.
        """
        if self._is_over():
            return
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self._server.count(refusal.status)
            self.transport.write(_answer(refusal))
        self._lingering = True
        self.app_state[DISCONNECTED].set()
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application's answer is late
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._server.waiting[self] = None
        self._expect(("linger", None), self._limits.linger_s)

    def _is_over(self) -> bool:
        return self._lingering or self.transport.is_closing()

    def _await_reader(self, before_bytes: int | None) -> None:
        """Close the connection if its client takes nothing for as long as is allowed."""
        left_bytes = self.transport.get_write_buffer_size()
        if before_bytes is not None and left_bytes >= before_bytes:
            self.transport.abort()
            return
        self._send_timer = self.loop.call_later(self._limits.send_s, self._await_reader, left_bytes)

    def _cancel_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


class _Begun(Awaitable[Any]):
    """
    A coroutine that has taken its first step.

    uvloop reads from a new connection before a task's first step, and TLS needs its first bytes.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._awaited = coroutine.send(None)

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._awaited
        return (yield from self._coroutine.__await__())


class HttpBoundary:
    """
    Stands between the server and the application.

    When the client disconnects it cancels the work for its request, as Ray Serve's proxy does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answered = False

        async def passed(message: Message) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not answered:
                await asyncio.Future()  # until it is cancelled: half a body is of no use
            return message

        answering = asyncio.ensure_future(self._app(scope, received, passed))
        leaving = asyncio.ensure_future(scope["state"][DISCONNECTED].wait())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answered:  # the rest of its work is not for the client
                await asyncio.wait({answering})
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()
