"""How long an answer may get, as its request says it: what the engine reads, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LENGTHS = {"chat": ("max_completion_tokens", "max_tokens"), "completions": ("max_tokens",)}
"""By endpoint, the fields that name a length; the first that is given counts, as in vLLM."""

UNNAMED_TOKENS = 16
"""Of a completion without `max_tokens`: vLLM's default. A chat goes on while it has room."""


def named_tokens(kind: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return what a request of *kind* (`chat` or `completions`) names as its length, if it does."""
    return next((body[name] for name in LENGTHS[kind] if body.get(name) is not None), None)


def answer_tokens(kind: str, body: Mapping[str, Any]) -> int | None:
    """
    Return the most tokens of one answer; `None`: as many as the context has room for.

    Args:
        kind: `chat` or `completions`.
        body: what `serving.request.validation.check` let through.
    """
    if kind == "completions" and "max_tokens" not in body:
        return UNNAMED_TOKENS
    named: int | None = named_tokens(kind, body)
    return named
