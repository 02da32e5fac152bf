"""Arrival times of bytes by the kernel's timestamps, which a busy reader does not delay."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from time import monotonic, time
from typing import NamedTuple

SO_TIMESTAMPNS = 35
"""Socket option of Linux (asm-generic/socket.h: x86, arm64 and most others); not in Python."""

TIMESPEC = struct.Struct("@ll")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)

MAX_AGE_S = 1.0
"""
Oldest timestamp that is used. An older one means that the client stalled, which its health check
reports, or that the wall clock was set, which would make the timestamp wrong.
"""


class Arrival(NamedTuple):
    """
    The arrival of the last byte of a read.

    Attributes:
        at_s: on the monotonic clock.
        by_kernel: whether the kernel timestamped it; otherwise it is the time of the read.
    """

    at_s: float
    by_kernel: bool


def enable_timestamps(sock: socket.socket) -> None:
    """Make the kernel timestamp what *sock* receives, where it can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def receive(sock: socket.socket, size: int, flags: int = 0) -> tuple[bytes, Arrival]:
    """
    Read up to *size* bytes as `recv` does, with the arrival of the last of them.

    *sock* is a TCP socket, the standard library's or gevent's.

    Source: `SO_TIMESTAMPNS`, socket(7) and Documentation/networking/timestamping.rst of Linux; TCP
    has it from Linux 4.15 on, as the timestamp of the last segment read.

    Ignores: One read may span several segments, all but the last of which arrived earlier.
    """
    received, ancillary, _, _ = sock.recvmsg(size, ANCILLARY_BYTES, flags)
    read_s, wall_s = monotonic(), time()
    for _, _, data in ancillary:  # only the timestamp was enabled
        seconds, nanoseconds = TIMESPEC.unpack(data)
        waited_s = wall_s - seconds - nanoseconds * 1e-9
        if 0.0 <= waited_s < MAX_AGE_S:
            return received, Arrival(read_s - waited_s, True)  # noqa: FBT003  (by name is slower)
    return received, Arrival(read_s, by_kernel=False)
