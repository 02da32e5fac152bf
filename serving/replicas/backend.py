"""The replicas of all pools as the endpoint calls them: path, limits, retries, the answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from serving.protocol.messages import (
    DIED,
    NO_ANSWERING_REPLICA,
    NO_REPLICA,
    TIMEOUT,
    UNAVAILABLE,
    AnswerEnd,
    EngineFailed,
    Kind,
    PromptPath,
    Refusal,
    RequestRefused,
    late,
)
from serving.replicas.channels import ChannelLostError
from serving.replicas.seats import NoReplicaError, RoutedPrompt, routed_prompt
from serving.request.cost import answer_tokens, must_be_local, prompts_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from serving.protocol.messages import (
        Answer,
        AnswerReader,
        EndpointConfig,
        FirstChunk,
        Prefilled,
        PrefillTiming,
    )
    from serving.replicas.channels import Call
    from serving.replicas.seats import Seat

    Pool = tuple[str, str]
    """Role and domain."""


ATTEMPTS = 2
"""Attempts per request: the client has received nothing yet, so another replica may be tried."""

MAX_TOKEN_BYTES = 64
"""Longest usual token of any tokenizer: a text longer than this times the threshold exceeds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttempt:
    """
    The decision to call a prefill replica.

    Attributes:
        patience_s: after which the call is given up if its replica answers no other meanwhile.
        timeout_s: after which it is given up.
    """

    patience_s: float
    timeout_s: float


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
    length = sum(len(str(message)) for message in messages) if isinstance(messages, list) else 0
    return length <= threshold_tokens * MAX_TOKEN_BYTES


def next_step(
    failures: Sequence[str], *, live: int | None, spent_s: float, config: EndpointConfig
) -> PrefillAttempt | PromptPath | Refusal:
    """
    Decide the next step of a request whose prompt is not computed yet.

    If another replica is live, the first attempt has half of the time to answer, so that a replica
    that hangs leaves enough for the second attempt. One that answers other requests meanwhile does
    not hang: it has a queue, as the others have, and a second attempt would double its load.

    Args:
        failures: reasons of the attempts so far, `DIED` or `TIMEOUT`.
        live: number of live prefill replicas; `None`: not known yet.
        spent_s: seconds since the first attempt began.
        config: deadline and fallback.
    """
    if live == 0:
        return _without_prefill(NO_REPLICA, spent_s, config)
    left_s = config.prefill_deadline_s - spent_s
    if failures and (len(failures) >= ATTEMPTS or left_s <= 0):
        return _without_prefill(failures[-1], spent_s, config)
    last = live == 1 or bool(failures)
    return PrefillAttempt(patience_s=left_s if last else left_s / 2, timeout_s=left_s)


def _without_prefill(reason: str, spent_s: float, config: EndpointConfig) -> PromptPath | Refusal:
    if config.routing.fallback == "local":
        return PromptPath(path="fallback-local", reason=reason, seconds=spent_s)
    return UNAVAILABLE.get(reason) or late(reason, config.prefill_deadline_s)


def choose_domain(live: Mapping[str, int | None], tried: str | None) -> str:
    """
    Return the domain to call: the nearest with a live replica that did not just fail.

    Args:
        live: live replicas by domain, the nearest first; `None`: not known yet.
        tried: the domain called before.
    """
    others = [
        domain
        for domain, count in live.items()
        if count is None or count > (1 if domain == tried else 0)
    ]
    alive = [domain for domain, count in live.items() if count]
    return (others or alive or list(live))[0]


logger = logging.getLogger(__name__)

SLACK_S = 2.0
"""Time beyond both deadlines until a decode replica that does not answer is given up."""

EVENT_LIMIT_S = 30.0
"""Least limit between two events of a stream: it is for engines that stand still."""

PACE_FACTOR = 10.0
"""
Limit of the time per token of an answer, as a multiple of the SLO's. Generous: beam search prefills
anew for each token, and the limit is for replicas that hang, not for slow ones.
"""

