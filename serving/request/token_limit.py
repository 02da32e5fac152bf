"""How long an answer may get, if the operator says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from serving.protocol.refusal import Refusal
from serving.request.answer_length import LENGTHS, answer_tokens
from serving.request.prompt_length import most_tokens, prompts_in
from serving.request.validation import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_OUTPUT_TOKENS = "MINICLUSTER_MAX_OUTPUT_TOKENS"
"""Environment variable: most tokens of one answer; default: what the model has room for."""

TEMPLATE_TOKENS = 64
"""Room for what a chat template adds to a prompt."""


def read_token_limit(environment: Mapping[str, str]) -> int | None:
    """Return the limit; raises InputError for anything but a number of tokens."""
    given = environment.get(MAX_OUTPUT_TOKENS)
    if given is None:
        return None
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise InputError(MAX_OUTPUT_TOKENS, given, "a number of tokens, at least 1")
    return int(given)


def within(
    kind: str, body: dict[str, Any], limit: int | None, max_model_len: int
) -> dict[str, Any]:
    """
    Return a request of *kind* (`chat` or `completions`) that keeps the limit.

    One that names no length gets the engine's default, but no more than the limit. Where that is
    all the context has room for, it gets the limit, or what certainly fits beside its prompt: a
    token has at least a byte. Where that is nothing, the engine's own bound remains.

    Raises:
        Refused: it asks for more.
    """
    if limit is None:
        return body
    for name in (*LENGTHS[kind], "min_tokens"):
        if (body.get(name) or 0) > limit:
            message = f"{name}: expected at most {limit}, the limit of this endpoint."
            raise RequestRefused(Refusal(status=400, message=message, param=name))
    tokens = answer_tokens(kind, body)
    if tokens is not None:
        return body if tokens <= limit else {**body, "max_tokens": limit}
    room = max_model_len - max(map(most_tokens, prompts_in(kind, body))) - TEMPLATE_TOKENS
    return {**body, "max_tokens": min(limit, room)} if room >= 1 else body
