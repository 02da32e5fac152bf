"""Server-sent events: bytes, cut anywhere, to the data of the events."""

from __future__ import annotations


class EventParser:
    """
    Parse a `text/event-stream` as its bytes arrive.

    Lines end in LF or CRLF. Comments and every field but `data` are skipped; an event that
    its blank line does not close is not delivered, as the standard has it.
    """

    def __init__(self) -> None:
        """Start at the beginning of a stream."""
        self._received = bytearray()
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Take the next bytes, return the data of the events that they complete."""
        self._received += received
        events = []
        while (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[:end]).removesuffix(b"\r")
            del self._received[: end + 1]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
