"""Generation: a server answers with its own engine, wherever the prompt was computed."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.protocol.messages import EngineFailed, FirstChunk, Refusal, RequestPhases
from serving.replicas.pending_answer import PendingAnswer
from serving.replicas.remote_prefill import PrefillHandles, RemotePrefill, prefill_remotely
from serving.request.prefill import LocalPrefill, late, may_be_short, must_be_local

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from serving.protocol.answer_engine import AnswerEngine
    from serving.protocol.endpoint_config import EndpointConfig

AGGREGATED, SHORT = LocalPrefill(reason="aggregated"), LocalPrefill(reason="short")


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineCall:
    """A request as this server's engine gets it; `limit_s` is for the first token."""

    request: Any
    limit_s: float
    prefill_s: float
    prefill: RemotePrefill | LocalPrefill

    def phases(self, decode_s: float) -> RequestPhases:
        """Return the phases of the time to first token."""
        phases = RequestPhases(
            prefill_s=self.prefill_s,
            decode_s=decode_s,
            decode_replica=serve.get_replica_context().replica_id.unique_id,
        )
        if isinstance(self.prefill, LocalPrefill):
            return replace(phases, path=self.prefill.path, reason=self.prefill.reason)
        failures, done = self.prefill.failures, self.prefill.prefilled
        return replace(
            phases,
            path="retried" if failures else "remote",
            reason=failures[-1] if failures else "",
            prefill_replica=done.replica,
            prefill_queue_s=done.queue_s,
            prefill_step_s=done.step_s,
        )


class GenerationMixin:
    """The answering part of decode servers and of the servers of aggregated plans."""

    answers: AnswerEngine
    _config: EndpointConfig
    _prefill_pool: PrefillHandles | None
    _closing: dict[asyncio.Task[None], PendingAnswer]

    async def answer(
        self, kind: str, body: dict[str, Any], *, config: EndpointConfig | None = None
    ) -> AsyncIterator[Refusal | FirstChunk | list[str]]:
        """
        Prefill remotely or here, decode here.

        Args:
            kind: `chat` or `completions`.
            body: a request that `serving.request.validation.check` accepted.
            config: deadlines and routing; default: the plan's.

        Yields:
            A refusal; or the phases with the first token, or with the whole answer; then
            server-sent events as they come.

        Raises:
            EngineFailed: the engine failed, usually after the first token.
        """
        config = config or self._config
        call = await self._prefilled_call(kind, body, config)
        if isinstance(call, Refusal):
            yield call
            return
        seen = partial(self.answers.first_token_seen, call.request)
        answer = PendingAnswer(
            self.answers.answer(call.request),
            has_first_token=None if call.request.stream else seen,
            in_flight=isinstance(call.prefill, RemotePrefill),
        )
        try:
            started = time.perf_counter()
            came = await _first_token(answer, call.limit_s, config)
            if isinstance(came, Refusal):
                yield came
                return
            first = await answer.first_item()
            if isinstance(first, Refusal):
                yield first
                return
            yield FirstChunk(phases=call.phases(came - started), first=first)
            async for item in answer.stream:
                if isinstance(item, Refusal):
                    raise EngineFailed(item.message)  # noqa: TRY301  (closed as any failure)
                yield item
        except EngineFailed:
            raise
        except Exception as error:
            # An exception of vLLM's must not leave this process: unpickling it would import vLLM
            # in the endpoint, which then answers nothing for seconds and takes half a gigabyte.
            raise EngineFailed(repr(error)) from error
        finally:
            # In a task of its own, because this one may be cancelled.
            closing = asyncio.create_task(answer.close())
            self._closing[closing] = answer
            closing.add_done_callback(self._closing.pop)

    async def check_health(self) -> None:
        """Fail Ray Serve's health check, which replaces this replica, if KV transfers are lost."""
        stuck = sum(answer.stuck for answer in self._closing.values())
        if stuck:
            raise RuntimeError(f"{stuck} KV transfers do not end; only a new engine frees them")
        await super().check_health()  # type: ignore[misc]

    async def _prefilled_call(
        self, kind: str, body: dict[str, Any], config: EndpointConfig
    ) -> _EngineCall | Refusal:
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal):
            return request
        started = time.perf_counter()
        prefill = await self._prefill(body, request, config)
        if isinstance(prefill, Refusal):
            return prefill
        prefill_s = time.perf_counter() - started
        if isinstance(prefill, RemotePrefill):
            request = self.answers.for_decode(request, prefill.prefilled)
            limit_s = config.kv_wait_deadline_s
        elif body.get("use_beam_search"):
            limit_s = math.inf  # its first token is its last: the endpoint's limit applies
        else:
            limit_s = config.prefill_deadline_s + config.kv_wait_deadline_s - prefill_s
        return _EngineCall(request=request, limit_s=limit_s, prefill_s=prefill_s, prefill=prefill)

    async def _prefill(
        self,
        body: dict[str, Any],
        request: Any,  # noqa: ANN401
        config: EndpointConfig,
    ) -> RemotePrefill | LocalPrefill | Refusal:
        """Choose the path of a request, and prefill remotely if that is the path."""
        if self._prefill_pool is None:
            return AGGREGATED
        local = must_be_local(body)
        threshold = config.routing.local_threshold_tokens
        if local is None and may_be_short(body, threshold):
            tokens = await self.answers.prompt_tokens(request)
            local = SHORT if tokens is not None and tokens <= threshold else None
        if local is not None:
            return local
        return await prefill_remotely(self._prefill_pool, self.answers.for_prefill(request), config)


async def _first_token(
    answer: PendingAnswer, limit_s: float, config: EndpointConfig
) -> float | Refusal:
    """Return when the first token or an error came, or the client's error."""
    try:
        await answer.first_token(limit_s)
    except TimeoutError:
        return late("kv-wait-timeout", config.kv_wait_deadline_s)
    return time.perf_counter()
