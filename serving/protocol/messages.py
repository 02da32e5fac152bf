"""Values that cross a process boundary: the endpoint's configuration, refusals, phases, answers."""

from __future__ import annotations

import hmac
import json
import math
import struct
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pydantic import TypeAdapter

from minicluster.phases import (
    FIRST_DECODE_STEP,
    HANDOFF,
    KV_FETCH,
    PREFILL,
    PREFILL_QUEUE,
    QUEUED_PREFILL,
)
from minicluster.plan import Prediction, Routing, StepModel
from minicluster.routing import ANSWER_POLICY
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


HEADER = struct.Struct("!IQB")

VERSION = 2

MAGIC = b"minicluster"

NONCE_BYTES = 16

PING_S = 10.0
"""Interval at which the caller asks for a sign of life."""

SILENT_S = 35.0
"""
Time without one after which either side gives a connection up: it may be open on one side only.
"""

MOST_BYTES = 64 << 20
"""Longest payload: a request with the longest prompt, or a whole answer to it."""

MOST_STRANGER_BYTES = 256
"""Longest payload of a caller that has not proved anything yet."""


class Kind(IntEnum):
    """
    What a frame is for.

    Attributes:
        HELLO: the listener's version and nonce; the caller's, and its proof.
        PROOF: the listener's answer.
        CALL, NOTICE: JSON with `method` and `arguments`; a notice wants no answer.
        RESULT: JSON, after which nothing comes of a call.
        BEGUN: JSON, after which `EVENTS` and an `END` come.
        EVENTS: server-sent events with tokens, as the client gets them.
        END: JSON: the rest of a call that began, or why it failed, as `error`.
        HOLD, GO_ON: the reader of a call's events is too slow; it has caught up.
        CANCEL: the caller wants no more of a call.
        PING, PONG: the other side is alive.
    """

    HELLO = 1
    PROOF = 2
    CALL = 3
    RESULT = 4
    BEGUN = 5
    EVENTS = 6
    END = 7
    HOLD = 8
    GO_ON = 9
    CANCEL = 10
    NOTICE = 11
    PING = 12
    PONG = 13


KINDS = frozenset(map(int, Kind))


class FrameError(Exception):
    """What came is no frame, or not the one that was expected; the connection is closed."""