UNPLANNED_TOKEN_S = 1.0
"""The same limit, in seconds per token, where no plan names a pace."""

AGGREGATED = PromptPath(reason="aggregated")

FACTS_LIMIT_S = 5.0

KNOWN_POLL_S = 0.1

PUBLIC_FACTS = (
    *("tp", "pp", "dp", "ep", "dtype", "kv_dtype", "max_num_seqs", "max_num_batched_tokens"),
    *("chunked_prefill_tokens", "max_model_len", "block_size", "kv_bytes"),
    *("gpu_memory_utilization", "kv_role", "kv_connector", "speculative_tokens"),
    *("redundant_experts", "all_to_all_backend", "two_batch_overlap"),
)
"""The engine settings that `GET /plan` shows: no paths, no hosts."""

PARAMS = {
    "beam-search": "use_beam_search",
    "prompt-list": "prompt",
    "prompt-logprobs": "prompt_logprobs",
}
"""Request fields that exclude the prefill pool, where the reason has another name."""

SERVER_ERROR = 500


def first_token_limit_s(config: EndpointConfig) -> float:
    """Return how long the first token of a stream may take: both deadlines, and some slack."""
    return config.prefill_deadline_s + config.kv_wait_deadline_s + SLACK_S


def event_limit_s(config: EndpointConfig) -> float:
    """
    Return how long the next event of a stream may take after the first.

    A sequence that is preempted waits and is computed anew, as a request that arrives then.
    """
    return max(EVENT_LIMIT_S, first_token_limit_s(config))


def whole_answer_limit_s(config: EndpointConfig, kind: str, body: Mapping[str, Any]) -> float:
    """Return how long an answer in one piece may take; sequences beyond the batch are in turns."""
    token_s = UNPLANNED_TOKEN_S
    if config.slo is not None and config.prediction is not None:
        token_s = PACE_FACTOR * (config.slo.per_token_s or config.prediction.tpot.p99_s)
    requested = answer_tokens(kind, body)
    tokens = config.max_model_len if requested is None else requested
    sequences = (body.get("n") or 1) * len(prompts_of(body.get("prompt")))
    turns = math.ceil(sequences / config.answering.max_num_seqs)
    return first_token_limit_s(config) + turns * tokens * token_s


class Seats(Protocol):
    """The places of requests at the replicas of all pools."""

    async def seat(self, pool: Pool, prompt: RoutedPrompt, tried: Sequence[str]) -> Seat:
        """Return a place for a request; see `ReplicaPool.seat`."""

    def leave(self, pool: Pool, seat: Seat, *, answered: bool = False) -> None:
        """Give a place back; *answered*: with a whole result."""

    async def answered_within(self, pool: Pool, replica: str, age_s: float) -> bool:
        """Return whether a replica has answered any request in the last *age_s*."""

    def live(self, pool: Pool) -> Sequence[str] | None:
        """Return the names of the replicas that can be called; `None`: not known yet."""

    def call(self, replica: str, method: str, arguments: dict[str, Any]) -> Call:
        """Call a replica; raises ChannelLostError where there is no connection to it."""


