from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventParser

LINES = st.sampled_from(
    [b"data: {}", b"data:[DONE]", b"data", b": comment", b"event: x", b"", b"data:  two", b"\xff"]
)


def parse(pieces: list[bytes]) -> list[bytes]:
    """Feed *pieces* one after the other."""
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(LINES), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 200)))
def test_cuts_do_not_matter(lines: list[bytes], newline: bytes, cuts: list[int]) -> None:
    """However the bytes are cut, the events are the same."""
    stream = b"".join(line + newline for line in lines)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]

    assert parse([stream]) == parse(pieces)


def test_data_lines_of_one_event_are_joined() -> None:
    """An event of several data lines is one event, with LF between them."""
    assert parse([b"data: a\r\ndata: b\r\n\r\n"]) == [b"a\nb"]


def test_unclosed_event_is_not_delivered() -> None:
    """What no blank line closes is no event."""
    assert parse([b"data: a\n\ndata: b\n"]) == [b"a"]
