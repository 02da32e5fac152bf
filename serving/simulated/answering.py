"""A simulated engine as a server uses it: requests in, answers out as vLLM writes them."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.lora_slots import NO_ADAPTER
from serving.protocol.messages import ENGINE_DIED, EngineFailed, Prefilled, Refusal
from serving.request.cost import answer_tokens, engine_request_id, prompt_size, prompts_in, texts_in
from serving.simulated.engine import EngineDied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from serving.simulated.engine import Sequence, SimulatedEngine
    from serving.simulated.kv_transfer import KvSink, KvSource


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
    "response_format": "nothing: a simulated engine writes words",
    "structured_outputs": "nothing: a simulated engine writes words",
}
"""Parameters that change an answer in ways that are not simulated; others are ignored."""

CHANGES_NOTHING = {"n": 1, "response_format": {"type": "text"}}
"""Values of these with which an answer is as without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """
    One answer to a request.

    Attributes:
        model: name in the request.
        adapter: LoRA adapter of that name.
        blocks: ids of the contents of its whole KV blocks; equal beginnings have equal ids.
        seed: number that the prompt determines; the answer, ids below *vocab_size*, follows.
        max_tokens: tokens of the answer.
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
        model: default name in requests.
        block_size: tokens of a KV block.
        unasked_tokens: length of an answer that names none: the mean of the planned load.
        tokenizer: tokenizer of the model; `None`: tokens are counted from bytes.
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
        requested = answer_tokens(kind, body)
        wanted = self.unasked_tokens if requested is None else requested
        room = self.max_model_len - len(tokens)
        if room < (requested or 1):
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens; the request"
                f" has {len(tokens)} in the prompt and asks for {requested or 1} more."
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
            finish_reason="stop" if requested is None and wanted <= room else "length",
            stream=body.get("stream") is True,
            include_usage=bool(options.get("include_usage")),
            usage_each=bool(options.get("continuous_usage_stats")),
            token_ids=body.get("return_token_ids") is True,
            kv_transfer_params={},
        )

    def _tokens(self, prompt: object) -> list[int]:
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
    ids, before = [], int.from_bytes(hashlib.sha256(repr(apart).encode()).digest()[:8])
    for start in range(0, len(tokens) - block_size + 1, block_size):
        before = hash((before, *tokens[start : start + block_size]))
        ids.append(before)
    return tuple(ids)


def prompt_seed(tokens: list[int]) -> int:
    """Return a number that a prompt determines, in every process alike."""
    return zlib.crc32(b"".join(token.to_bytes(8, "little", signed=True) for token in tokens))


def answer_ids(seed: int, count: int, vocab_size: int, first: int = 0) -> list[int]:
    """Return *count* token ids of the answer to a prompt, from its number *first* on."""
    return [
        zlib.crc32(number.to_bytes(8, "little"), seed) % vocab_size
        for number in range(first, first + count)
    ]


TEXT = """
the a one this each some and or but so then when while where under over beside between behind before
after across along around through toward again always never often soon today together alone slowly
day night morning evening winter spring summer autumn sun moon star sky cloud rain snow wind storm
river sea lake island coast harbour hill valley forest tree leaf flower garden field road bridge
gate door window roof house room table lamp clock city street market library station train boat sail
bird horse dog cat fox owl bread salt water tea apple honey king child friend teacher sailor painter
book letter story song page map question answer gold silver glass stone fire light shadow music red
blue green white dark warm cold quiet loud small long high deep old new early far walks waits sleeps
sings reads writes builds opens turns finds keeps brings follows remembers hears knows falls shines
home, there, once, later, perhaps, outside, yesterday, rain. light. morning. again. tomorrow. home.
"""
"""The words of answers."""

WORDS = TEXT.split()


def token_text(token: int) -> str:
    """Return the text of a token: a word, which some other ids have, too."""
    return f" {WORDS[token % len(WORDS)]}"


def _refusal(param: str, message: str, code: str = "unsupported_value") -> Refusal:
    return Refusal(status=400, message=message, param=param, code=code)


NAMES = {"chat": ("chatcmpl-", "chat.completion"), "completions": ("cmpl-", "text_completion")}
"""Prefix of an answer's id, and its `object`."""

encoded = json.JSONEncoder(separators=(",", ":")).encode
"""JSON without blanks; `json.dumps` would make such an encoder for every token."""

DONE = "data: [DONE]\n\n"

RANK = ContextVar("rank", default=0)
"""Rank of its group that a call is for: each call is a task of its own (`CallListener`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWriter:
    """
    Writes one answer.

    A token is one word, which the prompt and its place determine (`answer_ids`, `token_text`).
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
        events = [self._event(number + 1, token) for number, token in enumerate(ids, before)]
        if after == request.max_tokens:
            if request.include_usage:
                extra = {"choices": [], "usage": self._usage(after), "metrics": metrics_ms}
                events.append(_sse(self._chunk() | extra))
            events.append(DONE)
        return events

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
        request, text = self.request, "".join(map(token_text, ids))
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


