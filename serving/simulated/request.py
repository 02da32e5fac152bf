"""A request as a simulated engine reads it: lengths, contents, and what to send back."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from minicluster.engine_model.lora_slots import NO_ADAPTER
from serving.protocol.messages import Refusal
from serving.request.length import answer_tokens, prompt_size, prompts_in, texts_in
from serving.request.validation import engine_request_id

BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token where the model has no tokenizer."""

TOKENIZER = "tokenizer.json"
"""File of a model's directory with its tokenizer."""

UNSUPPORTED = {
    "n": "1: a simulated engine gives one answer",
    "logprobs": "nothing: a simulated engine has no probabilities",
    "top_logprobs": "nothing: a simulated engine has no probabilities",
    "prompt_logprobs": "nothing: a simulated engine has no probabilities",
    "use_beam_search": "nothing: a simulated engine does not search",
    "echo": "nothing: a simulated engine keeps no prompt",
    "tools": "nothing: a simulated engine calls no tools",
    "response_format": "nothing: a simulated engine writes numbers",
    "structured_outputs": "nothing: a simulated engine writes numbers",
}
"""Parameters that change an answer in ways that are not simulated; others are ignored."""

CHANGES_NOTHING = {"n": 1, "response_format": {"type": "text"}}
"""Values of these with which an answer is as without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """
    One answer that is asked for.

    Attributes:
        model: name that the request gives.
        adapter: LoRA adapter of that name.
        prompt_tokens: length of the prompt.
        blocks: ids of the contents of its whole KV blocks; equal beginnings have equal ids.
        seed: a number that the prompt determines; the answer, ids below *vocab_size*, follows.
        max_tokens: tokens of the answer.
        finish_reason: why it ends there.
        usage_each: whether every chunk has the counts so far.
        kv_transfer_params: where a prefill engine keeps the KV cache; empty: it is computed here.
        rank: rank of the group that computes it.
    """

    kind: str
    request_id: str
    model: str
    adapter: int
    prompt_tokens: int
    blocks: tuple[int, ...]
    seed: int
    vocab_size: int
    max_tokens: int
    finish_reason: str
    stream: bool
    include_usage: bool
    usage_each: bool
    token_ids: bool
    kv_transfer_params: Mapping[str, Any]
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """
    What requests are read by.

    Attributes:
        model: its name, which a request may leave out.
        block_size: tokens of a KV block.
        unasked_tokens: length of an answer that names none: the mean of the planned load.
        tokenizer: of the model; `None`: tokens are counted from bytes.
        adapters: names of LoRA adapters, which requests give in place of the model's.
    """

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    unasked_tokens: int
    tokenizer: Any = None
    adapters: tuple[str, ...] = ()

    def read(self, kind: str, body: Mapping[str, Any]) -> SimulatedRequest | Refusal:
        """Return the request of a body that `serving.request.validation.check` accepted."""
        for name, expected in UNSUPPORTED.items():
            if body.get(name) not in (None, False, 0, [], CHANGES_NOTHING.get(name)):
                return _refusal(name, f"{name}: expected {expected}.")
        prompts = prompts_in(kind, body)
        if len(prompts) > 1:
            return _refusal("prompt", "prompt: expected one: a simulated engine gives one answer.")
        if not any(prompt_size(prompts[0])):
            return _refusal("prompt", "prompt: expected a text or token ids.")
        tokens = self._tokens(prompts[0])
        asked = answer_tokens(kind, body)
        wanted = self.unasked_tokens if asked is None else asked
        room = self.max_model_len - len(tokens)
        if room < (asked or 1):
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens; the request"
                f" has {len(tokens)} in the prompt and asks for {asked or 1} more."
            )
            return _refusal("prompt", message, code="context_length_exceeded")
        options, model = body.get("stream_options") or {}, body.get("model", self.model)
        adapter = self.adapters.index(model) if model in self.adapters else NO_ADAPTER
        return SimulatedRequest(
            kind=kind,
            request_id=engine_request_id(body),
            model=model,
            adapter=adapter,
            prompt_tokens=len(tokens),
            blocks=block_ids(tokens, self.block_size, (body.get("cache_salt") or "", adapter)),
            seed=prompt_seed(tokens),
            vocab_size=self.vocab_size,
            max_tokens=max(1, min(wanted, room)),
            finish_reason="stop" if asked is None and wanted <= room else "length",
            stream=body.get("stream") is True,
            include_usage=bool(options.get("include_usage")),
            usage_each=bool(options.get("continuous_usage_stats")),
            token_ids=body.get("return_token_ids") is True,
            kv_transfer_params={},
        )

    def _tokens(self, prompt: object) -> list[int]:
        """Return the ids of a prompt; of a text without a tokenizer, numbers of four bytes each."""
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt
        text = "\n".join(texts_in(prompt))
        if self.tokenizer is not None:
            ids: list[int] = self.tokenizer.encode(text).ids
            return ids
        raw = text.encode("utf-8", "surrogatepass")
        return [
            int.from_bytes(raw[start : start + BYTES_PER_TOKEN], "little")
            for start in range(0, len(raw), BYTES_PER_TOKEN)
        ]


@lru_cache(maxsize=1)
def read_tokenizer(source: str) -> Any:  # noqa: ANN401  (of a library without types)
    """Return the tokenizer of a model's directory; `None` where there is none."""
    file = Path(source) / TOKENIZER
    if not file.is_file():
        return None
    from tokenizers import Tokenizer  # noqa: PLC0415  (only where there is a tokenizer)

    return Tokenizer.from_file(str(file))


def block_ids(tokens: list[int], block_size: int, apart: tuple[str, int]) -> tuple[int, ...]:
    """
    Return an id for each whole block, which it and all blocks before it determine.

    What is *apart*, by its salt and its adapter, has other ids.
    """
    found, before = [], int.from_bytes(hashlib.sha256(repr(apart).encode()).digest()[:8])
    for start in range(0, len(tokens) - block_size + 1, block_size):
        before = hash((before, *tokens[start : start + block_size]))
        found.append(before)
    return tuple(found)


def prompt_seed(tokens: list[int]) -> int:
    """Return a number that a prompt determines, in every process alike."""
    return zlib.crc32(b"".join(token.to_bytes(8, "little", signed=True) for token in tokens))


def answer_ids(seed: int, count: int, vocab_size: int, first: int = 0) -> list[int]:
    """Return *count* token ids of the answer to a prompt, from its number *first* on."""
    return [
        zlib.crc32(number.to_bytes(8, "little"), seed) % vocab_size
        for number in range(first, first + count)
    ]


def _refusal(param: str, message: str, code: str = "unsupported_value") -> Refusal:
    return Refusal(status=400, message=message, param=param, code=code)
