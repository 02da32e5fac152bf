"""Server-sent events on their way to the client: token counts are read, our own usage removed."""

from __future__ import annotations

import json
from typing import Any

USAGE = '"choices":[]'
"""Occurs only in the event that holds the usage; the engine writes JSON without blanks."""

DONE = "data: [DONE]"


def with_usage(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """
    Ask the engine to report the token counts at the end of a stream.

    Returns:
        The body to pass on, and whether that event has to be removed from the client's stream.
    """
    options = body.get("stream_options")
    if body.get("stream") is not True or not isinstance(options, dict | None):
        return body, False
    if (options or {}).get("include_usage"):
        return body, False
    return {**body, "stream_options": {**(options or {}), "include_usage": True}}, True


class UsageReader:
    """
    Reads the token counts of an answer, and removes the usage event if the client wants none.

    Attributes:
        prompt_tokens, output_tokens: as the engine counts them; `None` until it reports them.
    """

    def __init__(self, *, keep_usage: bool) -> None:
        """*keep_usage*: whether the client gets the event that holds the usage."""
        self._keep = keep_usage
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def filter(self, events: list[str]) -> str:
        """Return the part of *events* for the client; may be empty."""
        if not any(USAGE in event for event in events):
            return "".join(events)
        kept = []
        for event in "".join(events).split("\n\n"):
            if USAGE in event and event.startswith("data: {"):
                self.read(json.loads(event[6:]).get("usage"))
                if not self._keep:
                    continue
            kept.append(event)
        return "\n\n".join(kept)

    @staticmethod
    def has_token(events: list[str]) -> bool:
        """Return whether some event holds part of the answer."""
        return any(USAGE not in event and not event.startswith(DONE) for event in events)

    def read(self, usage: Any) -> None:  # noqa: ANN401
        """Take the counts of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")
