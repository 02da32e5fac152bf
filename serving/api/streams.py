"""Streams of server-sent events: forwarded and counted, our own usage event removed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse

from serving.api.errors import refusal_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from serving.api.tracker import RequestTracker

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


class UsageReader:
    """
    Reads the token counts of an answer, and removes the usage event if the client wants none.

    Attributes:
        keep: whether the client gets the event.
        prompt_tokens, output_tokens: as the engine counts them; `None` until it reports them.
    """

    def __init__(self) -> None:
        self.keep = True
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
                if not self.keep:
                    continue
            kept.append(event)
        return "\n\n".join(kept)

    def read(self, usage: Any) -> None:  # noqa: ANN401
        """Take the counts of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")


class AnswerStream(StreamingResponse):
    """
    The events of an answer.

    If the engine fails midway it sends an error and ends without [DONE]. The tracker gets the
    outcome once, even if the stream never began: `ok`, `broken` or `cancelled`.
    """

    def __init__(
        self,
        first: list[str],
        items: AsyncIterator[Any],
        tracker: RequestTracker,
        request_id: str,
        headers: dict[str, str],
    ) -> None:
        """Take the *first* events and the *items* that follow; *request_id* is for the log."""
        events = self._events(first, items, tracker, request_id)
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._tracker = tracker
        self._outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._tracker.end(self._outcome)

    async def _events(
        self,
        first: list[str],
        items: AsyncIterator[Any],
        tracker: RequestTracker,
        request_id: str,
    ) -> AsyncIterator[str]:
        usage = tracker.usage
        yield usage.filter(first)
        try:
            async for events in items:
                if any(USAGE not in each and not each.startswith(DONE) for each in events):
                    tracker.token()
                if text := usage.filter(events):
                    yield text
            self._outcome = "ok"
        except Exception as error:  # noqa: BLE001  (sent to the client, and logged)
            self._outcome = "broken"
            yield f"data: {json.dumps(refusal_of(error, request_id).body)}\n\n"
