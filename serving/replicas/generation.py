"""Answering: a server answers with its own engine, wherever the prompt was computed."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.cluster.serve_compat import call_replicas, live_replica_ids
from serving.protocol.endpoint_config import from_plain
from serving.protocol.messages import (
    EngineFailed,
    FirstChunk,
    LocalPrefill,
    Refusal,
    RemotePrefill,
    RequestPhases,
    message_in,
)
from serving.replicas.call_listener import whole
from serving.replicas.pending_answer import PendingAnswer
from serving.replicas.roles import EngineServer
from serving.request.prefill import PULL_FAILED, late
from serving.request.usage import EventSplitter, with_usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from serving.replicas.call_listener import Method, ServedCall

PROBE = LocalPrefill(reason="probe")

PROBE_POLL_S = 0.1
"""Interval at which a probe looks whether the prefill replicas are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineCall:
    """A request as this server's engine gets it; `limit_s` is for the first token."""

    request: Any
    limit_s: float
    prefill: RemotePrefill | LocalPrefill

    def phases(self, decode_s: float, *, lost: bool = False) -> RequestPhases:
        """Return the phases of the time to first token; *lost*: its KV cache was, on its way."""
        here = serve.get_replica_context().replica_id.unique_id
        prefill = self.prefill
        if lost and isinstance(prefill, RemotePrefill):
            prefill = LocalPrefill(
                path="fallback-local", reason=PULL_FAILED, seconds=prefill.seconds
            )
        if isinstance(prefill, LocalPrefill):
            return RequestPhases(
                prefill_s=prefill.seconds,
                decode_s=decode_s,
                decode_replica=here,
                path=prefill.path,
                reason=prefill.reason,
            )
        failures, done = prefill.failures, prefill.prefilled
        return RequestPhases(
            prefill_s=prefill.seconds,
            decode_s=decode_s,
            decode_replica=here,
            path="retried" if failures else "remote",
            reason=failures[-1] if failures else "",
            prefill_replica=done.replica,
            prefill_queue_s=done.queue_s,
            prefill_step_s=done.step_s,
        )


