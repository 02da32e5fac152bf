"""Which requests go through the prefill pool, and which their decode replica computes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.request.retry import LocalPrefill

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TOKEN_BYTES = 64
"""Longest usual token of any tokenizer: a text longer than this times the threshold exceeds it."""


def must_be_local(body: Mapping[str, Any]) -> LocalPrefill | None:
    """
    Return why decode has to compute the prompt itself; `None`: prefill may.

    A KV cache can be fetched only once, so several answers cannot share one; log-probabilities of
    the prompt need its logits, which stay where they were computed (vllm #50792: asking decode for
    them stops it).

    Args:
        body: a request that `serving.request.validation.check` accepted.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    reasons = {
        "beam-search": bool(body.get("use_beam_search")),
        "n": (body.get("n") or 1) > 1,
        "prompt-list": several,
        "prompt-logprobs": body.get("prompt_logprobs") is not None,
        "echo": bool(body.get("echo")),
    }
    for reason, holds in reasons.items():
        if holds:
            return LocalPrefill(path="local", reason=reason)
    return None


def short_enough(tokens: int, threshold_tokens: int) -> LocalPrefill | None:
    """Return the local path for a prompt of *tokens*, if it is within the plan's threshold."""
    return LocalPrefill(path="local", reason="short") if tokens <= threshold_tokens else None


def may_be_short(body: Mapping[str, Any], threshold_tokens: int) -> bool:
    """Return whether counting a prompt's tokens could find it within the threshold."""
    if threshold_tokens <= 0:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt) <= threshold_tokens
    if isinstance(prompt, str):
        return len(prompt) <= threshold_tokens * MAX_TOKEN_BYTES
    messages = body.get("messages")
    length = sum(len(str(each)) for each in messages) if isinstance(messages, list) else 0
    return length <= threshold_tokens * MAX_TOKEN_BYTES
