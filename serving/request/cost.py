"""
The cost of a request: its tokens, its seconds on the replicas, and the forecast of its latencies.

The endpoint has no tokenizer: it estimates a text from its bytes by a line that the token counts
of earlier answers fit, chat template included (docs/adr/0131).
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan import step_time
from serving.protocol.messages import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from minicluster.plan import StepModel
    from minicluster.specs.step import StepSpec
    from serving.protocol.messages import EndpointConfig


def must_be_local(body: Mapping[str, Any]) -> str | None:
    """
    Return why decode has to compute the prompt itself; `None`: prefill may.

    A KV cache can be fetched only once, so several answers cannot share one; log-probabilities of
    the prompt need its logits, which stay where they were computed (vllm #50792: asking decode for
    them stops it).
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
    return next((reason for reason, holds in reasons.items() if holds), None)


def engine_request_id(body: Mapping[str, Any]) -> str:
    """
    Return the id of a request for one engine: the endpoint's, made unique.

    Clients may use an id twice, and each attempt of a request is one of its own for its engine.
    """
    return f"{body.get('request_id', 'req')}-{uuid.uuid4().hex[:16]}"


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
        self._sums = [KEPT * former + more for former, more in zip(self._sums, new, strict=True)]

    def discount(self) -> None:
        """Move towards the prior, after a text was refused for its estimated length."""
        self._sums = [KEPT_AFTER_REFUSAL * former for former in self._sums]

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
    values = (body[name] for name in TEMPLATE_ARGUMENTS if body.get(name))
    return [[body.get("messages"), *(json.dumps(value, ensure_ascii=False) for value in values)]]


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
    tokens (`DEFAULT_ESTIMATE`). A *salt*, the request's `cache_salt`, separates prefix caches.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """
    The cost of one request.

    Attributes:
        prompt_tokens: tokens of the longest prompt, as far as known.
        output_tokens: expected tokens of each answer, at least 1.
        sequences: answers to all of its prompts.
        other_tokens: tokens of each of the other prompts.
        local: whether the server that decodes also computes the prompt.
        text_bytes: bytes of the one text that the engine's count of prompt tokens is for; 0: none,
            because several prompts share one count, and a truncated one is counted in part only.
    """

    prompt_tokens: float
    output_tokens: float
    sequences: int = 1
    other_tokens: tuple[float, ...] = ()
    local: bool = False
    kind: str = "completions"
    text_bytes: int = 0

    @property
    def all_tokens(self) -> float:
        """Tokens of all prompts, and of all answers as long as they may be."""
        prompts = self.prompt_tokens + sum(self.other_tokens)
        return prompts + self.sequences * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """
    The size of one request, as its body has it.

    Attributes:
        prompts: token ids and bytes of text of each prompt, as `prompt_size` returns them.
        output_tokens: tokens of each answer, as requested; `None`: the request does not say.
        sequences: answers to all prompts.
        counted: whether the engine's count of prompt tokens is for one whole text.
        local: whether the answering server has to compute the prompt (`must_be_local`).
    """

    kind: str
    prompts: tuple[tuple[int, int], ...]
    output_tokens: int | None
    sequences: int
    counted: bool
    local: bool


def request_size(kind: str, body: Mapping[str, Any]) -> RequestSize:
    """Return the size of a request that `serving.request.validation.check` accepted."""
    prompts = prompts_in(kind, body)
    return RequestSize(
        kind=kind,
        prompts=tuple(map(prompt_size, prompts)),
        output_tokens=answer_tokens(kind, body),
        sequences=int(body.get("n") or 1) * len(prompts),
        counted=len(prompts) == 1 and body.get("truncate_prompt_tokens") is None,
        local=must_be_local(body) is not None,
    )


def request_cost(size: RequestSize, config: EndpointConfig, estimate: TokenEstimate) -> RequestCost:
    """Return the cost of a request; an answer of unknown length counts as the longest planned."""
    lengths = (
        min(estimate.tokens(*prompt), float(config.max_model_len)) for prompt in size.prompts
    )
    tokens, *others = sorted(lengths, reverse=True)
    room = max(1.0, config.max_model_len - tokens)
    planned = room if config.workload is None else config.workload.longest_answer_tokens
    requested = size.output_tokens
    return RequestCost(
        prompt_tokens=tokens,
        output_tokens=float(min(planned if requested is None else max(1, requested), room)),
        sequences=size.sequences,
        other_tokens=tuple(others),
        local=size.local or not config.split or tokens <= config.routing.local_threshold_tokens,
        kind=size.kind,
        text_bytes=size.prompts[0][1] if size.counted else 0,
    )


@dataclass(slots=True)
class PoolInFlight:
    """
    The load of the replicas of one role in one domain, at least one of them.

    Attributes:
        work_s: seconds that the prompts ahead still need, on one replica.
        waiting: requests whose prompts these are.
        sequences: admitted and not finished, in any phase.
        context_tokens: cached tokens of all of them, once they decode.
        per_token_s: seconds that prompts computed here add between two tokens of one replica, if
            each answer is followed by one like it.
        live: whether there is a replica at all.
    """

    replicas: int
    work_s: float = 0.0
    waiting: int = 0
    sequences: int = 0
    context_tokens: float = 0.0
    per_token_s: float = 0.0
    live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightLoad:
    """
    The load of the replicas that a request would use.

    Attributes:
        max_batch_size: sequences that one replica decodes at once.
        max_step_tokens: prompt tokens that one of these computes in a step.
        prefill_busy_fraction: share of the time in which a prefill replica computes.
        tokens_per_step: mean tokens per sequence and decode step; above 1 with drafts.
    """

    prefill: PoolInFlight
    decode: PoolInFlight
    max_batch_size: int
    max_step_tokens: int
    prefill_busy_fraction: float
    tokens_per_step: float

    @property
    def idle(self) -> bool:
        """No request is ahead; `decode` counts its sequences in every phase."""
        return self.decode.sequences == 0 and self.prefill.work_s <= 0

    def emptied(self) -> InflightLoad:
        """Return the same replicas without requests."""
        return replace(
            self,
            prefill=PoolInFlight(self.prefill.replicas),
            decode=PoolInFlight(self.decode.replicas),
            prefill_busy_fraction=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionForecast:
    """The latencies that a request would see, without margin."""

    ttft_s: float
    tpot_s: float


def work_s(model: StepModel, cost: RequestCost, load: InflightLoad) -> float:
    """
    Return the seconds that the prompts of a request take from a replica.

    In the prefill pool: the time until it is done, slowed by what else runs. Where decode computes
    the prompts: what they add to its steps, and the share of these steps that they fill
    (docs/model.md, eq. G1).

    Ignores: prompts that share a step of the prefill pool, whose fixed time is paid once.
    """
    if cost.local:
        prompts = (cost.prompt_tokens, *cost.other_tokens)
        filled = sum(prompts) / load.max_step_tokens * _step_s(model, cost, load)
        return filled + sum(_added_s(model.decode, load, tokens) for tokens in prompts)
    between = model.interference
    unloaded_s = _prompt_s(model.prefill, cost.prompt_tokens)
    batch = load.decode.sequences / load.decode.replicas
    slower = 1 + between.prefill_fraction + batch * between.prefill_per_sequence_fraction
    return unloaded_s * slower + between.prefill_per_request_s


def _prompt_s(step: StepSpec, tokens: float, batch: int = 0) -> float:
    return step.step_s(tokens, tokens * (tokens + 1) / 2, batch, 0)


def _added_s(step: StepSpec, load: InflightLoad, tokens: float) -> float:
    """Return the seconds that a prompt adds to the step of a full batch, which is made anyway."""
    return _prompt_s(step, tokens, load.max_batch_size) - step.step_s(0, 0, load.max_batch_size, 0)


def forecast(model: StepModel, cost: RequestCost, load: InflightLoad) -> AdmissionForecast:
    """
    Predict the latencies of a request that joins *load*.

    TTFT: path, the work ahead shared by the replicas, the request's own prompt, the KV pull, the
    wait for a place where more are admitted than the batches hold, one decode step. TPOT: a decode
    step with every admitted sequence in the batch, as far as it has places, slowed by prefill for
    the share of the time in which that is busy, and in it the prompts that decode computes
    (docs/model.md, eq. G2 to G4).

    It decides in microseconds, so it is an estimate, the only one beside the event simulation
    (`sizing simulate`): of TTFT nearly always too high. `tests/serving/admission` compares the
    decisions of both: at most 1 % of the requests are admitted that the simulation has late, and
    at least 90 % are decided alike (75 % in a mixed pool near its capacity).

    Ignores: which requests ahead finish meanwhile, so that it overestimates batches; prompts that
    share a step; how long sequences that join hold the batch up, which the margin learns.
    """
    prefill, decode = load.prefill, load.decode
    step_s = _step_s(model, cost, load)
    # A step computes no more prompt tokens than its budget, however many wait.
    most_s = _added_s(model.decode, load, load.max_step_tokens)
    step_tokens = load.tokens_per_step
    pace_s = step_s / step_tokens + min(decode.per_token_s / decode.replicas, most_s / step_tokens)
    if cost.local:
        own_s = _prompt_s(model.decode, cost.prompt_tokens)
        pull_s = 0.0
        ahead_s = decode.work_s / decode.replicas
    else:
        own_s = work_s(model, cost, load)
        pull_s = float(step_time.transfer_s(model.path, cost.prompt_tokens))
        ahead_s = prefill.work_s / prefill.replicas
    # Places come free one after the other, each as long as an answer like this one takes.
    together = decode.sequences + cost.sequences
    places = max(load.max_batch_size, cost.sequences) * decode.replicas
    wait_s = max(0, together - places) / places * cost.output_tokens * pace_s
    ingress_s = model.path.request_s + model.path.request_spread_s
    ttft_s = ingress_s + ahead_s + own_s + pull_s + wait_s + step_s
    return AdmissionForecast(ttft_s=ttft_s, tpot_s=pace_s)


def _step_s(model: StepModel, cost: RequestCost, load: InflightLoad) -> float:
    decode = load.decode
    places = max(load.max_batch_size, cost.sequences)
    batch = max(float(cost.sequences), (decode.sequences + cost.sequences) / decode.replicas)
    batch = min(batch, float(places))
    own_tokens = cost.sequences * (cost.prompt_tokens + cost.output_tokens)
    tokens = max(own_tokens, (decode.context_tokens + own_tokens) / decode.replicas)
    step_s = model.decode.step_s(0, 0, batch, tokens)
    return step_s * (1 + load.prefill_busy_fraction * model.interference.decode_fraction)