class ReplicaBackend:
    """
    Implements `serving.protocol.messages.Backend`.

    A decode replica enforces the deadlines itself; the limits here are for one that hangs.
    """

    def __init__(self, config: EndpointConfig, seats: Seats) -> None:
        """Call replicas from the places that *seats* gives."""
        self._config = config
        self._seats = seats
        self._answering = config.answering.role

    async def answer(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[str] | None = None
    ) -> Refusal | Answer:
        """
        Have the prompt prefilled, and answer as `AnswerRole.answer` does; see `Backend.answer`.

        Cancelling this ends the call that is under way.
        """
        pool = (self._answering, domain)
        if self._seats.live(pool) == []:
            raise RequestRefused(NO_ANSWERING_REPLICA)
        prefill = await self._prefilled(domain, kind, body)
        if isinstance(prefill, Refusal):
            return prefill
        limit_s, too_late = first_token_limit_s(self._config), NO_ANSWERING_REPLICA
        if body.get("stream") is not True or body.get("use_beam_search"):
            limit_s = whole_answer_limit_s(self._config, kind, body)
            too_late = late("answer-timeout", limit_s)
        arguments = {"kind": kind, "body": body, "prefill": prefill}
        begun, call, leave = await _in_time(
            self._begun(pool, "answer", arguments, [] if tried is None else tried),
            limit_s - prefill.seconds,
            too_late,
        )
        if isinstance(begun, Refusal):
            leave()
            return begun
        return ServedAnswer(begun, call, event_limit_s(self._config), leave)

    async def _begun(
        self, pool: Pool, method: str, arguments: dict[str, Any], tried: list[str]
    ) -> tuple[Any, Call, Callable[..., None]]:
        """
        Call a method of one replica of a pool, none of *tried*, to which its name is appended.

        Returns:
            The result, the call, and what gives its place back.
        """
        seat = await self._seats.seat(pool, self._prompt(pool, arguments), tried)
        leave = partial(self._seats.leave, pool, seat)
        tried.append(seat.replica)
        try:
            call = self._seats.call(seat.replica, method, arguments)
            try:
                return await call.result, call, leave
            except BaseException:
                call.cancel()
                raise
        except BaseException:
            leave()
            raise

    def _prompt(self, pool: Pool, arguments: Mapping[str, Any]) -> RoutedPrompt:
        role, _ = pool
        config = self._config.prefilling if role == "prefill" else self._config.answering
        return routed_prompt(config.policy, arguments["body"])

    async def _whole(
        self, pool: Pool, method: str, arguments: dict[str, Any], tried: list[str]
    ) -> Any:  # noqa: ANN401
        result, _, leave = await self._begun(pool, method, arguments, tried)
        leave(answered=True)
        return result

    async def _prefilled(
        self, domain: str, kind: str, body: dict[str, Any]
    ) -> PromptPath | Refusal:
        if not self._config.split:
            return AGGREGATED
        local = must_be_local(body)
        threshold = self._config.routing.local_threshold_tokens
        if local is None and may_be_short(body, threshold):
            arguments, limit_s = {"kind": kind, "body": body}, self._config.prefill_deadline_s
            counting = self._whole((self._answering, domain), "prompt_tokens", arguments, [])
            tokens = await _in_time(counting, limit_s, late(TIMEOUT, limit_s))
            local = "short" if tokens is not None and tokens <= threshold else None
        if local is not None:
            return PromptPath(reason=local)
        domains = self._config.pairing[domain]
        return await prefill_remotely(self, domains, kind, body, self._config)

    def live(self, domain: str) -> int | None:
        """Return the number of live prefill replicas in a domain; `None`: not known yet."""
        live = self._seats.live(("prefill", domain))
        return None if live is None else len(live)

    async def answered_within(self, domain: str, replica: str, age_s: float) -> bool:
        """Return whether a prefill replica has answered any request in the last *age_s*."""
        return await self._seats.answered_within(("prefill", domain), replica, age_s)

    async def call(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[str]
    ) -> Prefilled | Refusal:
        """Prefill on one replica of a domain, none of *tried*, to which its name is appended."""
        arguments = {"kind": kind, "body": body}
        answer: Prefilled | Refusal = await self._whole(
            ("prefill", domain), "prefill", arguments, tried
        )
        return answer

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a prompt through the first domain's prefill pool."""
        if not self._config.split:
            return Refusal(status=404, message="An aggregated plan has no prefill pool.")
        local = must_be_local(body)
        if local is not None:
            return _not_through_prefill(local)
        pool = ("prefill", next(iter(self._config.prefilling.replicas)))
        limit_s = self._config.prefill_deadline_s
        timing: PrefillTiming | Refusal = await _in_time(
            self._whole(pool, "time_prefill", {"body": body}, []), limit_s, late(TIMEOUT, limit_s)
        )
        return timing

    @property
    def _pools(self) -> list[Pool]:
        return [(pool.role, domain) for pool in self._config.pools for domain in pool.replicas]

    async def running(self) -> dict[Pool, int]:
        """
        Return the number of replicas that can be called, by role and domain.

        Raises:
            TimeoutError: those of a pool are not known yet.
        """
        async with asyncio.timeout(FACTS_LIMIT_S):
            while None in [self._seats.live(pool) for pool in self._pools]:  # noqa: ASYNC110
                await asyncio.sleep(KNOWN_POLL_S)
        return {pool: len(self._seats.live(pool) or ()) for pool in self._pools}

    async def facts(self) -> dict[Pool, dict[str, Any]]:
        """Return one engine's settings per deployment; those that do not answer are left out."""
        answers = await self._ask_one_each("facts", {})
        return {
            key: {name: facts[name] for name in PUBLIC_FACTS if name in facts}
            for key, facts in answers.items()
        }

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        """Return the steps of one engine of each role; of several domains the first that has."""
        interval = {"begin_unix_s": begin_unix_s, "end_unix_s": end_unix_s}
        answers = await self._ask_one_each("steps", interval)
        return {role: rows for (role, _), rows in reversed(answers.items()) if rows}

    async def _ask_one_each(self, method: str, asked: dict[str, Any]) -> dict[Pool, Any]:
        async def ask(pool: Pool) -> Any:  # noqa: ANN401
            live = self._seats.live(pool)
            if not live:
                return None
            try:
                async with asyncio.timeout(FACTS_LIMIT_S):
                    return await self._seats.call(live[0], method, asked).result
            except Exception as error:  # noqa: BLE001  (the other pools still answer)
                logger.warning("%s did not report its %s: %r", live[0], method, error)
                return None

        answers = await asyncio.gather(*(ask(pool) for pool in self._pools))
        by_pool = zip(self._pools, answers, strict=True)
        return {pool: answer for pool, answer in by_pool if answer is not None}


