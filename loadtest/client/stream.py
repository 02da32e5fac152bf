"""One streamed completion: the arrival of each chunk, and the tokens in it."""

from __future__ import annotations

import json
from typing import Any

from minicluster.http_client.sse import DONE

MAX_TOKENS = 1 << 31
"""Largest plausible length of a prompt or an answer: far more than any model's context."""


class StreamError(Exception):
    """
    A request without a complete, valid answer.

    Attributes:
        outcome: its kind, one of `minicluster.workload.samples.OUTCOMES`.
    """

    def __init__(self, outcome: str, detail: str) -> None:
        self.outcome = outcome
        super().__init__(detail)


class CompletionStream:
    """
    Chunks of one completion or chat as they arrive.

    Tokens are counted from `usage`: vLLM merges tokens into one chunk when its reader is slow,
    and a token may have no text. A chunk counts if its running total has grown. If the server
    sends no running total, a chunk counts if it has token ids, logprobs or text; the first two
    give the number of tokens.

    Attributes:
        chunk_s: arrival of each chunk with tokens.
        chunk_tokens: tokens in each of them; empty after `finish` if the server does not say.
        token_ids: token ids of the answer, if the server sends them.
        input_tokens: prompt length as the server counts it.
        output_tokens: generated tokens as the server counts them.
        metrics_s: times that the engine reports of the request (vLLM's `metrics`), by name.
        cached_tokens: prompt tokens from the server's prefix cache; `None`: not reported.
        by_kernel: whether the kernel timestamped all reads.
    """

    def __init__(self, asked_tokens: int = MAX_TOKENS) -> None:
        self._asked_tokens = asked_tokens
        self.chunk_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.token_ids: list[int] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.metrics_s: dict[str, float] = {}
        self.cached_tokens: int | None = None
        self.by_kernel = True
        self.done = False
        self._running: bool | None = None

    def take(self, data: bytes, now_s: float) -> None:
        """
        Process the data of one event that arrived at *now_s*.

        Raises:
            StreamError: the event is no chunk of a completion, or reports an error.
        """
        if data == DONE:
            self.done = True
            return
        try:
            chunk = _object(data)
            if error := chunk.get("error"):
                raise StreamError("server_error", str(error)[:200])
            self._count(chunk, now_s)
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
            raise StreamError("malformed", f"no completion chunk: {data[:200]!r}") from None

    def _count(self, chunk: dict[str, Any], now_s: float) -> None:
        choices, usage = chunk["choices"], chunk.get("usage")
        grown = 0
        if usage is not None:
            grown = self._take_usage(usage)
        if metrics := chunk.get("metrics"):
            self.metrics_s |= _seconds(metrics)
        if not choices:  # the closing chunk, which has only the final usage
            return
        ids = choices[0].get("token_ids") or []
        self.token_ids += map(int, ids)
        if self._running is None:
            self._running = usage is not None
        tokens = grown if self._running else len(ids) or _logprobs(choices[0])
        if tokens > self._asked_tokens:
            asked = f"{self._asked_tokens} were requested in all"
            raise StreamError("malformed", f"{tokens} tokens in one chunk; {asked}")
        if tokens or (not self._running and _text(choices[0])):
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(tokens)

    def _take_usage(self, usage: dict[str, Any]) -> int:
        """Keep the totals of *usage*; return the number of new output tokens."""
        total = _tokens(usage["completion_tokens"])
        grown = total - (self.output_tokens or 0)
        if grown < 0:
            raise StreamError("malformed", f"usage went back by {-grown} tokens")
        self.input_tokens, self.output_tokens = _tokens(usage["prompt_tokens"]), total
        if details := usage.get("prompt_tokens_details"):
            self.cached_tokens = _tokens(details.get("cached_tokens") or 0)
        return grown

    def finish(self) -> None:
        """
        Check that the stream is complete.

        Raises:
            StreamError: the stream was cut, or lacks its usage or its tokens.
        """
        if not self.done:
            raise StreamError("cut", f"stream ended after {len(self.chunk_s)} chunks, no [DONE]")
        if self.output_tokens is None:
            raise StreamError("no_usage", "no usage in the stream: tokens cannot be counted")
        if not self.chunk_s:
            raise StreamError("malformed", "no token in the stream")
        if 0 in self.chunk_tokens or sum(self.chunk_tokens) != self.output_tokens:
            self.chunk_tokens.clear()  # counts of a part of the stream do not give the rest


def _object(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise StreamError("malformed", f"not JSON: {data[:200]!r}") from None
    if not isinstance(chunk, dict):
        raise StreamError("malformed", f"not a JSON object: {data[:200]!r}")
    return chunk


def _tokens(value: Any) -> int:  # noqa: ANN401  (whatever the server sends)
    """Return a plausible number of tokens; any other raises ValueError."""
    tokens = int(value)
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError
    return tokens


def _text(choice: dict[str, Any]) -> str:
    """Return the text or tool calls of *choice*, of a completion or of a chat."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return text or delta.get("reasoning") or delta.get("tool_calls") or ""


def _logprobs(choice: dict[str, Any]) -> int:
    """Return the number of tokens with logprobs in *choice*, of a completion or of a chat."""
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("tokens") or logprobs.get("content") or ())


def _seconds(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the `*_ms` entries of *metrics*, in seconds."""
    return {
        name.removesuffix("_ms"): float(value) / 1e3
        for name, value in metrics.items()
        if name.endswith("_ms") and value is not None
    }
