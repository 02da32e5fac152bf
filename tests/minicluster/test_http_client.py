"""The bearer header, and server-sent events from bytes in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.http_client.authorization import bearer
from minicluster.http_client.sse import MAX_EVENT_BYTES, EventParser, EventTooLongError


def test_a_key_is_shown_as_it_is() -> None:
    assert bearer("a key: ~1", place="KEY") == {"authorization": "Bearer a key: ~1"}


@pytest.mark.parametrize("key", ["secret\nx: y", "secret\x00", "secretä"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    """A line break would begin another header; the message says how long the key is, no more."""
    with pytest.raises(InputError, match=f"KEY is '{len(key)} characters'") as refused:
        bearer(key, place="KEY")
    assert "secret" not in str(refused.value)


LINES = st.sampled_from(
    [b"data: {}", b"data:[DONE]", b"data", b": comment", b"event: x", b"", b"data:  two", b"\xff"]
)


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(LINES), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 200)))
def test_cuts_do_not_matter(lines: list[bytes], newline: bytes, cuts: list[int]) -> None:
    stream = b"".join(line + newline for line in lines)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]

    assert parse([stream]) == parse(pieces)


def test_data_lines_of_one_event_are_joined() -> None:
    """An event that was not closed is not delivered."""
    assert parse([b"data: a\r\ndata: b\r\n\r\ndata: c\n"]) == [b"a\nb"]


@pytest.mark.parametrize(
    "piece", [b"x" * 65536, (b"data: " + b"x" * 500 + b"\n") * 100], ids=["line", "event"]
)
def test_what_does_not_end_is_given_up(piece: bytes) -> None:
    """A line or an event longer than any is malformed, before it fills the memory."""
    parser = EventParser()
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        assert parser.feed(piece) == []
    with pytest.raises(EventTooLongError, match="16 MiB"):
        parser.feed(piece)
