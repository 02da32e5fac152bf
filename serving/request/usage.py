"""The usage of a streamed answer: asked of the engine, and taken out of its events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

USAGE = '"choices":[]'
"""Occurs only in the event that holds the usage; the engine writes JSON without blanks."""

DONE = "data: [DONE]"


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    """
    Ask the engine to report the token counts at the end of a stream.

    Returns *body* itself if it is no stream, or its client asks for them already.
    """
    options = body.get("stream_options") or {}
    if body.get("stream") is not True or not isinstance(options, dict):
        return body
    if options.get("include_usage"):
        return body
    return {**body, "stream_options": {**options, "include_usage": True}}


@dataclass(slots=True)
class EventSplitter:
    """
    Splits the events of one answer into those with tokens and those that end it.

    Attributes:
        keeps_usage: whether the client gets the event with the usage.
        usage: the engine's token counts; `None` until it reports them.
        ending: events without a token so far, which the client gets at the end.
    """

    keeps_usage: bool
    usage: dict[str, Any] | None = None
    ending: str = ""

    def tokens(self, events: list[str]) -> str:
        """Return the events with tokens as one text, and keep the others."""
        text = "".join(events)
        if USAGE not in text and DONE not in text:
            return text
        with_tokens = []
        for event in text.split("\n\n"):
            if event.startswith(DONE):
                self.ending += f"{event}\n\n"
            elif USAGE in event and event.startswith("data: {"):
                self.usage = json.loads(event[6:]).get("usage")
                if self.keeps_usage:
                    self.ending += f"{event}\n\n"
            elif event:
                with_tokens.append(f"{event}\n\n")
        return "".join(with_tokens)
