"""How a server answers a request with its own engine, wherever the prompt is computed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from vllm.v1.engine.exceptions import EngineDeadError

from serving.protocol.backend import EngineFailed
from serving.protocol.phases import FirstChunk, RequestPhases
from serving.protocol.refusal import Refusal
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
from serving.replicas.remote_prefill import PrefillPool, Remote, prefill_elsewhere
from serving.request.prefill_eligibility import may_be_short, must_be_local, short_enough
from serving.request.retry import RETRY_AFTER_S, Local, late_first_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from serving.protocol.request_policy import RequestPolicy

AGGREGATED = Local(path="local", reason="aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """How a request begins at its engine; `limit_s` is for the first token."""

    request: Any
    limit_s: float
    prefill_s: float
    way: Remote | Local

    def phases(self, handoff_s: float) -> RequestPhases:
        """Return where the time to the first token went."""
        decode = serve.get_replica_context().replica_id.unique_id
        if isinstance(self.way, Local):
            return RequestPhases(
                prefill_s=self.prefill_s,
                handoff_s=handoff_s,
                path=self.way.path,
                reason=self.way.reason,
                decode_replica=decode,
            )
        failures, done = self.way.failures, self.way.prefilled
        return RequestPhases(
            prefill_s=self.prefill_s,
            handoff_s=handoff_s,
            path="retried" if failures else "remote",
            reason=failures[-1] if failures else "",
            prefill_replica=done.replica,
            decode_replica=decode,
            prefill_queue_s=done.queue_s,
            prefill_step_s=done.step_s,
        )


class Answering:
    """What the servers have in common that answer: those that decode, and aggregated ones."""

    engine: Any
    _order: RequestPolicy
    _reach: PrefillPool | None
    _closing: dict[asyncio.Task[None], PendingAnswer]

    async def answer(
        self, kind: str, body: dict[str, Any], *, order: RequestPolicy | None = None
    ) -> AsyncIterator[Refusal | FirstChunk | list[str]]:
        """
        Prefill elsewhere or here, decode here.

        Args:
            kind: `chat` or `completions`.
            body: what `serving.request.validation.check` let through.
            order: what to keep to; default: the plan's.

        Yields:
            A refusal; or the phases with the first token, or with the whole answer; then
            server-sent events as they come.

        Raises:
            EngineFailed: it did, after the first token as a rule.
        """
        start = await self._start(kind, body, order or self._order)
        if isinstance(start, Refusal):
            yield start
            return
        answer = PendingAnswer(
            getattr(self.engine, kind)(start.request, None),
            begun=None if start.request.stream else self._begun(kind, start.request),
            in_flight=isinstance(start.way, Remote),
        )
        try:
            started = time.perf_counter()
            came = await _first_token(answer, start.limit_s, order or self._order)
            if isinstance(came, Refusal):
                yield came
                return
            first = await _first_piece(answer)
            yield FirstChunk(phases=start.phases(came - started), first=first)
            async for event in answer.stream:
                yield [_checked(event)]
        except EngineFailed:
            raise
        except Exception as error:
            # None of vLLM's may leave: who reads it would import vLLM, seconds in which the front
            # door answers nobody, and half a gigabyte.
            raise EngineFailed(repr(error)) from error
        finally:
            # A task of its own: this one may be cancelled, and has no time for it.
            closing = asyncio.create_task(answer.let_go())
            self._closing[closing] = answer
            closing.add_done_callback(self._closing.pop)

    async def check_health(self) -> None:
        """Tell Ray Serve to replace this replica if KV cache is held for what never arrives."""
        stuck = sum(answer.stuck for answer in self._closing.values())
        if stuck:
            raise RuntimeError(f"{stuck} KV transfers do not end; only a new engine frees them")
        await super().check_health()  # type: ignore[misc]

    async def _start(
        self, kind: str, body: dict[str, Any], order: RequestPolicy
    ) -> _Start | Refusal:
        """Decide the way of a request, and go it as far as this server's engine."""
        request = engine_request(kind, body)
        if isinstance(request, Refusal):
            return request
        started = time.perf_counter()
        way = await self._way(kind, body, request, order)
        if isinstance(way, Refusal):
            return way
        prefill_s = time.perf_counter() - started
        if isinstance(way, Remote):
            decode = for_decode(request, way.prefilled)
            limit_s = order.kv_wait_deadline_s
            return _Start(request=decode, limit_s=limit_s, prefill_s=prefill_s, way=way)
        limit_s = order.prefill_deadline_s + order.kv_wait_deadline_s - prefill_s
        if body.get("use_beam_search"):
            limit_s = float("inf")  # its first token is its last: the front door has a limit for it
        return _Start(request=request, limit_s=limit_s, prefill_s=prefill_s, way=way)

    async def _way(
        self,
        kind: str,
        body: dict[str, Any],
        request: Any,  # noqa: ANN401
        order: RequestPolicy,
    ) -> Remote | Local | Refusal:
        """Choose between prefill and this engine, and have prefill done if it is that."""
        if self._reach is None:
            return AGGREGATED
        local = must_be_local(body)
        if local is None and may_be_short(body, order.local_threshold_tokens):
            tokens = await prompt_tokens(self.engine, kind, request)
            local = None if tokens is None else short_enough(tokens, order.local_threshold_tokens)
        if local is not None:
            return local
        return await prefill_elsewhere(self._reach, kind, for_prefill(request), order)

    def _begun(self, kind: str, request: Any) -> Callable[[], bool]:  # noqa: ANN401
        """Return what tells whether the first token of a whole answer is there."""
        return lambda: first_token_seen(self.engine, kind, request.request_id)


async def _first_token(
    answer: PendingAnswer, limit_s: float, order: RequestPolicy
) -> float | Refusal:
    """Return when the first token came, or what the client gets instead of an answer."""
    try:
        await answer.first_token(limit_s)
        at = time.perf_counter()
        failed = _error_in(await answer.first_item()) if answer.done else None
    except TimeoutError:
        return late_first_token(order)
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
    """Return an event; raises EngineFailed for an error."""
    if event.startswith(ERROR_EVENT):
        raise EngineFailed(event)
    return event


def _error_in(item: Any) -> Refusal | None:  # noqa: ANN401
    """Return the error that an engine's answer, or its first event, is."""
    if isinstance(item, str):
        return refusal_in(item) if item.startswith(ERROR_EVENT) else None
    return None if hasattr(item, "usage") else refusal_of(item)