class AnswerRole(EngineServer):
    """Answers requests: the decode engine of a split plan, or the mixed one of another."""

    def called(self) -> dict[str, Method]:
        """Return what may be called through a channel, by name."""
        counts = whole(self.prompt_tokens)
        return super().called() | {"answer": self.answer, "prompt_tokens": counts}

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take the deadlines from the plan."""
        self._config = from_plain(config)

    async def answer(
        self, call: ServedCall, kind: str, body: dict[str, Any], prefill: dict[str, Any]
    ) -> Refusal | FirstChunk | None:
        """
        Answer a request.

        Args:
            call: gets the phases with the first events of a stream, then the others as they come.
            kind: `chat` or `completions`.
            body: a request that `serving.request.validation.check` accepted.
            prefill: a message: where its prompt was computed, or that this server computes it.

        Returns:
            A refusal, or the phases with the whole answer; `None`: it was streamed.

        Raises:
            EngineFailed: the engine failed, usually after the first token.
        """
        counted = with_usage(body)
        async with aclosing(self.events(kind, counted, message_in(prefill))) as items:
            begun = await anext(items)
            if isinstance(begun, Refusal):
                return begun
            phases, first = begun
            if not isinstance(first, list):
                return FirstChunk(phases=phases, first=first)
            splitter = EventSplitter(keeps_usage=counted is body)
            call.begin(FirstChunk(phases=phases, first=splitter.tokens(first)))
            async for events in items:
                call.events(splitter.tokens(events).encode())
                if call.must_wait:
                    await call.room()
            call.end(usage=splitter.usage, text=splitter.ending)
            return None

    async def events(
        self, kind: str, body: dict[str, Any], prefill: RemotePrefill | LocalPrefill
    ) -> AsyncGenerator[Any, None]:
        """
        Compute the answer of a request; errors as of `answer`, whose arguments these are.

        Yields:
            A refusal; or the phases with the whole answer or with the first events of a stream,
            and then lists of events as they come.
        """
        call = self._engine_call(kind, body, prefill)
        if isinstance(call, Refusal):
            yield call
            return
        seen = partial(self.answers.first_token_seen, call.request)
        answer = PendingAnswer(
            self.answers.answer(call.request),
            has_first_token=None if call.request.stream else seen,
            in_flight=isinstance(prefill, RemotePrefill),
        )
        try:
            started = time.perf_counter()
            try:
                await answer.first_token(call.limit_s)
            except TimeoutError:
                yield late("kv-wait-timeout", self._config.kv_wait_deadline_s)
                return
            first_token_s = time.perf_counter() - started
            first = await answer.first_item()
            if isinstance(first, Refusal):
                yield first
                return
            lost = self.answers.pull_failed(call.request)
            yield call.phases(first_token_s, lost=lost), first
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

    def _engine_call(
        self, kind: str, body: dict[str, Any], prefill: RemotePrefill | LocalPrefill
    ) -> _EngineCall | Refusal:
        config = self._config
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal):
            return request
        if isinstance(prefill, RemotePrefill):
            request = self.answers.for_decode(request, prefill.prefilled)
            limit_s = config.kv_wait_deadline_s
        elif body.get("use_beam_search"):
            limit_s = math.inf  # its first token is its last: the endpoint's limit applies
        else:
            limit_s = config.prefill_deadline_s + config.kv_wait_deadline_s - prefill.seconds
        return _EngineCall(request=request, limit_s=limit_s, prefill=prefill)

    async def prompt_tokens(self, kind: str, body: dict[str, Any]) -> int | None:
        """Return the tokens of a request's prompt; `None`: the engine refuses the request."""
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal):
            return None
        return await self.answers.prompt_tokens(request)

    async def probe(self, prompts: list[list[int]], prefill: Sequence[Any]) -> list[RequestPhases]:
        """
        Run one prompt through each prefill replica and this one.

        Args:
            prompts: one for each prefill replica, all different, because a cached prompt is not
                fetched; without any prefill replica, one.
            prefill: handles of the prefill pools.

        Raises:
            RuntimeError: a replica refused its prompt.
        """
        bodies = [{"prompt": prompt, "max_tokens": 2} for prompt in prompts]
        waiting = iter(bodies)
        started = time.perf_counter()
        places: list[RemotePrefill | LocalPrefill] = []
        for handle in prefill:
            while live_replica_ids(handle) is None:  # noqa: ASYNC110  (there is no event for it)
                await asyncio.sleep(PROBE_POLL_S)
            calls = call_replicas(handle, "prefill", lambda: ["completions", next(waiting)])
            answers = await asyncio.gather(*calls)
            failed = [each for each in answers if isinstance(each, Refusal)]
            if failed:
                raise RuntimeError(f"a prefill replica refused its probe: {failed[0].message}")
            seconds = time.perf_counter() - started
            places += [RemotePrefill(prefilled=each, seconds=seconds) for each in answers]
        places = places or [PROBE]
        if len(places) != len(bodies):
            raise RuntimeError(f"{len(places)} of {len(bodies)} prefill replicas answered")
        return [await self._probed(*each) for each in zip(bodies, places, strict=True)]

    async def _probed(
        self, body: dict[str, Any], prefill: RemotePrefill | LocalPrefill
    ) -> RequestPhases:
        """Return the phases of a whole answer; all of it counts as its first token."""
        call = self._engine_call("completions", body, prefill)
        if isinstance(call, Refusal):
            raise RuntimeError(call.message)  # noqa: TRY004  (an answer, not a wrong argument)
        started = time.perf_counter()
        answer = await anext(self.answers.answer(call.request))
        if isinstance(answer, Refusal):
            raise RuntimeError(answer.message)  # noqa: TRY004
        return call.phases(time.perf_counter() - started)

    async def check_health(self) -> None:
        """Fail Ray Serve's health check, which replaces this replica, if KV transfers are lost."""
        stuck = sum(answer.stuck for answer in self._closing.values())
        if stuck:
            raise RuntimeError(f"{stuck} KV transfers do not end; only a new engine frees them")
        await super().check_health()  # type: ignore[misc]