def _not_through_prefill(reason: str) -> Refusal:
    param = PARAMS.get(reason, reason)
    message = f"{param}: expected what the prefill pool computes: one prompt, for one plain answer."
    return Refusal(status=400, message=message, param=param, code="unsupported_value")


async def _in_time(result: Awaitable[Any], limit_s: float, too_late: Refusal) -> Any:  # noqa: ANN401
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError as error:
        raise RequestRefused(too_late) from error
    except (NoReplicaError, ChannelLostError) as error:
        raise RequestRefused(NO_ANSWERING_REPLICA) from error


class _Attempts:
    def __init__(self, pool: ReplicaBackend, kind: str, body: dict[str, Any]) -> None:
        self._pool = pool
        self._kind, self._body = kind, body
        self._tried: list[str] = []
        self.failures: list[str] = []

    async def attempt(self, domain: str, step: PrefillAttempt) -> Prefilled | Refusal | None:
        """Call one replica; `None`: it failed, which is noted."""
        begun_s, tried = time.monotonic(), len(self._tried)
        call = asyncio.ensure_future(self._pool.call(domain, self._kind, self._body, self._tried))
        try:
            await asyncio.wait({call}, timeout=step.patience_s)
            if not call.done() and await self._is_busy(domain, begun_s, tried):
                await asyncio.wait({call}, timeout=step.timeout_s - step.patience_s)
            if not call.done():
                self.failures.append(TIMEOUT)
                return None
            answer = call.result()
        except Exception:  # any error: another replica may succeed
            logger.exception("prefill of request %s failed", self._body.get("request_id"))
            self.failures.append(DIED)
            return None
        finally:
            call.cancel()
        if isinstance(answer, Refusal) and answer.status >= SERVER_ERROR:
            self.failures.append(DIED)
            return None
        return answer

    async def _is_busy(self, domain: str, begun_s: float, tried: int) -> bool:
        """Return whether the replica answers others meanwhile, or the call waits for a place."""
        if len(self._tried) == tried:
            return True
        age_s = time.monotonic() - begun_s
        return await self._pool.answered_within(domain, self._tried[-1], age_s)


