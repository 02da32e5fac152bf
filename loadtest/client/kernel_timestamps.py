"""When bytes reached this machine, by its kernel's own stamp: a busy reader is late, not that."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from time import monotonic, time
from typing import NamedTuple, Protocol

SO_TIMESTAMPNS = 35
"""Of Linux (asm-generic/socket.h: x86, arm64 and most others); Python has no name for it."""

TIMESPEC = struct.Struct("@ll")
NOTE_BYTES = socket.CMSG_SPACE(TIMESPEC.size)

OLDEST_S = 1.0
"""
Bytes that seem to have waited longer may have: then the reader stood still, and its run is not fit.
Or the wall clock was set, and nobody knows.
"""


class Arrival(NamedTuple):
    """
    When the last byte of a read reached this machine.

    Attributes:
        at_s: on the monotonic clock.
        by_kernel: whether the kernel says so; else it is when it was read.
    """

    at_s: float
    by_kernel: bool


class Readable(Protocol):
    """A TCP socket, the standard library's or gevent's."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option."""

    def recvmsg(
        self, size: int, note_bytes: int, flags: int, /
    ) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        """Read, with what the kernel notes beside it."""


def ask_for_stamps(sock: Readable) -> None:
    """Have the kernel stamp what *sock* receives, where it can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def receive(sock: Readable, size: int, flags: int = 0) -> tuple[bytes, Arrival]:
    """
    Read as `recv` does, up to *size* bytes, and say when the last of them arrived.

    Source:
        `SO_TIMESTAMPNS`, socket(7) and Documentation/networking/timestamping.rst of Linux; TCP
        has it from Linux 4.15 on: the stamp is that of the last segment read.

    Ignores:
        That what a reader finds in one read came in several segments, all but the last earlier.
    """
    received, notes, _, _ = sock.recvmsg(size, NOTE_BYTES, flags)
    read_s, wall_s = monotonic(), time()
    for _, _, note in notes:  # one, for nothing else was asked for
        seconds, nanoseconds = TIMESPEC.unpack(note)
        waited_s = wall_s - seconds - nanoseconds * 1e-9
        if 0.0 <= waited_s < OLDEST_S:
            return received, Arrival(read_s - waited_s, True)  # noqa: FBT003  (by name is slower)
    return received, Arrival(read_s, by_kernel=False)