def frame(kind: Kind, call: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame as it is sent."""
    return HEADER.pack(len(payload), call, kind) + payload


class FrameReader:
    """Cuts what a connection receives into frames."""

    __slots__ = ("_needed_bytes", "_parts", "_parts_bytes", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        """Expect payloads of at most *most_bytes*, which may change."""
        self.most_bytes = most_bytes
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._needed_bytes = HEADER.size

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """
        Return kind, call and payload of each frame that *data* completes.

        Raises:
            FrameError: of a payload that is too long, or a kind that does not exist.
        """
        if self._parts:
            self._parts.append(data)
            self._parts_bytes += len(data)
            if self._parts_bytes < self._needed_bytes:
                return []  # joined once, however many parts a long payload comes in
            data = b"".join(self._parts)
        begin, end, needed = 0, len(data), HEADER.size
        frames = []
        while end - begin >= HEADER.size:
            length, call, kind = HEADER.unpack_from(data, begin)
            if length > self.most_bytes or kind not in KINDS:
                raise FrameError(
                    f"a frame of kind {kind} and {length} bytes came; expected kinds 1 to"
                    f" {len(KINDS)} and at most {self.most_bytes} bytes"
                )
            needed = HEADER.size + length
            if end - begin < needed:
                break
            frames.append((kind, call, data[begin + HEADER.size : begin + needed]))
            begin, needed = begin + needed, HEADER.size
        self._parts = [data[begin:]] if begin < end else []
        self._parts_bytes, self._needed_bytes = end - begin, needed
        return frames


def hello(nonce: bytes) -> bytes:
    """Return the payload of a HELLO without a proof."""
    return MAGIC + VERSION.to_bytes(2, "big") + nonce


def nonce_in(payload: bytes) -> bytes:
    """
    Return the nonce of a HELLO.

    Raises:
        FrameError: the other side speaks another version, or something else.
    """
    name, rest = payload[: len(MAGIC)], payload[len(MAGIC) :]
    version, nonce = int.from_bytes(rest[:2], "big"), rest[2 : 2 + NONCE_BYTES]
    if name != MAGIC or len(nonce) < NONCE_BYTES:
        raise FrameError("what came is no greeting of a channel")
    if version != VERSION:
        raise FrameError(f"the other side speaks version {version}; expected {VERSION}")
    return nonce


def proof_in(payload: bytes) -> bytes:
    """Return the proof behind the nonce of a HELLO; empty if there is none."""
    return payload[len(MAGIC) + 2 + NONCE_BYTES :]


def proof(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    """Return what only a *side* (`caller` or `listener`) that knows the secret can send."""
    return hmac.digest(secret, b"|".join((side, *nonces)), "sha256")


RETRY_SPREAD = 0.25
"""Largest part by which `Retry-After` is off, so that clients do not come back all at once."""

PATH_HEADER = "X-Minicluster-Path"

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """
    An error as the client sees it, before it is written as HTTP; fields as in OpenAI's error.

    Attributes:
        retry_after_s: when a retry may succeed; `None`: the same request will fail again.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def name(self) -> str:
        """The code, or where there is none the type, as OpenAI has them."""
        return self.code or self.type

    @property
    def type(self) -> str:
        """The type of the error, as OpenAI has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        return ERROR_TYPES.get(self.status, kind)

    @property
    def body(self) -> dict[str, Any]:
        """The response body: OpenAI's error object."""
        # The engine may repeat parts of a request that cannot be encoded; an answer has to be.
        message = self.message.encode("utf-8", "replace").decode()
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The response headers: whether and in how many whole seconds a retry may succeed."""
        headers = {}
        if self.status == 401:  # noqa: PLR2004
            headers["WWW-Authenticate"] = "Bearer"
        if self.code == "slo_unreachable":
            headers["X-Should-Retry"] = "false"
        if self.code == "stopping":
            headers["Connection"] = "close"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return headers


class RequestRefused(Exception):
    """Carries a refusal up the stack to the HTTP layer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refuse(status: int, message: str, **fields: Any) -> NoReturn:  # noqa: ANN401
    """Raise the refusal of a request; *fields* are the others of `Refusal`."""
    raise RequestRefused(Refusal(status=status, message=message, **fields))


class EngineFailed(Exception):
    """The engine failed while answering; a stream that has begun ends without [DONE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPhases:
    """
    The phases of a request's time to first token, and the path that the request took.

    Attributes:
        prefill_s: time from the endpoint's first call of the prefill pool to its answer: routing,
            queue, prefill and failed attempts; 0 where decode computes the prompt, as planned.
        decode_s: time from there to the first token.
        path: `remote`, `retried` (on a second replica, of prefill or of decode), `local` (decode
            computes the prompt, as planned) or `fallback-local` (decode computes it because no
            prefill replica answered, or its KV cache was lost on its way).
        reason: why the path is not plainly remote; one of few words, fit for a metric's label.
        prefill_replica: name of the replica that computed the prompt; empty: decode did.
        decode_replica: name of the replica that answers.
        prefill_queue_s, prefill_step_s: parts of `prefill_s`: the wait inside the prefill engine,
            and from being scheduled there to its token.
    """

    prefill_s: float
    decode_s: float
    path: str = "remote"
    reason: str = ""
    prefill_replica: str = ""
    decode_replica: str = ""
    prefill_queue_s: float = 0.0
    prefill_step_s: float = 0.0

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds in the engines, by names of `minicluster.phases`; the rest is `ingress`."""
        if not self.prefill_replica:
            return {QUEUED_PREFILL: self.decode_s, KV_FETCH: 0.0, FIRST_DECODE_STEP: 0.0}
        return {
            PREFILL_QUEUE: self.prefill_queue_s,
            PREFILL: self.prefill_step_s,
            HANDOFF: self.decode_s,
        }

    @property
    def as_planned(self) -> bool:
        """Whether nothing failed on the way, so that the times are those of the forecast's path."""
        return self.path in {"remote", "local"}

    @property
    def path_and_reason(self) -> str:
        """Path and reason in one line: `retried; reason=prefill-failed`."""
        return f"{self.path}; reason={self.reason}" if self.reason else self.path

    @property
    def headers(self) -> dict[str, str]:
        """Path, and Server-Timing (W3C): the phases in milliseconds."""
        parts = (f"{name};dur={seconds * 1e3:.1f}" for name, seconds in self.phases_s.items())
        return {"Server-Timing": ", ".join(parts), PATH_HEADER: self.path_and_reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPlace:
    """
    Where a process of the application takes calls.

    Attributes:
        secret: hexadecimal; it comes through a call of Ray, which needs the cluster's token.
        group: name of the replicas that it steps together with, if there are any.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChunk:
    """
    The phases and the first server-sent events of an answer, or the whole answer.

    *first* has the events of a stream as one text, or the whole answer.
    """

    phases: RequestPhases
    first: str | dict[str, Any]

    def retried_for(self, reason: str) -> FirstChunk:
        """Return the chunk of an answer whose first attempt failed for *reason*."""
        return replace(self, phases=replace(self.phases, path="retried", reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """
    A prompt that a prefill engine has computed: where its KV cache is, and where the time went.

    Attributes:
        kv_transfer_params: parameters with which decode fetches the KV cache.
        queue_s, step_s: times in the engine: until it was scheduled, and from there to its token.
        replica: name of the replica.
    """

    kv_transfer_params: dict[str, object]
    queue_s: float
    step_s: float
    prompt_tokens: int = 0
    replica: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPath:
    """
    Where a prompt is computed.

    Attributes:
        path, reason: as in `RequestPhases`.
        seconds: time from the first call of the prefill pool until it answered or was given up.
        prefilled: the pool's result; `None`: the answering replica computes the prompt.
    """

    path: str = "local"
    reason: str = ""
    seconds: float = 0.0
    prefilled: Prefilled | None = None

    def phases(self, decode_s: float, replica: str, *, lost: bool = False) -> RequestPhases:
        """Return the phases of an answer of *replica*; *lost*: its KV cache was, on its way."""
        path, reason, done = self.path, self.reason, self.prefilled
        if lost and done is not None:
            path, reason, done = "fallback-local", PULL_FAILED, None
        return RequestPhases(
            prefill_s=self.seconds,
            decode_s=decode_s,
            path=path,
            reason=reason,
            decode_replica=replica,
            prefill_replica=done.replica if done else "",
            prefill_queue_s=done.queue_s if done else 0.0,
            prefill_step_s=done.step_s if done else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiming:
    """
    The time of one prompt through the prefill pool alone; *seconds* is all of it in the replica.

    *queue_s* and *step_s* are as in `Prefilled`.
    """

    prompt_tokens: int
    seconds: float
    queue_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """
    The end of a streamed answer.

    Attributes:
        text: remaining events: usage, if its client asked for it, and `[DONE]`.
        usage: token counts of the engine; `None`: none came.
        error: why the answer broke off; `None`: it is complete.
    """

    text: str = ""
    usage: dict[str, Any] | None = None
    error: Exception | None = None


class AnswerReader(Protocol):
    """What takes the events of a stream as they come."""

    def events(self, text: bytes) -> None:
        """Take server-sent events with tokens."""

    def ended(self, end: AnswerEnd) -> None:
        """Take the end; nothing comes after it."""


class Answer(Protocol):
    """
    An answer that has begun.

    Attributes:
        chunk: its phases, and its first events or all of it.
    """

    chunk: FirstChunk

    def forward(self, reader: AnswerReader) -> None:
        """Give *reader* the events of a stream after the first, from now on."""

    def hold(self, *, on: bool) -> None:
        """Have the engine's events wait where they are, or go on."""

    def close(self) -> None:
        """End the work, if it has not ended."""


MESSAGES: dict[str, TypeAdapter[Any]] = {
    of.__name__: TypeAdapter(of)
    for of in (
        *(ChannelPlace, FirstChunk, Prefilled, PrefillTiming, PromptPath),
        *(Refusal, RequestPhases),
    )
}
"""Types of messages on a channel, by name; all else is plain data."""

NAME = "is"
"""Key of a message's name in JSON."""


def to_json(value: object) -> bytes:
    """Return a message, or plain data in which there may be some, as JSON."""
    return json.dumps(value, default=_plain).encode()


def _plain(message: Any) -> dict[str, Any]:  # noqa: ANN401  (one of `MESSAGES`)
    name = type(message).__name__
    if name not in MESSAGES:
        raise TypeError(f"a {name} is not among what a channel carries")
    return {NAME: name} | {
        attribute.name: getattr(message, attribute.name) for attribute in fields(message)
    }


def message_in(plain: Any) -> Any:  # noqa: ANN401
    """
    Return the message that `to_json` wrote; other plain data is returned as it is.

    Messages inside that are not looked for: part of it may be a client's. Raises ValueError for a
    message that is not as its name says.
    """
    if not isinstance(plain, dict) or NAME not in plain:
        return plain
    name = plain[NAME]
    if not isinstance(name, str) or name not in MESSAGES:
        raise ValueError(f"a message {name!r} came; expected one of {', '.join(MESSAGES)}")
    return MESSAGES[name].validate_python(plain)


class Backend(Protocol):
    """
    The engines as the endpoint calls them, over channels, or without any engine.

    `serving.api` uses these methods and nothing else of an engine.
    """

    async def answer(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[Any] | None = None
    ) -> Refusal | Answer:
        """
        Answer a request of *kind* (`chat` or `completions`) in a domain, from its first token on.

        *tried* has the replicas that failed to answer it, and gets the one that is called now. The
        events of streams have no usage that their clients did not ask for.

        Raises:
            RequestRefused: no replica can take the request.
            EngineFailed: the engine failed before the first token.
        """

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a prompt through the prefill pool alone."""

    async def running(self) -> dict[tuple[str, str], int]:
        """Return the number of running replicas, by role and domain."""

    async def facts(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the settings of one engine of each role and domain, of those that answer."""

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        """Return the steps of one engine of each role that ended in an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequests:
    """The requests in one pool: those without a place yet, and those at each live replica."""

    waiting: int
    at_replicas: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """
    One planned pool, its replicas counted by domain.

    Attributes:
        max_num_seqs: sequences that one replica decodes at once, all its copies together.
        max_num_batched_tokens: token budget of one step.
        kv_bytes: KV cache per GPU.
        policy: choice of a replica (`minicluster.routing`).
        cached_tokens: prompt tokens that a replica's prefix cache has room for.
        max_ongoing_requests: requests at a replica at once; as many wait for each.
    """

    role: str
    gpu: str
    tp: int
    replicas: dict[str, int]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: float
    policy: str = ANSWER_POLICY
    cached_tokens: int = 0
    max_ongoing_requests: int

    @property
    def sequences(self) -> int:
        """Sequences that all replicas decode at once."""
        return self.max_num_seqs * sum(self.replicas.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngines:
    """
    What tells simulated engines from real ones.

    Attributes:
        slowdown: seconds that each second of the plan takes.
        text_tokens: how text is counted: by which tokenizer, or bytes for each token.
    """

    slowdown: float
    text_tokens: str

    def __str__(self) -> str:
        """Say it in one line, fit for a header."""
        return f"simulated; slowdown={self.slowdown:g}; text-tokens={self.text_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """
    Everything about the plan that answering requests needs.

    Attributes:
        slo: like the next four `None` for a deployment without a plan.
        confidence_fraction: probability that the SLO holds; `None`: not simulated.
        tokens_per_step: mean tokens per sequence and decode step; above 1 with drafts.
        prefill_deadline_s: limit from the call of a prefill replica to its answer.
        kv_wait_deadline_s: limit from there to the first token.
        pairing: prefill domains by domain that answers, in the order in which to try them; `()` in
            an aggregated plan.
        adapters: names of LoRA adapters, which requests name as their model.
        vocab_size: bound of the token ids of requests.
        simulated: simulated engines, with whose seconds all times here are; `None`: real ones.
    """

    model_id: str
    max_model_len: int
    block_size: int
    plan_hash: str
    slo: SloSpec | None = None
    prediction: Prediction | None = None
    workload: WorkloadSpec | None = None
    confidence_fraction: float | None = None
    step_model: StepModel | None = None
    prefill_deadline_s: float
    kv_wait_deadline_s: float
    routing: Routing
    pools: tuple[PoolConfig, ...]
    pairing: dict[str, tuple[str, ...]]
    simulated: SimulatedEngines | None = None
    tokens_per_step: float
    adapters: tuple[str, ...] = ()
    vocab_size: int = 2**31

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may give as their model: the model's and those of adapters."""
        return self.model_id, *self.adapters

    @property
    def split(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return any(pool.role == "prefill" for pool in self.pools)

    @property
    def answering(self) -> PoolConfig:
        """The pool that answers requests: decode, or the mixed pool of an aggregated plan."""
        return next(pool for pool in self.pools if pool.role != "prefill")

    @property
    def prefilling(self) -> PoolConfig:
        """The pool that computes prompts: prefill, or the mixed pool of an aggregated plan."""
        return next((pool for pool in self.pools if pool.role == "prefill"), self.answering)

    def prefill_domain(self, domain: str) -> str:
        """Return the prefill domain that requests answered in *domain* use first."""
        return (self.pairing.get(domain) or (domain,))[0]


def to_plain(config: EndpointConfig) -> dict[str, Any]:
    """Return *config* as dicts, lists, strings and numbers."""
    plain: dict[str, Any] = _ADAPTER.dump_python(config, mode="json")
    return plain


def from_plain(plain: Mapping[str, Any]) -> EndpointConfig:
    """Read back what `to_plain` wrote; raises pydantic's ValidationError on anything else."""
    return _ADAPTER.validate_json(json.dumps(dict(plain)))


_ADAPTER = TypeAdapter(EndpointConfig)

RETRY_AFTER_S = 5.0
"""Retry-After where prefill fails: Ray Serve needs as long for a new replica."""

NO_REPLICA, DIED, TIMEOUT = "no-prefill-replica", "prefill-failed", "prefill-timeout"
"""Why prefill did not answer; values of headers and metrics."""

DECODE_FAILED = "decode-failed"
"""Why a request was answered by a second replica: the first was gone before its first token."""

PULL_FAILED = "kv-pull-failed"
"""Why decode computed a prompt that prefill had computed: its KV cache was lost on its way."""

UNAVAILABLE = {
    code: Refusal(
        status=503, message=f"{what}; try again later.", code=code, retry_after_s=RETRY_AFTER_S
    )
    for code, what in {
        "no_replica": "No replica can take the request",
        "engine-died": "The engine died",
        NO_REPLICA: "No prefill replica is up",
        DIED: "Prefill failed",
    }.items()
}
"""The refusals of requests that another replica, or a later one, could answer, by their codes."""

NO_ANSWERING_REPLICA, ENGINE_DIED = UNAVAILABLE["no_replica"], UNAVAILABLE["engine-died"]

LATE = {
    TIMEOUT: "No prefill replica answered within {:g} s.",
    "kv-wait-timeout": "The first token did not come within {:g} s of prefill.",
    "answer-timeout": "The answer did not come within {:g} s.",
    "token-timeout": "No event came within {:g} s of the one before.",
}
"""The message for a client whose request exceeded a time limit, by the code of the refusal."""


def late(code: str, limit_s: float) -> Refusal:
    """Return the refusal of a request that missed the time limit of *code*, a key of `LATE`."""
    message = LATE[code].format(limit_s)
    waits_s = math.ceil(limit_s) if code == "kv-wait-timeout" else 0
    return Refusal(
        status=504, message=message, code=code, retry_after_s=max(RETRY_AFTER_S, waits_s)
    )
