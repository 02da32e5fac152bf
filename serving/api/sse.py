"""An answer on its way out, as server-sent events: what is counted and what is kept back."""

from __future__ import annotations

import json
from typing import Any

USAGE = '"choices":[]'
"""Stands in the one event that holds nothing but the usage; the engine writes JSON like this."""

DONE = "data: [DONE]"


def with_usage(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """
    Have the engine say at the end of a stream how many tokens it made.

    Returns:
        The body to pass on, and whether that event has to be kept from the client.
    """
    options = body.get("stream_options")
    if body.get("stream") is not True or not isinstance(options, dict | None):
        return body, False
    if (options or {}).get("include_usage"):
        return body, False
    return {**body, "stream_options": {**(options or {}), "include_usage": True}}, True


class Events:
    """
    Passes events on and reads the usage among them.

    Attributes:
        prompt_tokens, output_tokens: as the engine counts them; `None` before it says.
    """

    def __init__(self, *, keep_usage: bool) -> None:
        """*keep_usage*: whether the client gets the event that holds the usage."""
        self._keep = keep_usage
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def passed(self, events: list[str]) -> str:
        """Return what the client gets of *events*; may be nothing."""
        if not any(USAGE in event for event in events):
            return "".join(events)
        kept = []
        for event in "".join(events).split("\n\n"):
            if USAGE in event and event.startswith("data: {"):
                self._read(json.loads(event[6:]))
                if not self._keep:
                    continue
            kept.append(event)
        return "\n\n".join(kept)

    @staticmethod
    def token_in(events: list[str]) -> bool:
        """Tell whether some event brings part of the answer."""
        return any(USAGE not in event and not event.startswith(DONE) for event in events)

    def _read(self, chunk: dict[str, Any]) -> None:
        """Take the counts."""
        self.count(chunk.get("usage"))

    def count(self, usage: Any) -> None:  # noqa: ANN401
        """Take the counts out of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")
