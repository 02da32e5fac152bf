"""The answers of simulated engines, as vLLM writes them: events of a stream, or one object."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from serving.simulated.request import SimulatedRequest, answer_ids

NAMES = {"chat": ("chatcmpl-", "chat.completion"), "completions": ("cmpl-", "text_completion")}
"""Prefix of an answer's id, and its `object`."""

encoded = json.JSONEncoder(separators=(",", ":")).encode
"""JSON without blanks; `json.dumps` would make such an encoder for every token."""

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWriter:
    """
    Writes one answer.

    A token is a number in text, which the prompt and its place determine (`answer_ids`).
    """

    request: SimulatedRequest
    created: int

    @classmethod
    def of(cls, request: SimulatedRequest) -> AnswerWriter:
        """Begin an answer now."""
        return cls(request=request, created=int(time.time()))

    def events(self, before: int, after: int, metrics_ms: dict[str, float]) -> list[str]:
        """
        Return an event for each token from number *before* up to *after*.

        With the last token come the end, and the usage if it was asked for, with *metrics_ms*.
        """
        request = self.request
        ids = answer_ids(request.seed, after - before, request.vocab_size, before)
        found = [self._event(number + 1, each) for number, each in enumerate(ids, before)]
        if after == request.max_tokens:
            if request.include_usage:
                extra = {"choices": [], "usage": self._usage(after), "metrics": metrics_ms}
                found.append(_sse(self._chunk() | extra))
            found.append(DONE)
        return found

    def whole(self, metrics_ms: dict[str, float]) -> dict[str, Any]:
        """Return the answer in one piece."""
        request = self.request
        ids = answer_ids(request.seed, request.max_tokens, request.vocab_size)
        choice = self._choice("message", ids, first=True, last=True)
        usage = self._usage(request.max_tokens)
        chunk = self._chunk() | {"choices": [choice], "usage": usage, "metrics": metrics_ms}
        return chunk | {"object": NAMES[request.kind][1]}

    def _event(self, number: int, token: int) -> str:
        last = number == self.request.max_tokens
        choice = self._choice("delta", [token], first=number == 1, last=last)
        chunk = self._chunk() | {"choices": [choice]}
        if self.request.usage_each:
            chunk["usage"] = self._usage(number)
        return _sse(chunk)

    def _choice(self, field: str, ids: list[int], *, first: bool, last: bool) -> dict[str, Any]:
        """Return the only choice with some tokens; *field* is where a chat has them."""
        request, text = self.request, "".join(f" {each}" for each in ids)
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": request.finish_reason if last else None,
            "stop_reason": None,
        }
        if request.kind == "chat":
            role = {"role": "assistant"} if first else {}
            choice[field] = {**role, "content": text}
        else:
            choice["text"] = text
        if request.token_ids:
            choice["token_ids"] = ids
        return choice

    def _chunk(self) -> dict[str, Any]:
        prefix, kind = NAMES[self.request.kind]
        return {
            "id": prefix + self.request.request_id,
            "object": kind if self.request.kind == "completions" else f"{kind}.chunk",
            "created": self.created,
            "model": self.request.model,
        }

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt = self.request.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion_tokens,
            "completion_tokens": completion_tokens,
        }


def _sse(chunk: dict[str, Any]) -> str:
    return f"data: {encoded(chunk)}\n\n"
