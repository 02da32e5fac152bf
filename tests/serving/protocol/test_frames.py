"""Frames of a channel: what is sent arrives, however it is cut; anything else is named."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.messages import (
    HEADER,
    NONCE_BYTES,
    FrameError,
    FrameReader,
    Kind,
    frame,
    hello,
    nonce_in,
    proof,
    proof_in,
)

FRAMES = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=300))
)


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1))
def test_frames_arrive_however_they_are_cut(
    frames: list[tuple[Kind, int, bytes]], cuts: list[int]
) -> None:
    sent = b"".join(frame(*each) for each in frames)
    reader, arrived, begin, turn = FrameReader(300), [], 0, 0
    while begin < len(sent):
        size = cuts[turn % len(cuts)]
        arrived += reader.feed(sent[begin : begin + size])
        begin, turn = begin + size, turn + 1
    assert arrived == frames


@given(st.binary(min_size=HEADER.size, max_size=200))
def test_what_is_no_frame_is_named_or_waits(data: bytes) -> None:
    """Nothing else can happen, whatever arrives: no other error, no payload beyond the limit."""
    frames = []
    with suppress(FrameError):
        frames = FrameReader(64).feed(data)
    assert all(len(payload) <= 64 for _, _, payload in frames)


@pytest.mark.parametrize(
    ("header", "named"),
    [((65, 1, Kind.EVENTS), "65 bytes"), ((1, 1, 0), "kind 0"), ((1, 1, 99), "kind 99")],
)
def test_a_frame_too_long_or_of_no_kind(header: tuple[int, int, int], named: str) -> None:
    with pytest.raises(FrameError, match=named):
        FrameReader(64).feed(HEADER.pack(*header))


def test_a_greeting_is_read_and_another_version_is_named() -> None:
    nonce = bytes(range(NONCE_BYTES))
    greeting = hello(nonce)
    assert (nonce_in(greeting), proof_in(greeting)) == (nonce, b"")
    assert proof_in(greeting + b"proof") == b"proof"
    later = greeting.replace(b"\x00\x02", b"\x00\x03", 1)
    with pytest.raises(FrameError, match="version 3; expected 2"):
        nonce_in(later)
    for nothing in (b"", b"GET / HTTP/1.1\r\n", greeting[:-1]):
        with pytest.raises(FrameError, match="no greeting"):
            nonce_in(nothing)


def test_a_proof_is_of_one_secret_side_and_greeting() -> None:
    proofs = {
        proof(secret, side, nonce)
        for secret in (b"a", b"b")
        for side in (b"caller", b"listener")
        for nonce in (b"1", b"2")
    }
    assert len(proofs) == 8
