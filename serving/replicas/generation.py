"""Generation: a server answers with its own engine, wherever the prompt was computed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from vllm.v1.engine.exceptions import EngineDeadError

from serving.protocol.messages import EngineFailed, FirstChunk, Refusal, RequestPhases
from serving.replicas.engine_compat import first_token_seen, prompt_tokens
from serving.replicas.engine_request import (
    ERROR_EVENT,
    engine_request,
    for_decode,
    for_prefill,
    refusal_in,
    refusal_of,
)
from serving.replicas.pending_answer import PendingAnswer
from serving.replicas.remote_prefill import PrefillHandles, RemotePrefill, prefill_remotely
from serving.request.prefill_eligibility import may_be_short, must_be_local, short_enough
from serving.request.retry import RETRY_AFTER_S, LocalPrefill, late_first_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from serving.protocol.endpoint_config import EndpointConfig

AGGREGATED = LocalPrefill(path="local", reason="aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineCall:
    """A request as this server's engine gets it; `limit_s` is for the first token."""

    request: Any
    limit_s: float
    prefill_s: float
    prefill: RemotePrefill | LocalPrefill

    def phases(self, decode_s: float) -> RequestPhases:
        """Return the phases of the time to first token."""
        decode = serve.get_replica_context().replica_id.unique_id
        if isinstance(self.prefill, LocalPrefill):
            return RequestPhases(
                prefill_s=self.prefill_s,
                decode_s=decode_s,
                path=self.prefill.path,
                reason=self.prefill.reason,
                decode_replica=decode,
            )
        failures, done = self.prefill.failures, self.prefill.prefilled
        return RequestPhases(
            prefill_s=self.prefill_s,
            decode_s=decode_s,
            path="retried" if failures else "remote",
            reason=failures[-1] if failures else "",
            prefill_replica=done.replica,
            decode_replica=decode,
            prefill_queue_s=done.queue_s,
            prefill_step_s=done.step_s,
        )


class GenerationMixin:
    """The answering part of decode servers and of the servers of aggregated plans."""

    engine: Any
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
        answer = PendingAnswer(
            getattr(self.engine, kind)(call.request, None),
            has_first_token=None if call.request.stream else self._sees_token(kind, call.request),
            in_flight=isinstance(call.prefill, RemotePrefill),
        )
        try:
            started = time.perf_counter()
            came = await _first_token(answer, call.limit_s, config)
            if isinstance(came, Refusal):
                yield came
                return
            first = await _first_piece(answer)
            yield FirstChunk(phases=call.phases(came - started), first=first)
            async for event in answer.stream:
                yield [_checked(event)]
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
        request = engine_request(kind, body)
        if isinstance(request, Refusal):
            return request
        started = time.perf_counter()
        prefill = await self._prefill(kind, body, request, config)
        if isinstance(prefill, Refusal):
            return prefill
        prefill_s = time.perf_counter() - started
        if isinstance(prefill, RemotePrefill):
            decode = for_decode(request, prefill.prefilled)
            limit_s = config.kv_wait_deadline_s
            return _EngineCall(
                request=decode, limit_s=limit_s, prefill_s=prefill_s, prefill=prefill
            )
        limit_s = config.prefill_deadline_s + config.kv_wait_deadline_s - prefill_s
        if body.get("use_beam_search"):
            limit_s = float("inf")  # its first token is its last: the endpoint's limit applies
        return _EngineCall(request=request, limit_s=limit_s, prefill_s=prefill_s, prefill=prefill)

    async def _prefill(
        self,
        kind: str,
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
            tokens = await prompt_tokens(self.engine, kind, request)
            local = None if tokens is None else short_enough(tokens, threshold)
        if local is not None:
            return local
        return await prefill_remotely(self._prefill_pool, kind, for_prefill(request), config)

    def _sees_token(self, kind: str, request: Any) -> Callable[[], bool]:  # noqa: ANN401
        return lambda: first_token_seen(self.engine, kind, request.request_id)


async def _first_token(
    answer: PendingAnswer, limit_s: float, config: EndpointConfig
) -> float | Refusal:
    """Return when the first token came, or the client's error."""
    try:
        await answer.first_token(limit_s)
        at = time.perf_counter()
        failed = _error_in(await answer.first_item()) if answer.done else None
    except TimeoutError:
        return late_first_token(config.kv_wait_deadline_s)
    except EngineDeadError:
        message = "The engine died; try again later."
        return Refusal(status=503, message=message, code="engine-died", retry_after_s=RETRY_AFTER_S)
    return failed or at


async def _first_piece(answer: PendingAnswer) -> list[str] | dict[str, Any]:
    """Return the first event, or the whole answer; raises EngineFailed for an error."""
    first = await answer.first_item()
    if _error_in(first) is not None:
        raise EngineFailed(str(first))
    if isinstance(first, str):
        return [first]
    whole: dict[str, Any] = first.model_dump()
    return whole


def _checked(event: str) -> str:
    if event.startswith(ERROR_EVENT):
        raise EngineFailed(event)
    return event


def _error_in(item: Any) -> Refusal | None:  # noqa: ANN401
    """Return the refusal that an engine's answer, or its first event, is; `None`: it is none."""
    if isinstance(item, str):
        return refusal_in(item) if item.startswith(ERROR_EVENT) else None
    return None if hasattr(item, "usage") else refusal_of(item)
