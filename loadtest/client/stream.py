"""One streamed completion: when each chunk came, and how many tokens it carried."""

from __future__ import annotations

import json
from typing import Any

from minicluster.http_client.sse import DONE

MOST_TOKENS = 1 << 31
"""Of a prompt or an answer: more than any context holds."""


class StreamError(Exception):
    """
    A request that did not end well.

    Attributes:
        outcome: its class, one of `minicluster.workload.samples.OUTCOMES`.
    """

    def __init__(self, outcome: str, detail: str) -> None:
        """Keep the class apart from what was seen."""
        self.outcome = outcome
        super().__init__(detail)


class CompletionStream:
    """
    Chunks of one completion or chat as they arrive.

    Tokens are counted from `usage`: vLLM merges tokens into one chunk when its reader is slow,
    and a token may carry no text. A chunk counts if the running total in it has grown. Where the
    server sends no running total, it counts if it carries token ids, logprobs or text, and the
    first two of these say how many tokens.

    Attributes:
        chunk_s: arrival of each chunk that carried tokens.
        chunk_tokens: tokens in each of them; empty after `finish` where the server does not tell.
        token_ids: of the answer, where the server sends them.
        input_tokens: prompt length as the server counts it.
        output_tokens: tokens generated as the server counts them.
        metrics_s: what the server says of its own phases, by name.
        cached_tokens: of the prompt, from the server's prefix cache; `None`: it does not say.
        by_kernel: whether it was the kernel that saw all of it arrive, not a reader that wakes.
    """

    def __init__(self, asked_tokens: int = MOST_TOKENS) -> None:
        """Start before the first chunk of an answer that is to have *asked_tokens*."""
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
        Take the data of one event that arrived at *now_s*.

        Raises:
            StreamError: it is not a chunk of a completion, or it reports an error.

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
            totals = _tokens(usage["completion_tokens"]), _tokens(usage["prompt_tokens"])
            grown = self._total(*totals)
            if details := usage.get("prompt_tokens_details"):
                self.cached_tokens = _tokens(details.get("cached_tokens") or 0)
        if metrics := chunk.get("metrics"):
            self.metrics_s |= _seconds(metrics)
        if not choices:  # the closing chunk: it repeats the total, or says it for the first time
            return
        ids = choices[0].get("token_ids") or []
        self.token_ids += map(int, ids)
        if self._running is None:
            self._running = usage is not None
        tokens = grown if self._running else len(ids) or _logprobs(choices[0])
        if tokens > self._asked_tokens:
            asked = f"{self._asked_tokens} were asked for in all"
            raise StreamError("malformed", f"{tokens} tokens in one chunk; {asked}")
        if tokens or (not self._running and _text(choices[0])):
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(tokens)

    def _total(self, output_tokens: int, input_tokens: int) -> int:
        """Take the new totals; return by how many tokens the answer has grown."""
        grown = output_tokens - (self.output_tokens or 0)
        if grown < 0:
            raise StreamError("malformed", f"usage went back by {-grown} tokens")
        self.input_tokens, self.output_tokens = input_tokens, output_tokens
        return grown

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
        if 0 in self.chunk_tokens or sum(self.chunk_tokens) != self.output_tokens:
            self.chunk_tokens.clear()  # counts for a part of the stream tell nothing of the rest


def _object(data: bytes) -> dict[str, Any]:
    """Parse *data* as a JSON object."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise StreamError("malformed", f"not JSON: {data[:200]!r}") from None
    if not isinstance(chunk, dict):
        raise StreamError("malformed", f"not a JSON object: {data[:200]!r}")
    return chunk


def _tokens(value: Any) -> int:  # noqa: ANN401  (whatever the server sends)
    """Read a number of tokens; one that cannot be is a ValueError."""
    tokens = int(value)
    if not 0 <= tokens <= MOST_TOKENS:
        raise ValueError
    return tokens


def _text(choice: dict[str, Any]) -> str:
    """Return what *choice* says, of a completion or of a chat."""
    delta = choice.get("delta") or {}
    said = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return said or delta.get("reasoning") or delta.get("tool_calls") or ""


def _logprobs(choice: dict[str, Any]) -> int:
    """Count the tokens whose logprobs *choice* carries, of a completion or of a chat; 0: none."""
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("tokens") or logprobs.get("content") or ())


def _seconds(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the times among *metrics*, which are named for their milliseconds, in seconds."""
    return {
        name.removesuffix("_ms"): float(value) / 1e3
        for name, value in metrics.items()
        if name.endswith("_ms") and value is not None
    }
