"""One streamed completion: the arrival of each chunk, and the tokens in it."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from minicluster.http_client.sse import DONE, EventParser

MAX_TOKENS = 1 << 31
"""Largest plausible length of a prompt or an answer: far more than any model's context."""

GENERATED = (
    *("content", "reasoning_content", "reasoning", "reasoning_details", "thinking"),
    *("tool_calls", "function_call", "refusal", "audio"),
)
"""Fields of a chat's delta that hold generated tokens, as OpenAI, vLLM, SGLang, DeepSeek, LiteLLM
and OpenRouter name them; `role` is none."""

HEAD_BYTES = 65536
"""Beginning of an answer that is kept until its first event, to name what is no stream."""

SHOWN_CHARACTERS = 200
MARKUP = re.compile(r"<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.IGNORECASE | re.DOTALL)


class StreamError(Exception):
    """A request without a complete, valid answer; `outcome` is one of `samples.OUTCOMES`."""

    def __init__(self, outcome: str, detail: str) -> None:
        self.outcome = outcome
        super().__init__(detail)


class _Chunk(NamedTuple):
    """Tokens of one chunk, as its fields state them; `listed` counts token ids or logprobs."""

    at_s: float
    total: int | None
    grown: int
    listed: int
    text: bool


class CompletionStream:
    """
    Chunks of one completion or chat as they arrive.

    Tokens are counted from running totals in `usage`: vLLM merges tokens into one chunk when its
    reader is slow, and a token may have no text. A chunk counts if the total has grown. Totals are
    believed where every chunk with text has one above 0, and at least half of these have grown: a
    server may send a total only in some chunks, always 0, always 1, or one token late. Otherwise
    a chunk counts if it has token ids, logprobs or text; the first two give the number of tokens.

    `input_tokens`, `output_tokens` and `cached_tokens` are as the server counts them; `None`: it
    does not say. `metrics_s` are times that the engine reports (vLLM's `metrics`).
    """

    def __init__(self, asked_tokens: int = MAX_TOKENS) -> None:
        self._asked_tokens = asked_tokens
        self._parser = EventParser()
        self._head, self._begun = bytearray(), False
        self._chunks: list[_Chunk] = []
        self.token_ids: list[int] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.metrics_s: dict[str, float] = {}
        self.cached_tokens: int | None = None
        self.by_kernel, self.content_type = True, ""
        self.done = False

    @property
    def chunk_s(self) -> list[float]:
        """Arrival of each chunk with tokens."""
        return [at_s for at_s, _ in self._counted()]

    @property
    def chunk_tokens(self) -> list[int]:
        """Tokens in each of them; empty if the server does not say."""
        tokens = [tokens for _, tokens in self._counted()]
        # Counts of a part of the stream do not give the rest.
        return [] if self.done and (0 in tokens or sum(tokens) != self.output_tokens) else tokens

    def receive(self, received: bytes, now_s: float) -> None:
        """
        Process the next bytes of the answer, which arrived at *now_s*.

        Raises:
            StreamError: as `take`.
            EventTooLongError: an event does not end.
        """
        if not self._begun:
            self._head += received[: HEAD_BYTES - len(self._head)]
        for data in self._parser.feed(received):
            self.take(data, now_s)

    def take(self, data: bytes, now_s: float) -> None:
        """
        Process the data of one event that arrived at *now_s*; one without data says nothing.

        Raises StreamError: the event is no chunk of a completion, or reports an error.
        """
        self._begun = True
        if data.startswith(DONE):
            self.done = True
        if self.done or not data:
            return
        try:
            chunk = _object(data)
            if "choices" not in chunk and (said := error_message(chunk)):
                raise StreamError("server_error", said)
            if chunk.get("error"):
                raise StreamError("server_error", error_message(chunk) or "an error")
            self._count(chunk, now_s)
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
            raise StreamError("malformed", f"no completion chunk: {_shown(data)}") from None

    def _count(self, chunk: dict[str, Any], now_s: float) -> None:
        usage = chunk.get("usage")
        choices = chunk.get("choices") if usage else chunk["choices"]
        total, grown = None, 0
        if usage:
            total, grown = self._take_usage(usage)
        if metrics := chunk.get("metrics"):
            self.metrics_s |= _seconds(metrics)
        if not choices:  # the closing chunk, which has only the final usage
            return
        choice = choices[0]
        ids = choice.get("token_ids") or []
        self.token_ids += map(int, ids)
        listed, text = len(ids) or _logprobs(choice), bool(_text(choice))
        self._chunks.append(_Chunk(now_s, total, grown, listed, text))

    def _take_usage(self, usage: dict[str, Any]) -> tuple[int | None, int]:
        """Keep the totals of *usage*; return that of the answer, if it says, and its growth."""
        prompt, total = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if prompt is not None:
            self.input_tokens = _tokens(prompt)
        if details := usage.get("prompt_tokens_details"):
            self.cached_tokens = _tokens(details.get("cached_tokens") or 0)
        if total is None:
            whole = usage.get("total_tokens")
            if whole is None or prompt is None or whole <= prompt:
                return None, 0
            total = whole - prompt
        total = _tokens(total)
        grown = total - (self.output_tokens or 0)
        if grown < 0:
            raise StreamError("malformed", f"usage went back by {-grown} tokens")
        self.output_tokens = total
        return total, grown

    def _counted(self) -> list[tuple[float, int]]:
        """Return arrival and tokens of each chunk with tokens; 0: not said."""
        chunks = self._chunks
        texts = [chunk for chunk in chunks if chunk.text]
        believed = (
            all(chunk.total for chunk in texts)
            if texts
            else all(chunk.total is not None for chunk in chunks)
        )
        if believed and 2 * sum(chunk.grown > 0 for chunk in texts) >= len(texts):
            return [(chunk.at_s, chunk.grown) for chunk in chunks if chunk.grown]
        return [(chunk.at_s, chunk.listed) for chunk in chunks if chunk.listed or chunk.text]

    def finish(self) -> None:
        """
        Check that the stream is complete.

        Raises StreamError: the stream was cut, or lacks its usage or its tokens, or there is none.
        """
        counted = self._counted()
        most = max((tokens for _, tokens in counted), default=0)
        if most > self._asked_tokens:
            requested = f"{self._asked_tokens} were requested in all"
            raise StreamError("malformed", f"{most} tokens in one chunk; {requested}")
        if not self.done:
            if not self._begun and (other := other_answer(self.content_type, bytes(self._head))):
                raise other
            raise StreamError("cut", f"stream ended after {len(counted)} chunks, no [DONE]")
        if self.output_tokens is None or (counted and not self.output_tokens):
            raise StreamError("no_usage", "no usage in the stream: tokens cannot be counted")
        if not counted:
            raise StreamError("malformed", "no token in the stream")


def check_encoding(encoding: str) -> None:
    """Refuse an answer that is compressed: StreamError."""
    if encoding.strip().lower() not in {"", "identity"}:
        fault = f"the server answered with content-encoding {encoding[:40]}"
        raise StreamError("malformed", f"{fault}, which was not asked for")


def other_answer(content_type: str, body: bytes) -> StreamError | None:
    """Name an answer with status 200 that is no stream of events; `None`: it may have been one."""
    kind = content_type.partition(";")[0].strip().lower()
    text = body.decode(errors="replace").lstrip("\ufeff \t\r\n")
    of_kind = f" ({kind})" if kind else ""
    if body.startswith(b"\x1f\x8b"):
        return StreamError("malformed", "the server answered gzip, which was not asked for")
    if text[:1] in {"{", "["}:
        try:
            message = error_message(json.loads(text))
        except (ValueError, RecursionError):
            message = None
        if message:
            return StreamError("server_error", f"an error object with status 200: {message}")
        what = f"one JSON document{of_kind}"
    elif kind in {"text/html", "application/xhtml+xml"} or MARKUP.match(text):
        what, text = f"HTML{of_kind}", TAG.sub(" ", text)
    elif kind and kind != "text/event-stream":
        what = kind
    else:
        return None
    shown = " ".join(text.split())[:SHOWN_CHARACTERS]
    message = f"the server answered {what} with status 200, not a stream of events"
    return StreamError("malformed", f"{message}: {shown}" if shown else message)


def error_message(document: object) -> str | None:
    """Return what an error object says (OpenAI's, vLLM's, FastAPI's); `None`: it is none."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if not error and (document.get("object") == "error" or "detail" in document):
        error = document
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    if not error:
        return None
    message = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
    return " ".join(message.split())[:SHOWN_CHARACTERS]


def _shown(data: bytes) -> str:
    text = data[:SHOWN_CHARACTERS].decode(errors="replace")
    return "".join(character if character.isprintable() else " " for character in text)


def _object(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise StreamError("malformed", f"not JSON: {_shown(data)}") from None
    if not isinstance(chunk, dict):
        raise StreamError("malformed", f"not a JSON object: {_shown(data)}")
    return chunk


def _tokens(value: Any) -> int:  # noqa: ANN401  (whatever the server sends)
    """Return a plausible number of tokens; any other raises ValueError."""
    tokens = int(value)
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError
    return tokens


def _text(choice: dict[str, Any]) -> object:
    delta = choice.get("delta") or {}
    return choice.get("text") or next(filter(None, map(delta.get, GENERATED)), None)


def _logprobs(choice: dict[str, Any]) -> int:
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("tokens") or logprobs.get("content") or ())


def _seconds(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name.removesuffix("_ms"): float(value) / 1e3
        for name, value in metrics.items()
        if name.endswith("_ms") and value is not None
    }
