"""One answer without any load around it, read to its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from loadtest.client.endpoint import ask
from loadtest.client.stream import CompletionStream, StreamError, check_encoding

if TYPE_CHECKING:
    import http.client

BLOCK_BYTES = 65536


def complete(
    url: str, expected: str, body: bytes, *, wait_s: float, insecure: bool
) -> CompletionStream:
    """
    Request one completion or chat, and read its stream; whether it is whole, `finish` says.

    Args:
        url, expected, body, insecure: as `loadtest.client.endpoint.ask`.
        wait_s: time limit of the whole answer.

    Raises:
        StatusError: the answer is an error status.
        StreamError: the answer is compressed, not in time, or has an event that is no chunk.
        OSError, http.client.HTTPException: the connection broke, or was never made.
        EventTooLongError: an event does not end.
    """
    until_s = time.monotonic() + wait_s
    with ask(url, expected, body, wait_s=wait_s, insecure=insecure) as answer:
        check_encoding(answer.headers.get("content-encoding", ""))
        return _follow(answer, until_s, wait_s)


def _follow(answer: http.client.HTTPResponse, until_s: float, wait_s: float) -> CompletionStream:
    """Read *answer* to its end, or until *until_s* on the monotonic clock has passed."""
    stream = CompletionStream()
    stream.content_type = answer.headers.get("content-type", "")
    while not stream.done and (received := answer.read1(BLOCK_BYTES)):
        if time.monotonic() > until_s:
            raise StreamError("timeout", f"no end after {wait_s:g} s")
        stream.receive(received, 0.0)
    return stream
