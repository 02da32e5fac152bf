"""The pools behind Ray Serve's handles, as the endpoint calls them, with their time limits."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serving.cluster.serve_compat import (
    DIRECT_CALLS,
    LIVE_POLL_S,
    NoReplica,
    live_replicas,
    while_live,
)
from serving.protocol.messages import LocalPrefill, Refusal, RequestRefused
from serving.replicas.remote_prefill import PrefillHandles, prefill_remotely
from serving.replicas.served_answer import ServedAnswer
from serving.request.length import answer_tokens, prompts_of
from serving.request.prefill import (
    NO_ANSWERING_REPLICA,
    TIMEOUT,
    late,
    may_be_short,
    must_be_local,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Answer, PrefillTiming, RemotePrefill
    from serving.replicas.token_channels import TokenChannels

logger = logging.getLogger(__name__)

NO_REPLICA_ERRORS = (
    BackPressureError,
    DeploymentUnavailableError,
    NoReplica,
    RayActorError,
    TimeoutError,
)
"""The exceptions of a call that no replica can take, or whose replica is gone."""

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

AGGREGATED, SHORT = LocalPrefill(reason="aggregated"), LocalPrefill(reason="short")

FACTS_LIMIT_S = 5.0
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
    """
    Return how long an answer in one piece may take; sequences beyond the batch are in turns.

    Args:
        config: deadlines, SLO and batch size.
        kind: `chat` or `completions`.
        body: a request that `serving.request.validation.check` accepted.
    """
    token_s = UNPLANNED_TOKEN_S
    if config.slo is not None and config.prediction is not None:
        token_s = PACE_FACTOR * (config.slo.per_token_s or config.prediction.tpot.p99_s)
    requested = answer_tokens(kind, body)
    tokens = config.max_model_len if requested is None else requested
    sequences = (body.get("n") or 1) * len(prompts_of(body.get("prompt")))
    turns = math.ceil(sequences / config.answering.max_num_seqs)
    return first_token_limit_s(config) + turns * tokens * token_s


class ServeBackend:
    """Implements `serving.protocol.messages.Backend`."""

    def __init__(
        self,
        servers: Mapping[str, Any],
        prefill: Mapping[str, Any],
        config: EndpointConfig,
        channels: TokenChannels,
    ) -> None:
        """
        Keep a handle per domain, of the pool that answers and of the pool that prefills.

        A decode replica enforces the deadlines itself; the limits here are for one that hangs.
        Events of answers come through *channels*.
        """
        self._config = config
        self._channels = channels
        self._servers = {
            domain: handle.options(stream=True, **DIRECT_CALLS)
            for domain, handle in servers.items()
        }
        self._prefill = dict(prefill)
        self._prefill_pool = PrefillHandles(prefill)
        role = "decode" if prefill else "mixed"
        self._handles = {
            (of, domain): handle
            for of, handles in ((role, servers), ("prefill", prefill))
            for domain, handle in handles.items()
        }

    async def answer(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[Any] | None = None
    ) -> Refusal | Answer:
        """
        Have the prompt prefilled, and answer as `AnswerRole.answer` does; see `Backend.answer`.

        Cancelling this ends the call that is under way.
        """
        handle = _available(self._servers[domain])
        prefill = await self._prefilled(domain, kind, body)
        if isinstance(prefill, Refusal):
            return prefill
        limit_s, too_late = first_token_limit_s(self._config), NO_ANSWERING_REPLICA
        if body.get("stream") is not True or body.get("use_beam_search"):
            limit_s = whole_answer_limit_s(self._config, kind, body)
            too_late = late("answer-timeout", limit_s)
        response = handle.answer.remote(kind, body, prefill, tried=[] if tried is None else tried)
        try:
            begun = await _in_time(handle, anext(response), limit_s - prefill.seconds, too_late)
        except BaseException:
            response.cancel()
            raise
        if isinstance(begun, Refusal):
            return begun
        return ServedAnswer(begun, response, self._channels, event_limit_s(self._config))

    async def _prefilled(
        self, domain: str, kind: str, body: dict[str, Any]
    ) -> RemotePrefill | LocalPrefill | Refusal:
        """Choose the path of a request that is answered in *domain*; prefill if that is it."""
        if not self._prefill:
            return AGGREGATED
        local = must_be_local(body)
        threshold = self._config.routing.local_threshold_tokens
        if local is None and may_be_short(body, threshold):
            handle = self._handles["decode", domain]
            limit_s = self._config.prefill_deadline_s
            counting = handle.prompt_tokens.remote(kind, body)
            tokens = await _in_time(handle, counting, limit_s, late(TIMEOUT, limit_s))
            local = SHORT if tokens is not None and tokens <= threshold else None
        if local is not None:
            return local
        domains = self._config.pairing[domain]
        return await prefill_remotely(self._prefill_pool, domains, kind, body, self._config)

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a prompt through the first domain's prefill pool."""
        if not self._prefill:
            return Refusal(status=404, message="An aggregated plan has no prefill pool.")
        local = must_be_local(body)
        if local is not None:
            return _not_through_prefill(local)
        handle = _available(next(iter(self._prefill.values())))
        limit_s = self._config.prefill_deadline_s
        response = handle.time_prefill.remote(body)
        try:
            timing: PrefillTiming | Refusal
            timing = await _in_time(handle, response, limit_s, late(TIMEOUT, limit_s))
        except BaseException:
            response.cancel()
            raise
        return timing

    async def running(self) -> dict[tuple[str, str], int]:
        """
        Return the number of replicas that can be called, by role and domain.

        The handles know them also while Serve's controller restarts, which then reports none.

        Raises:
            TimeoutError: a handle has not heard of its replicas yet.
        """
        async with asyncio.timeout(FACTS_LIMIT_S):
            while None in (counts := self._live()).values():  # noqa: ASYNC110  (no event for it)
                await asyncio.sleep(LIVE_POLL_S)
        return {key: count or 0 for key, count in counts.items()}

    def _live(self) -> dict[tuple[str, str], int | None]:
        role = "decode" if self._prefill else "mixed"
        counts = {(role, domain): live_replicas(each) for domain, each in self._servers.items()}
        return counts | {("prefill", each): self._prefill_pool.live(each) for each in self._prefill}

    async def facts(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return one engine's settings per deployment; those that do not answer are left out."""
        answers = await self._ask_one_each("facts")
        return {
            key: {name: facts[name] for name in PUBLIC_FACTS if name in facts}
            for key, facts in answers.items()
        }

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        """Return the steps of one engine of each role; of several domains the first that has."""
        answers = await self._ask_one_each("steps", begin_unix_s, end_unix_s)
        return {role: rows for (role, _), rows in reversed(answers.items()) if rows}

    async def _ask_one_each(self, method: str, *args: object) -> dict[tuple[str, str], Any]:
        """Ask one replica of each deployment; those that do not answer are left out."""

        async def ask(handle: Any) -> Any:  # noqa: ANN401
            response = getattr(handle, method).remote(*args)
            try:
                async with asyncio.timeout(FACTS_LIMIT_S):
                    return await response
            except Exception as error:  # noqa: BLE001  (the other deployments still answer)
                logger.warning(
                    "%s did not report its %s: %r", handle.deployment_name, method, error
                )
                response.cancel()
                return None

        answers = await asyncio.gather(*(ask(handle) for handle in self._handles.values()))
        by_pool = zip(self._handles, answers, strict=True)
        return {key: answer for key, answer in by_pool if answer is not None}


def _not_through_prefill(local: LocalPrefill) -> Refusal:
    """Return the refusal to time a prompt that never goes through the prefill pool."""
    param = PARAMS.get(local.reason, local.reason)
    message = f"{param}: expected what the prefill pool computes: one prompt, for one plain answer."
    return Refusal(status=400, message=message, param=param, code="unsupported_value")


def _available(handle: Any) -> Any:  # noqa: ANN401
    """Return *handle*, or refuse the request: without a replica Ray Serve would wait for one."""
    if live_replicas(handle) == 0:
        raise RequestRefused(NO_ANSWERING_REPLICA)
    return handle


async def _in_time(handle: Any, item: Awaitable[Any], limit_s: float, too_late: Refusal) -> Any:  # noqa: ANN401
    """Return the first item of a call; refuse the request if it does not come, or is *too_late*."""
    try:
        async with asyncio.timeout(limit_s):
            return await while_live(handle, item)
    except NO_REPLICA_ERRORS as error:
        refusal = too_late if isinstance(error, TimeoutError) else NO_ANSWERING_REPLICA
        raise RequestRefused(refusal) from error
