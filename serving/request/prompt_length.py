"""How many tokens a prompt has, before anybody has tokenized it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS_PER_BYTE = 0.25
"""Of English text and common tokenizers, roughly; the front door learns its own from answers."""

WRITTEN = ("content", "text", "tool_calls", "function", "arguments")
"""What a chat template writes of a message, its parts and its calls, beside words of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSize:
    """
    How many tokens a text has.

    Attributes:
        overhead_tokens: whatever its length: a chat template's, a beginning of sequence.
        tokens_per_byte: in UTF-8, beside them.
    """

    overhead_tokens: float = 0.0
    tokens_per_byte: float = TOKENS_PER_BYTE


UNTAUGHT = TextSize()


def prompts_in(kind: str, body: Mapping[str, Any]) -> list[Any]:
    """
    Return the prompts of a request, for `prompt_tokens`, `text_bytes` and `most_tokens`.

    Args:
        kind: `chat`, whose only prompt is all that its template gets, or `completions`.
        body: the request.
    """
    if kind != "chat":
        return prompts_of(body.get("prompt"))
    lists = (body[name] for name in ("tools", "documents") if body.get(name))
    return [[body.get("messages"), *(json.dumps(each, ensure_ascii=False) for each in lists)]]


def prompts_of(prompt: object) -> list[Any]:
    """Return the prompts of a completion: those of a list, or the only one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int | float):
        return [prompt]
    return prompt


def prompt_tokens(prompt: object, size: TextSize = UNTAUGHT) -> float:
    """
    Tokens of one prompt: exact for token ids, a guess from the bytes of text.

    *prompt* is what stands in a request: a string, ids, or the messages of a chat. Whatever else
    it is counts as no text: the engine will refuse it.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return float(len(prompt))
    return max(1.0, size.overhead_tokens + size.tokens_per_byte * text_bytes(prompt))


def text_bytes(prompt: object) -> int:
    """Bytes of text in a prompt; roles and whatever a chat template adds are not counted."""
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return sum(text_bytes(part) for part in prompt)
    if isinstance(prompt, dict):
        return sum(text_bytes(prompt.get(name)) for name in WRITTEN)
    return 0


def most_tokens(prompt: object) -> int:
    """
    Return how many tokens a prompt has at most: a token of text has a byte at least.

    *prompt* is any JSON, as in `prompt_tokens`; a number is a token, whatever else it may be.
    """
    if isinstance(prompt, list):
        return sum(most_tokens(part) for part in prompt)
    if isinstance(prompt, str | dict):
        return text_bytes(prompt)
    return 0 if prompt is None else 1
