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


ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(
    st.lists(st.tuples(LINES, ENDS)), st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.integers(0, 200)),
)  # fmt: skip
def test_cuts_do_not_matter(lines: list[tuple[bytes, bytes]], mark: bytes, cuts: list[int]) -> None:
    stream = mark + b"".join(line + end for line, end in lines)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]

    assert parse([stream]) == parse(pieces)


def test_data_lines_of_one_event_are_joined() -> None:
    """An event that was not closed is not delivered."""
    assert parse([b"data: a\r\ndata: b\r\n\r\ndata: c\n"]) == [b"a\nb"]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        # The examples of WHATWG HTML, 9.2.6.
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
        (b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third\n\n",
         [b"first event", b"second event", b" third"]),
        (b"data\n\ndata\ndata\n\ndata:\n", [b"", b"\n"]),
        (b"data:test\n\ndata: test\n\n", [b"test", b"test"]),
        # A byte order mark is skipped once, at the beginning.
        (BOM + b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (BOM + BOM + b"data: a\n\ndata: b\n\n", [b"b"]),
        (b"data: a\n\n" + BOM + b"data: b\n\ndata: c\n\n", [b"a", b"c"]),
        (b"\xef\xbbdata: a\n\ndata: b\n\n", [b"b"]),
        (BOM, []),
        # All line ends, alone and mixed; a CRLF is one, and two CRs are two.
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\rdata: b\n\r\ndata: c\r\n\n", [b"a", b"b", b"c"]),
        (b"data: a\rdata: b\r\ndata: c\n\r", [b"a\nb\nc"]),
        (b"\r\n\n\rdata: a\n\r\n", [b"a"]),
        # Other fields, comments and unknown lines between; a retry with the data.
        (b"event: x\r\nretry: 3\r\nid: 7\r\ndata: a\r\n: c\r\n\r\n", [b"a"]),
        (b"dataset: a\ndata : b\n data: c\ndata: d\n\n", [b"d"]),
        (b"data: a\n", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_streams_are_read_as_the_standard_says(
    stream: bytes, events: list[bytes], size: int
) -> None:
    assert parse([stream[at : at + size] for at in range(0, len(stream), size)]) == events


def test_an_event_is_there_with_the_byte_that_ends_it() -> None:
    """It does not wait for the LF of a CRLF, nor for what follows."""
    assert [len(parse([b"data: a" + end])) for end in (b"\r\r", b"\n\n", b"\r\n\r")] == [1, 1, 1]
    assert parse([b"data: a\r\n\r", b"\n", b"data: b\n\n"]) == [b"a", b"b"]


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
