"""One streamed completion: when each chunk came, and how many tokens it carried."""

from __future__ import annotations

import json
from typing import Any


class StreamError(Exception):
    """
    A request that did not end well.

    Attributes:
        outcome: its class, one of `loadtest.samples.OUTCOMES`.
    """

    def __init__(self, outcome: str, detail: str) -> None:
        """Keep the class apart from what was seen."""
        self.outcome = outcome
        super().__init__(detail)


class CompletionStream:
    """
    Chunks of one completion as they arrive.

    Tokens are counted from `usage`: vLLM merges tokens into one chunk when its reader is slow,
    and a token may carry no text. A chunk counts if the running total in it has grown; where
    the server sends no running total, if it carries text.

    Attributes:
        chunk_s: arrival of each chunk that carried tokens.
        chunk_tokens: tokens in each of them; stays empty where the server sends no running total.
        input_tokens: prompt length as the server counts it.
        output_tokens: tokens generated as the server counts them.
    """

    def __init__(self) -> None:
        """Start before the first chunk."""
        self.chunk_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.done = False

    def take(self, data: bytes, now_s: float) -> None:
        """
        Take the data of one event that arrived at *now_s*.

        Raises:
            StreamError: it is not a chunk of a completion, or it reports an error.

        """
        if data == b"[DONE]":
            self.done = True
            return
        chunk = _object(data)
        if chunk.get("error"):
            raise StreamError("server_error", str(chunk["error"])[:200])
        try:
            self._count(chunk, now_s)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise StreamError("malformed", f"no completion chunk: {data[:200]!r}") from None

    def _count(self, chunk: dict[str, Any], now_s: float) -> None:
        usage = chunk.get("usage")
        if usage is None:
            if _text(chunk["choices"]):
                self.chunk_s.append(now_s)
            return
        total = int(usage["completion_tokens"])
        new = total - (self.output_tokens or 0)
        if new < 0:
            raise StreamError("malformed", f"usage went back by {-new} tokens")
        self.input_tokens, self.output_tokens = int(usage["prompt_tokens"]), total
        # The closing chunk repeats the total and has no choice; a server without running totals
        # says it there for the first time, long after the tokens came.
        if new and chunk["choices"]:
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(new)

    def finish(self) -> None:
        """
        Check that the stream came to its proper end.

        Raises:
            StreamError: it was cut, or it lacks its usage or its tokens.

        """
        if not self.done:
            raise StreamError("cut", f"stream ended after {len(self.chunk_s)} chunks, no [DONE]")
        if self.output_tokens is None:
            raise StreamError("no_usage", "no usage in the stream: tokens cannot be counted")
        if not self.chunk_s:
            raise StreamError("malformed", "no token in the stream")
        if len(self.chunk_tokens) != len(self.chunk_s):
            self.chunk_tokens.clear()  # totals for a part of the stream tell nothing of the rest


def _object(data: bytes) -> dict[str, Any]:
    """Parse *data* as a JSON object."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise StreamError("malformed", f"not JSON: {data[:200]!r}") from None
    if not isinstance(chunk, dict):
        raise StreamError("malformed", f"not a JSON object: {data[:200]!r}")
    return chunk


def _text(choices: list[dict[str, Any]]) -> str:
    """Return what the first choice says, of a completion or of a chat."""
    if not choices:
        return ""
    delta = choices[0].get("delta") or {}
    return choices[0].get("text") or delta.get("content") or delta.get("reasoning_content") or ""
