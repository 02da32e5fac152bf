"""What answers teach of the tokenizer and of the chat template: how many tokens a text has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.request.prompt_length import TOKENS_PER_BYTE, TextSize, prompts_in, text_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = 0.98
"""Of what is known, when something new is learned: the last fifty texts or so count."""

TRUSTED = 0.9
"""Of what is known, when it refuses somebody: no answer would ever correct it."""

SHORT_BYTES = 256
"""Texts below it teach the overhead, those above it the tokens of a byte, which they weigh by."""

MOST_OVERHEAD_TOKENS = 256
"""What a template adds; more is something that this door does not see, and not of every text."""

LEAST_TOKENS_PER_BYTE = 1 / 64
MOST_TOKENS_PER_BYTE = 1.0
"""A token of text has a byte at least."""


class LearnedSize:
    """
    A line through the texts that were answered, of tokens over bytes.

    Least squares, drawn to what holds of any text: no overhead, `TOKENS_PER_BYTE`. Short texts
    alone would say nothing of the bytes' share, long ones of one length nothing of the overhead.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._sums = [0.0] * 5

    def learn(self, size_bytes: int, tokens: int) -> None:
        """Take a text of *size_bytes* that has *tokens*."""
        weight = SHORT_BYTES / (SHORT_BYTES + size_bytes)
        off = weight * (tokens - TOKENS_PER_BYTE * size_bytes)
        new = (weight, weight * size_bytes, weight * size_bytes**2, off, off * size_bytes)
        self._sums = [KEPT * known + more for known, more in zip(self._sums, new, strict=True)]

    def doubt(self) -> None:
        """Know less, after a text was refused for its size, which is a guess."""
        self._sums = [TRUSTED * known for known in self._sums]

    @property
    def size(self) -> TextSize:
        """What is known now; within bounds, whatever the answers said."""
        count, sizes, squares, off, off_sizes = self._sums
        count, squares = count + 1, squares + SHORT_BYTES**2
        overhead = (off * squares - sizes * off_sizes) / (count * squares - sizes**2)
        overhead = min(max(0.0, overhead), MOST_OVERHEAD_TOKENS)
        slope = TOKENS_PER_BYTE + (off_sizes - overhead * sizes) / squares
        return TextSize(
            overhead_tokens=overhead,
            tokens_per_byte=min(max(LEAST_TOKENS_PER_BYTE, slope), MOST_TOKENS_PER_BYTE),
        )


def teaching_bytes(kind: str, body: Mapping[str, Any]) -> int:
    """
    Return the bytes of a request's text that its count of prompt tokens is of; 0: of no one text.

    Args:
        kind: `chat` or `completions`.
        body: the request. Several prompts share a count; of one that the engine truncates only
            the rest is counted.
    """
    prompts = prompts_in(kind, body)
    if len(prompts) > 1 or body.get("truncate_prompt_tokens") is not None:
        return 0
    return text_bytes(prompts[0])
