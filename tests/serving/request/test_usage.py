"""The usage of a stream: asked of the engine, and kept from clients that did not ask."""

from __future__ import annotations

from typing import Any

import pytest

from serving.replicas.roles import EventSplitter, with_usage

SPOKEN = 'data: {"choices":[{"text":" a [DONE] \\"choices\\":[]"}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ({"stream": True}, True),
        ({"stream": True, "stream_options": None}, True),
        ({"stream": True, "stream_options": {"include_usage": False, "x": 1}}, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, False),
        ({"stream": False}, False),
        ({}, False),
    ],
)
def test_usage_is_asked_of_streams_that_have_none(body: dict[str, Any], *, asks: bool) -> None:
    counted = with_usage(body)
    assert (counted is body) != asks
    if asks:
        others = body.get("stream_options") or {}
        assert counted["stream_options"] == {**others, "include_usage": True}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        [[SPOKEN], [SPOKEN], [USAGE], [DONE]],
        [[SPOKEN, SPOKEN, USAGE, DONE]],  # a simulated engine's last step
        [[SPOKEN], [SPOKEN + USAGE], [DONE]],
        [[SPOKEN], [SPOKEN], [USAGE + DONE]],
    ],
)
def test_tokens_go_on_and_the_end_waits(steps: list[list[str]], *, keeps: bool) -> None:
    """However an engine groups its events; text that looks like an end is a token's."""
    splitter = EventSplitter(keeps_usage=keeps)
    text = "".join(splitter.tokens(events) for events in steps)
    assert text == SPOKEN + SPOKEN
    assert splitter.usage == {"completion_tokens": 2}
    assert splitter.ending == (USAGE + DONE if keeps else DONE)
