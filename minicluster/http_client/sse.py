"""Server-sent events: from bytes in pieces of any size to the data of each event."""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 24
"""Length at which an event that has not ended is given up: the ids of a prompt of a million tokens
are shorter."""

DONE = b"[DONE]"  # data of the last event of a stream of completions

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLongError(ValueError):
    """An event is far longer than any, and has not ended."""


class EventParser:
    """
    Parse a `text/event-stream` as its bytes arrive.

    Lines end in LF, CRLF or CR, also mixed, and a byte order mark may come first. Comments and all
    fields but `data` are skipped; an event without its closing blank line is not delivered. An
    event is delivered with the byte that ends it: the LF of a CRLF may come later.

    Source: WHATWG HTML, 9.2.6 "Interpreting an event stream".
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._begun = self._after_cr = False

    def feed(self, received: bytes) -> list[bytes]:
        """
        Process the next bytes, and return the data of the events that they complete.

        Raises EventTooLongError: an event is far longer than any, and has not ended yet.
        """
        new = len(self._received)  # the earlier bytes have no line end
        if self._after_cr or b"\r" in received:
            received = self._with_line_feeds(received)
        self._received += received
        if not self._begun:
            self._begin()
            new = 0
        events = []
        while (end := self._received.find(b"\n", new)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            new = 0
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += end + 1
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        if len(self._received) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _begin(self) -> None:
        """Skip the byte order mark, once it is there as a whole: its parts hold no line end."""
        self._begun = not BYTE_ORDER_MARK.startswith(self._received)
        if self._received.startswith(BYTE_ORDER_MARK):
            self._begun = True
            del self._received[: len(BYTE_ORDER_MARK)]

    def _with_line_feeds(self, received: bytes) -> bytes:
        """Return *received* with LF for every line end; a CRLF may be in two pieces."""
        if self._after_cr and received:
            self._after_cr = False
            received = received.removeprefix(b"\n")
        if received:
            self._after_cr = received.endswith(b"\r")
        return received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
