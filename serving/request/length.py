"""
The length of a request in tokens: its prompts, estimated from their bytes, and its answers.

The endpoint has no tokenizer: it estimates a text from its bytes by a line that the token counts
of earlier answers fit, chat template included (docs/adr/0131).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from serving.protocol.messages import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TOKENS_PER_BYTE = 0.25
"""Tokens per byte of text until answers have been counted: about that of English text."""

LEAST_TOKENS_PER_BYTE = 1 / 64
MOST_TOKENS_PER_BYTE = 1.0
"""Bounds of the fitted slope; a token of text has at least one byte."""

MOST_OVERHEAD_TOKENS = 256
"""Upper bound of the fitted constant: a longer template is not one that every text has."""

SHORT_BYTES = 256
"""Weight of a text in the fit: 1 / (1 + bytes / SHORT_BYTES). Short texts fit the constant."""

KEPT = 0.98
"""Weight that earlier texts keep when a new one is added: about the last fifty count."""

KEPT_AFTER_REFUSAL = 0.9
"""
Weight that earlier texts keep when a text is refused for its estimated length: no answer would
ever correct that estimate.
"""

MEDIA_FIELDS = frozenset({"image_url", "audio_url", "video_url", "input_audio", "image_embeds"})
"""Fields of a message's parts whose text is an address or data: no template writes it out."""

TEMPLATE_ARGUMENTS = ("tools", "documents", "chat_template_kwargs")
"""Fields of a chat beside its messages that its template gets."""

LENGTH_FIELDS = {"chat": ("max_completion_tokens", "max_tokens"), "completions": ("max_tokens",)}
"""By endpoint, the fields that name the answer's length; the first that is set counts (vLLM)."""

DEFAULT_COMPLETION_TOKENS = 16
"""vLLM's default for a completion without `max_tokens`. A chat goes on while it has room."""

MAX_OUTPUT_TOKENS = "MINICLUSTER_MAX_OUTPUT_TOKENS"
"""Environment variable: most tokens of one answer; default: what the model has room for."""

BLOCK_TOKENS = 512
"""Tokens of the blocks by which a router compares prompts."""

TEMPLATE_TOKENS = 64
"""Room reserved for what a chat template adds to a prompt, when an answer's limit is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    """
    A line from the bytes of a text to its tokens.

    Attributes:
        overhead_tokens: the constant: chat template and beginning of sequence.
        tokens_per_byte: the slope, over bytes of UTF-8.
    """

    overhead_tokens: float = 0.0
    tokens_per_byte: float = TOKENS_PER_BYTE

    def tokens(self, ids: int, text_bytes: int) -> float:
        """Return the tokens of a prompt of this size (`prompt_size`): of ids as many, exactly."""
        if ids:
            return float(ids)
        return max(1.0, self.overhead_tokens + self.tokens_per_byte * text_bytes)


DEFAULT_ESTIMATE = TokenEstimate()


class TokenCounts:
    """
    The fit of the token counts that the engine reported over the bytes of the texts.

    Least squares with a prior of no overhead and `TOKENS_PER_BYTE`: short texts alone say nothing
    of the slope, long ones of one length nothing of the constant.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def add(self, size_bytes: int, tokens: int) -> None:
        """Add a text of *size_bytes* that has *tokens*."""
        weight = SHORT_BYTES / (SHORT_BYTES + size_bytes)
        off = weight * (tokens - TOKENS_PER_BYTE * size_bytes)
        new = (weight, weight * size_bytes, weight * size_bytes**2, off, off * size_bytes)
        self._sums = [KEPT * known + more for known, more in zip(self._sums, new, strict=True)]

    def discount(self) -> None:
        """Move towards the prior, after a text was refused for its estimated length."""
        self._sums = [KEPT_AFTER_REFUSAL * known for known in self._sums]

    @property
    def estimate(self) -> TokenEstimate:
        """The fit so far; within bounds, whatever was counted."""
        count, sizes, squares, off, off_sizes = self._sums
        count, squares = count + 1, squares + SHORT_BYTES**2
        overhead = (off * squares - sizes * off_sizes) / (count * squares - sizes**2)
        overhead = min(max(0.0, overhead), MOST_OVERHEAD_TOKENS)
        slope = TOKENS_PER_BYTE + (off_sizes - overhead * sizes) / squares
        return TokenEstimate(
            overhead_tokens=overhead,
            tokens_per_byte=min(max(LEAST_TOKENS_PER_BYTE, slope), MOST_TOKENS_PER_BYTE),
        )


def prompts_in(kind: str, body: Mapping[str, Any]) -> list[Any]:
    """
    Return the prompts of a request, for `prompt_tokens` and `prompt_size`.

    Args:
        kind: `chat`, whose only prompt is all that its template gets, or `completions`.
        body: the request.
    """
    if kind != "chat":
        return prompts_of(body.get("prompt"))
    found = (body[name] for name in TEMPLATE_ARGUMENTS if body.get(name))
    return [[body.get("messages"), *(json.dumps(each, ensure_ascii=False) for each in found)]]


