"""
The frames of a token channel: many answers on one connection of a replica and the endpoint.

A frame is a header (length of the payload, number of the answer, kind) and the payload. The
replica listens; both sides prove that they know the secret that the replica gave the endpoint
through a call of Ray, before any other frame counts.
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum

HEADER = struct.Struct("!IIB")
VERSION = 1
MAGIC = b"minicluster"
NONCE_BYTES = 16

PING_S = 10.0
"""Interval at which the endpoint asks for a sign of life."""

SILENT_S = 35.0
"""
Time without one after which either side gives a connection up: it may be open on one side only.
"""

MOST_BYTES = 4 << 20
"""Longest payload: the events of one step of one answer, or its end."""

MOST_CONTROL_BYTES = 256
"""Longest payload that the endpoint sends: it sends no events."""


class Kind(IntEnum):
    """
    What a frame is for.

    Attributes:
        HELLO: of the replica: version and nonce; of the endpoint: these and its proof.
        PROOF: of the replica, in answer.
        ATTACH: the endpoint wants the events of an answer.
        EVENTS: server-sent events with tokens, as the client gets them.
        END: of an answer: JSON with `usage`, the `text` that remains and, if it failed, `error`.
        HOLD, GO_ON: the answer's client reads too slowly; it has caught up.
        DETACH: the endpoint wants no more of an answer.
        PING, PONG: the other side is alive.
    """

    HELLO = 1
    PROOF = 2
    ATTACH = 3
    EVENTS = 4
    END = 5
    HOLD = 6
    GO_ON = 7
    DETACH = 8
    PING = 9
    PONG = 10


KINDS = frozenset(map(int, Kind))


class FrameError(Exception):
    """What came is no frame, or not the one that was expected; the connection is closed."""


def frame(kind: Kind, answer: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame as it is sent."""
    return HEADER.pack(len(payload), answer, kind) + payload


class FrameReader:
    """Cuts what a connection receives into frames."""

    __slots__ = ("_most_bytes", "_rest")

    def __init__(self, most_bytes: int) -> None:
        """Expect payloads of at most *most_bytes*."""
        self._most_bytes = most_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """
        Return kind, answer and payload of each frame that *data* completes.

        Raises:
            FrameError: of a payload that is too long, or a kind that does not exist.
        """
        if self._rest:
            data = self._rest + data
        begin, end = 0, len(data)
        frames = []
        while end - begin >= HEADER.size:
            length, answer, kind = HEADER.unpack_from(data, begin)
            if length > self._most_bytes or kind not in KINDS:
                raise FrameError(
                    f"a frame of kind {kind} and {length} bytes came; expected kinds 1 to"
                    f" {len(KINDS)} and at most {self._most_bytes} bytes"
                )
            stop = begin + HEADER.size + length
            if stop > end:
                break
            frames.append((kind, answer, data[begin + HEADER.size : stop]))
            begin = stop
        self._rest = data[begin:]
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
        raise FrameError("what came is no greeting of a token channel")
    if version != VERSION:
        raise FrameError(f"the other side speaks version {version}; expected {VERSION}")
    return nonce


def proof_in(payload: bytes) -> bytes:
    """Return the proof behind the nonce of a HELLO; empty if there is none."""
    return payload[len(MAGIC) + 2 + NONCE_BYTES :]


def proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    """Return what only a *side* (`endpoint` or `replica`) that knows the secret can send."""
    return hmac.digest(secret, b"|".join((side, *nonces)), "sha256")