async def prefill_remotely(
    pool: ReplicaBackend,
    domains: Sequence[str],
    kind: str,
    body: dict[str, Any],
    config: EndpointConfig,
) -> PromptPath | Refusal:
    """
    Prefill a prompt in one of *domains*, tried in this order, with the retries of `next_step`.

    Returns the path, which may be that decode computes the prompt, or the client's error.
    """
    begun_s = time.monotonic()
    attempts = _Attempts(pool, kind, body)
    domain: str | None = None
    while True:
        live = {candidate: pool.live(candidate) for candidate in domains}
        counts = [count for count in live.values() if count is not None]
        step = next_step(
            attempts.failures,
            live=sum(counts) if len(counts) == len(live) else None,
            spent_s=time.monotonic() - begun_s,
            config=config,
        )
        if not isinstance(step, PrefillAttempt):
            return step
        domain = choose_domain(live, domain)
        answer = await attempts.attempt(domain, step)
        if isinstance(answer, Refusal):
            return answer
        if answer is not None:
            reason = attempts.failures[-1] if attempts.failures else ""
            return PromptPath(
                path="retried" if reason else "remote",
                reason=reason,
                seconds=time.monotonic() - begun_s,
                prefilled=answer,
            )


class ServedAnswer:
    """An answer that has begun; see `serving.protocol.messages.Answer`."""

    def __init__(
        self, chunk: FirstChunk, call: Call, limit_s: float, over: Callable[[], None]
    ) -> None:
        """Take what came first; each event may take *limit_s*, and *over* is told of the end."""
        self.chunk = chunk
        self._call = call
        self._limit_s = limit_s
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._reader: AnswerReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._held = self._late = False
        self._done = not call.streams
        if self._done:
            over()

    def forward(self, reader: AnswerReader) -> None:
        """Give *reader* the events that the replica sends."""
        self._reader = reader
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        self._call.forward(self)

    def events(self, text: bytes) -> None:
        """Pass events on."""
        self._heard_s, self._late = self._loop.time(), False
        if self._reader is not None:
            self._reader.events(text)

    def ended(self, ending: dict[str, Any]) -> None:
        """Pass the end on."""
        error = EngineFailed(ending["error"]) if ending["error"] else None
        text, usage = ending.get("text", ""), ending.get("usage")
        self._finish(AnswerEnd(text=text, usage=usage, error=error))

    def lost(self, error: ChannelLostError) -> None:
        """End the answer of a replica that is gone."""
        self._finish(AnswerEnd(error=error))

    def hold(self, *, on: bool) -> None:
        """Have the replica wait with further events, or go on."""
        self._held = on
        self._heard_s = self._loop.time()
        if not self._done:
            self._call.tell(Kind.HOLD if on else Kind.GO_ON)

    def close(self) -> None:
        """End the work; nothing is left to do for an answer that has ended."""
        if not self._done:
            self._call.cancel()
            self._finish(None)

    def _look(self) -> None:
        """Give the answer up if no event has come for too long; there is one timer for all."""
        left_s = self._heard_s + self._limit_s - self._loop.time()
        if self._held:
            left_s = self._limit_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif not self._late:  # events may have come that this process has not read yet
            self._late = True
            self._timer = self._loop.call_later(0.0, self._look)
        else:
            self._call.cancel()
            self._finish(AnswerEnd(error=RequestRefused(late("token-timeout", self._limit_s))))

    def _finish(self, end: AnswerEnd | None) -> None:
        reader, self._reader = self._reader, None
        if self._timer is not None:
            self._timer.cancel()
        if not self._done:
            self._done = True
            self._over()
        if reader is not None and end is not None:
            reader.ended(end)