class SimulatedAnswers:
    """
    Answers of one engine: `serving.replicas.roles.AnswerEngine`.

    Attributes:
        lose_next: streams that break after their first token: a fault.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        rules: AnswerRules,
        settings: dict[str, Any],
        *,
        source: KvSource | None = None,
        lease_s: float = 0.0,
    ) -> None:
        """
        Take the engine of one replica; *settings* are those that a plan decides, for `facts`.

        The *source* of a prefill engine keeps KV caches for *lease_s* engine seconds.
        """
        self._engine = engine
        self._rules = rules
        self._settings = settings
        self._source = source
        self._sink: KvSink | None = None
        self._lease_s = lease_s
        self._seen: dict[str, Sequence] = {}
        self.lose_next = 0

    def pull_by(self, sink: KvSink) -> None:
        """Take requests whose KV cache is elsewhere: this is a decode engine."""
        self._sink = sink

    def read(self, kind: str, body: dict[str, Any]) -> SimulatedRequest | Refusal:
        """See `AnswerEngine`."""
        request = self._rules.read(kind, body)
        return request if isinstance(request, Refusal) else replace(request, rank=RANK.get())

    async def prompt_tokens(self, request: SimulatedRequest) -> int | None:
        """See `AnswerEngine`."""
        return request.prompt_tokens

    def for_decode(self, request: SimulatedRequest, prefilled: Prefilled) -> SimulatedRequest:
        """See `AnswerEngine`."""
        return replace(request, kv_transfer_params=prefilled.kv_transfer_params)

    async def answer(
        self, request: SimulatedRequest
    ) -> AsyncGenerator[Refusal | list[str] | dict[str, Any], None]:
        """See `AnswerEngine`."""
        try:
            sequence = self._add(request)
        except EngineDied:
            yield ENGINE_DIED
            return
        lost, self.lose_next = self.lose_next > 0, max(0, self.lose_next - 1)
        self._seen[request.request_id] = sequence
        writer, seen = AnswerWriter.of(request), 0
        try:
            while seen < request.max_tokens:
                before, seen = seen, await sequence.more_than(seen)
                if request.stream:
                    ends = seen >= request.max_tokens
                    yield writer.events(before, seen, self._metrics_ms(sequence) if ends else {})
                if lost:
                    raise EngineDied("a stream was lost, as was asked for")  # noqa: TRY301
            if not request.stream:
                yield writer.whole(self._metrics_ms(sequence))
        except EngineDied:
            yield ENGINE_DIED
        finally:
            del self._seen[request.request_id]
            self._engine.abort(sequence)

    def first_token_seen(self, request: SimulatedRequest) -> bool:
        """See `AnswerEngine`."""
        sequence = self._seen.get(request.request_id)
        return sequence is not None and sequence.num_tokens > 0

    def pull_failed(self, request: SimulatedRequest) -> bool:
        """See `AnswerEngine`."""
        sequence = self._seen.get(request.request_id)
        return sequence is not None and sequence.kv_lost

    async def compute(self, request: SimulatedRequest, *, keep: bool) -> Prefilled | Refusal:
        """See `AnswerEngine`."""
        try:
            sequence = self._engine.add(
                *(request.prompt_tokens, request.blocks, 1),
                adapter=request.adapter,
                rank=request.rank,
            )
        except EngineDied as error:
            raise EngineFailed(repr(error)) from error
        try:
            await sequence.more_than(0)
        except EngineDied as error:
            raise EngineFailed(repr(error)) from error
        except BaseException:
            self._engine.abort(sequence)
            raise
        metrics_ms, place = self._metrics_ms(sequence), dict[str, object]()
        if keep and self._source is not None:
            key = self._source.keep(sequence, self._lease_s)
            place = {"key": key}
        else:
            self._engine.release(sequence)
        return Prefilled(
            prompt_tokens=request.prompt_tokens,
            kv_transfer_params=place,
            queue_s=metrics_ms["queue_time_ms"] / 1e3,
            step_s=metrics_ms["time_to_first_token_ms"] / 1e3,
        )

    def died(self) -> bool:
        """See `AnswerEngine`."""
        return self._engine.died

    async def kv_is_free(self) -> bool:
        """See `AnswerEngine`."""
        return self._engine.num_requests == 0

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> list[list[float]]:
        """See `AnswerEngine`: nothing where its steps are the plan's own."""
        clock = self._engine.clock
        began_unix_s = time.time() - clock.now_s() * clock.slowdown
        rows = [
            step._replace(end_unix_s=began_unix_s + step.end_unix_s * clock.slowdown)
            for step in self._engine.steps or ()
        ]
        return [[*row] for row in rows if begin_unix_s <= row.end_unix_s <= end_unix_s]

    def facts(self) -> dict[str, Any]:
        """See `AnswerEngine`."""
        return self._settings

    def _add(self, request: SimulatedRequest) -> Sequence:
        place, adapter, rank = request.kv_transfer_params, request.adapter, request.rank
        lengths = request.prompt_tokens, request.blocks, request.max_tokens
        if place and self._sink is not None:
            return self._sink.add(*lengths, place, adapter=adapter, rank=rank)
        return self._engine.add(*lengths, adapter=adapter, rank=rank)

    def _metrics_ms(self, sequence: Sequence) -> dict[str, float]:
        """Return the engine's own times of a request, by vLLM's names, as the clock has them."""
        scheduled_s = min(sequence.scheduled_s, sequence.first_token_s or sequence.scheduled_s)
        to_ms = self._engine.clock.slowdown * 1e3
        return {
            "queue_time_ms": (scheduled_s - sequence.arrived_s) * to_ms,
            "time_to_first_token_ms": ((sequence.first_token_s or scheduled_s) - scheduled_s)
            * to_ms,
        }
