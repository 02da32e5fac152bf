"""Which way a request takes: through the prefill pool, or through its decode replica alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.request.retry import Local

if TYPE_CHECKING:
    from collections.abc import Mapping


def must_be_local(body: Mapping[str, Any]) -> Local | None:
    """
    Return why decode has to compute the prompt itself; `None`: prefill may.

    A KV cache can be fetched only once, so several answers cannot share one; and who wants
    log-probabilities of the prompt needs its logits, which stay with whoever computed them
    (vllm #50792: asking decode for them brings it down).

    Args:
        body: what `serving.request.validation.check` let through.
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
            return Local(path="local", reason=reason)
    return None


def short_enough(tokens: int, threshold_tokens: int) -> Local | None:
    """Return the local way for a prompt of *tokens* that prefill elsewhere would only delay."""
    return Local(path="local", reason="short") if tokens <= threshold_tokens else None


MAX_TOKEN_BYTES = 64
"""Of any tokenizer's usual tokens: a longer text than this times the threshold is not short."""


def may_be_short(body: Mapping[str, Any], threshold_tokens: int) -> bool:
    """Tell whether it is worth counting a prompt's tokens: no prompt of obvious length is."""
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
