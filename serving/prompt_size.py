"""How many tokens a prompt has, before anybody has tokenized it."""

from __future__ import annotations

from typing import Any

TOKENS_PER_BYTE = 0.25
"""Of English text and common tokenizers, roughly; the front door learns its own from answers."""


def prompts_of(prompt: object) -> list[Any]:
    """Return the prompts of a completion: those of a list, or the only one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int | float):
        return [prompt]
    return prompt


def prompt_tokens(prompt: object, tokens_per_byte: float = TOKENS_PER_BYTE) -> float:
    """
    Tokens of one prompt: exact for token ids, a guess from the bytes of text.

    *prompt* is what stands in a request: a string, ids, or the messages of a chat. Whatever else
    it is counts as one token: the engine will refuse it.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return float(len(prompt))
    return max(1.0, text_bytes(prompt) * tokens_per_byte)


def text_bytes(prompt: object) -> int:
    """Bytes of text in a prompt; roles and whatever a chat template adds are not counted."""
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return sum(text_bytes(part) for part in prompt)
    if isinstance(prompt, dict):
        return text_bytes(prompt.get("content")) + text_bytes(prompt.get("text"))
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