def prompts_of(prompt: object) -> list[Any]:
    """Return the prompts of a completion: those of a list, or the only one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int | float):
        return [prompt]
    return prompt


def prompt_tokens(prompt: object, estimate: TokenEstimate = DEFAULT_ESTIMATE) -> float:
    """Return the tokens of one prompt: exact for token ids, an estimate from the bytes of text."""
    return estimate.tokens(*prompt_size(prompt))


def prompt_size(prompt: object) -> tuple[int, int]:
    """
    Return a prompt's token ids and its bytes of text, without what a template adds.

    *prompt* is a string, ids, or the messages of a chat, of which every string counts (`texts_in`);
    of other JSON, which the engine will refuse, each number counts as an id. The sum bounds the
    prompt's tokens: a token of text has at least one byte.
    """
    if isinstance(prompt, str | dict):
        return 0, sum(len(text.encode()) for text in texts_in(prompt))
    if not isinstance(prompt, list):
        return (0 if prompt is None else 1), 0
    if prompt and isinstance(prompt[0], int):
        return len(prompt), 0
    sizes = [prompt_size(part) for part in prompt]
    return sum(ids for ids, _ in sizes), sum(size_bytes for _, size_bytes in sizes)


def texts_in(value: object) -> Iterator[str]:
    """
    Yield every text of a message: role, name, reasoning, calls and whatever a template may write.

    A list of known fields would let clients hide prompts in others.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in MEDIA_FIELDS:
                yield from texts_in(inner)


def prompt_blocks(prompt: object, salt: object = None) -> tuple[int, ...]:
    """
    Return ids of a prompt's whole blocks, in order; equal ids mean equal prompts up to there.

    A block has `BLOCK_TOKENS` ids, or as many bytes of text as are estimated to have so many
    tokens (`DEFAULT_ESTIMATE`).

    Args:
        prompt: as in `prompt_size`.
        salt: separates prefix caches: the request's `cache_salt`.
    """
    whole: Sequence[object] = "\0".join(texts_in(prompt)).encode()
    size = round(BLOCK_TOKENS / TOKENS_PER_BYTE)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        whole, size = tuple(prompt), BLOCK_TOKENS
    blocks, last = [], _digest(str(salt).encode())
    for end in range(size, len(whole) + 1, size):
        block = whole[end - size : end]
        last = hash((last, _digest(block) if isinstance(block, bytes) else block))
        blocks.append(last)
    return tuple(blocks)


def _digest(text: bytes) -> int:
    """Return a number that *text* determines in every process: the hash of Python's differs."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def requested_tokens(kind: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return the answer's length that a request of *kind* names, if it names one."""
    return next((body[name] for name in LENGTH_FIELDS[kind] if body.get(name) is not None), None)


def answer_tokens(kind: str, body: Mapping[str, Any]) -> int | None:
    """
    Return the most tokens of one answer; `None`: as many as the context has room for.

    Args:
        kind: `chat` or `completions`.
        body: a request that `serving.request.validation.check` accepted.
    """
    if kind == "completions" and "max_tokens" not in body:
        return DEFAULT_COMPLETION_TOKENS
    requested: int | None = requested_tokens(kind, body)
    return requested


def read_token_limit(environment: Mapping[str, str]) -> int | None:
    """Return the operator's limit; raises InputError for anything but a number of tokens."""
    value = environment.get(MAX_OUTPUT_TOKENS)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise InputError(MAX_OUTPUT_TOKENS, value, "a number of tokens, at least 1")
    return int(value)


def apply_token_limit(
    kind: str, body: dict[str, Any], limit: int | None, max_model_len: int
) -> dict[str, Any]:
    """
    Return a request of *kind* (`chat` or `completions`) that keeps the operator's limit.

    A request that names no length gets the engine's default, at most the limit. Where that default
    is all the context has room for, it gets the limit, or what certainly fits beside its prompt (a
    token has at least a byte). Where nothing fits, the engine's own bound remains.

    Raises:
        RequestRefused: the request asks for more.
    """
    if limit is None:
        return body
    for name in (*LENGTH_FIELDS[kind], "min_tokens"):
        if (body.get(name) or 0) > limit:
            message = f"{name}: expected at most {limit}, the limit of this endpoint."
            refuse(400, message, param=name)
    tokens = answer_tokens(kind, body)
    if tokens is not None:
        return body if tokens <= limit else {**body, "max_tokens": limit}
    longest = max(sum(prompt_size(prompt)) for prompt in prompts_in(kind, body))
    room = max_model_len - longest - TEMPLATE_TOKENS
    return {**body, "max_tokens": min(limit, room)} if room >= 1 else body
