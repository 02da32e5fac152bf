"""
What a client sends, parsed by h11: a bounded part at a time, and refused where h11 is lenient.

h11 takes as long for a chunk of one byte, or a header of two, as for one of thousands, and uvicorn
parses at once whatever it has received: a few megabytes a second of tiny chunks would stop all
other clients.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

import h11

from serving.protocol.messages import Refusal

if TYPE_CHECKING:
    from typing import TypeAlias

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
        """Check headers or trailers, with a line before them and the blank one."""
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
