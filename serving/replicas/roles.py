"""The servers of the pools by role, with any engine: prefill, decode, and both."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.cluster.serve_compat import broadcast
from serving.protocol.endpoint_config import from_plain
from serving.protocol.messages import Prefilled, PrefillTiming, Refusal, RequestPhases
from serving.replicas.generation import GenerationMixin
from serving.replicas.remote_prefill import PrefillHandles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.answer_engine import AnswerEngine
    from serving.replicas.pending_answer import PendingAnswer

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Interval at which a replica checks that its engine is alive."""

EXIT_DELAY_S = 1.0
"""Time that a replica without an engine has to answer its clients before it exits."""

FETCH_POLL_S = 0.2
"""Interval at which a draining prefill replica checks whether its KV caches have been fetched."""


class EngineServer:
    """
    The common part of the servers of all roles.

    Ray Serve calls `reconfigure` with the endpoint's configuration
    (`serving.protocol.endpoint_config`) when a replica has started, and again when another plan is
    deployed over the same engines.
    """

    answers: AnswerEngine

    def watch(self) -> None:
        """Begin to watch the engine."""
        self._closing: dict[asyncio.Task[None], PendingAnswer] = {}
        self._watch = asyncio.create_task(self._exit_with_engine())

    async def _exit_with_engine(self) -> None:
        """
        Exit this process when its engine has died.

        Ray Serve would notice after three failed health checks and send it requests until then,
        more than its share, because it fails them at once.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if self.answers.died():
                logger.error("the engine died; this replica exits, Ray Serve starts another")
                await asyncio.sleep(EXIT_DELAY_S)
                os._exit(1)

    async def facts(self) -> dict[str, Any]:
        """Return the settings of this replica's engine, asked of the engine itself."""
        return self.answers.facts()

    async def kv_is_free(self) -> bool:
        """Return whether no request holds KV cache; drops the prefix cache of earlier ones."""
        return await self.answers.kv_is_free()

    async def _answer_s(self, request: Any) -> float:  # noqa: ANN401
        """Return the seconds of a whole answer; raises RuntimeError if the engine refuses it."""
        started = time.perf_counter()
        answer = await anext(self.answers.answer(request))
        if isinstance(answer, Refusal):
            raise RuntimeError(answer.message)  # noqa: TRY004  (an answer, not a wrong argument)
        return time.perf_counter() - started

    def _probe_request(self, prompt: list[int]) -> Any:  # noqa: ANN401
        return self.answers.read("completions", {"prompt": prompt, "max_tokens": 2})


class PrefillRole(EngineServer):
    """Computes prompts, and keeps their KV caches until decode has fetched them."""

    _kept_until_s = 0.0

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take from the plan the deadline until which decode may fetch a KV cache."""
        self._kv_deadline_s = from_plain(config).kv_wait_deadline_s

    async def drain(self) -> None:
        """
        Wait until the last KV cache has been fetched, or its deadline has passed.

        A prefilled prompt has no request here any more, while decode still fetches its KV cache.
        """
        while time.monotonic() < self._kept_until_s:
            if await self.kv_is_free():
                break
            await asyncio.sleep(FETCH_POLL_S)

    async def prefill(
        self,
        request: Any,  # noqa: ANN401
        *,
        tried: object = None,  # noqa: ARG002
    ) -> Prefilled | Refusal:
        """
        Compute the KV cache of a prompt and keep it until decode has fetched it.

        Args:
            request: the engine's, from `AnswerEngine.for_prefill`.
            tried: replicas that failed to prefill it; read by the router, which excludes them.

        Raises:
            EngineFailed: the engine failed.
        """
        computed = await self.answers.compute(request, keep=True)
        self._kept_until_s = time.monotonic() + self._kv_deadline_s
        if isinstance(computed, Refusal):
            return computed
        return Prefilled(
            kv_transfer_params=dict(computed.kv_transfer_params),
            replica=serve.get_replica_context().replica_id.unique_id,
            queue_s=computed.queue_s,
            step_s=computed.step_s,
        )

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a completion's prompt without handing its KV cache on, and time it."""
        started = time.perf_counter()
        request = self.answers.read("completions", {**body, "max_tokens": 1, "stream": False})
        if isinstance(request, Refusal):
            return request
        computed = await self.answers.compute(request, keep=False)
        if isinstance(computed, Refusal):
            return computed
        return PrefillTiming(
            prompt_tokens=computed.prompt_tokens,
            seconds=time.perf_counter() - started,
            queue_s=computed.queue_s,
            step_s=computed.step_s,
        )


class DecodeRole(GenerationMixin, EngineServer):
    """Has each prompt computed by the prefill pool, and answers."""

    def take_pools(self, prefill_servers: Mapping[str, Any], domain: str) -> None:
        """Keep the handles of all prefill pools, by domain, and this pool's own domain."""
        self._prefill_servers = prefill_servers
        self._domain = domain

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take deadlines, routing and pairing from the plan."""
        self._config = from_plain(config)
        self._handles = {
            each: self._prefill_servers[each] for each in self._config.pairing[self._domain]
        }
        self._prefill_pool = PrefillHandles(self._handles)

    async def probe(self, prompts: list[list[int]]) -> list[RequestPhases]:
        """
        Run one prompt through each prefill replica and this decode replica.

        Args:
            prompts: one for each prefill replica, all different, because a cached prompt is not
                fetched.
        """
        requests = [self._probe_request(prompt) for prompt in prompts]
        waiting = iter(requests)
        started = time.perf_counter()
        answers = [
            answer
            for handle in self._handles.values()
            for answer in await asyncio.to_thread(
                broadcast,
                handle,
                "prefill",
                lambda _replica: [self.answers.for_prefill(next(waiting))],
            )
        ]
        prefill_s = time.perf_counter() - started
        failed = [answer for answer in answers if isinstance(answer, Refusal)]
        if len(answers) != len(requests) or failed:
            raise RuntimeError(f"not all of {len(requests)} prefill replicas answered: {failed}")
        phases = []
        for request, prefilled in zip(requests, answers, strict=True):
            decode_s = await self._answer_s(self.answers.for_decode(request, prefilled))
            phases.append(RequestPhases(prefill_s=prefill_s, decode_s=decode_s))
        return phases


class MixedRole(GenerationMixin, EngineServer):
    """Answers alone: one engine does prefill and decode, and no KV cache moves."""

    _prefill_pool = None

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take the deadlines from the plan."""
        self._config = from_plain(config)

    async def probe(self, prompts: list[list[int]]) -> list[RequestPhases]:
        """Run each prompt here, one after the other."""
        phases = []
        for prompt in prompts:
            seconds = await self._answer_s(self._probe_request(prompt))
            phases.append(RequestPhases(prefill_s=seconds, decode_s=0.0))
        return phases
