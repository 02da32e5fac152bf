"""
The frames of a channel: many calls on one connection of two processes of the application.

A frame is a header (length of the payload, number of the call, kind) and the payload. One side
listens; both prove that they know its secret, which it gives away only through a call of Ray,
before any other frame counts.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum

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
