"""Server-sent events: from bytes in pieces of any size to the data of each event."""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 24
"""Length at which an event that has not ended is given up: the ids of a prompt of a million tokens
are shorter."""

DONE = b"[DONE]"
"""Data of the last event of a stream of completions."""


class EventTooLongError(ValueError):
    """An event is far longer than any, and has not ended."""


class EventParser:
    """
    Parse a `text/event-stream` as its bytes arrive.

    Lines end in LF or CRLF. Comments and all fields but `data` are skipped; an event without its
    closing blank line is not delivered, as the standard says.
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """
        Process the next bytes, and return the data of the events that they complete.

        Raises:
            EventTooLongError: an event is far longer than any, and has not ended yet.
        """
        new = len(self._received)  # the earlier bytes have no line end
        self._received += received
        events = []
        while (end := self._received.find(b"\n", new)) >= 0:
            line = bytes(self._received[:end]).removesuffix(b"\r")
            del self._received[: end + 1]
            new = 0
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += end + 1
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        if len(self._received) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events
