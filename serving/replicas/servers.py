"""The servers of the pools: prefill and decode of a split plan, mixed of an aggregated one."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.llm.deployment import LLMServer, PDDecodeServer, PDPrefillServer
from ray.serve.llm.openai_api_models import CompletionRequest

from serving.cluster.serve_compat import broadcast, keep_log_open
from serving.protocol.app_spec import CORES, planned_cores
from serving.protocol.endpoint_config import from_plain
from serving.protocol.messages import EngineFailed, Prefilled, PrefillTiming, Refusal, RequestPhases
from serving.replicas.engine_compat import engine_facts, engine_is_dead, skip_download
from serving.replicas.engine_request import engine_request, for_decode, for_prefill, refusal_in
from serving.replicas.generation import GenerationMixin
from serving.replicas.remote_prefill import PrefillHandles
from serving.replicas.vllm_plugin import REPLICA

if TYPE_CHECKING:
    from serving.replicas.pending_answer import PendingAnswer

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Interval at which a replica checks that its engine is alive."""

EXIT_DELAY_S = 1.0
"""Time that a replica without an engine has to answer its clients before it exits."""

FETCH_POLL_S = 0.2
"""Interval at which a draining prefill replica checks whether its KV caches have been fetched."""


class PlannedServer:
    """
    The common part of the servers of all pools.

    Ray Serve calls `reconfigure` with the endpoint's configuration
    (`serving.protocol.endpoint_config`) when a replica has started, and again when another plan is
    deployed over the same engines.
    """

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Take the planned cores, then start the engine."""
        keep_log_open()
        _prepare_cpu_engine()
        os.environ[REPLICA] = str(os.getpid())
        self._closing: dict[asyncio.Task[None], PendingAnswer] = {}
        await super().__init__(llm_config, **kwargs)  # type: ignore[call-arg, misc]
        self._watch = asyncio.create_task(self._exit_with_engine())

    async def _start_engine(self) -> None:
        """
        Start the engine, and nothing else.

        Ray would also start an agent that reports usage and a task that downloads model files: 8 s
        and 0.6 GB each, because each imports the engine again.
        """
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            skip_download(self._llm_config)  # type: ignore[attr-defined]
        await self.engine.start()  # type: ignore[attr-defined]

    async def _exit_with_engine(self) -> None:
        """
        Exit this process when its engine has died.

        Ray Serve would notice after three failed health checks and send it requests until then,
        more than its share, because it fails them at once.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if engine_is_dead(self.engine):  # type: ignore[attr-defined]
                logger.error("the engine died; this replica exits, Ray Serve starts another")
                await asyncio.sleep(EXIT_DELAY_S)
                os._exit(1)

    async def facts(self) -> dict[str, Any]:
        """Return the settings of this replica's engine, asked of the engine itself."""
        return engine_facts(self)

    async def kv_is_free(self) -> bool:
        """Return whether no request holds KV cache; drops the prefix cache of earlier ones."""
        return bool(await self.engine._engine_client.reset_prefix_cache())  # type: ignore[attr-defined]  # noqa: SLF001

    async def _answer_s(self, request: Any) -> float:  # noqa: ANN401
        """Return the seconds of a completion; raises RuntimeError if the engine refuses it."""
        started = time.perf_counter()
        answer = await anext(aiter(self.engine.completions(request, None)))  # type: ignore[attr-defined]
        if refusal_in(answer) is not None:
            raise RuntimeError(str(answer))
        return time.perf_counter() - started


class SplitPrefillServer(PlannedServer, PDPrefillServer):  # type: ignore[misc]
    """A prefill engine on its planned cores."""

    _kept_until_s = 0.0

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Take from the plan the deadline until which decode may fetch a KV cache."""
        self._kv_deadline_s = from_plain(config).kv_wait_deadline_s

    async def __del__(self) -> None:
        """
        Wait until the last KV cache has been fetched, or its deadline has passed.

        Ray Serve awaits this once a draining replica has no requests and gets no more. A prefilled
        prompt has no request here any more, while decode still fetches its KV cache.
        """
        while time.monotonic() < self._kept_until_s:
            if await self.kv_is_free():
                break
            await asyncio.sleep(FETCH_POLL_S)
        await super().__del__()

    async def prefill(
        self,
        kind: str,
        request: Any,  # noqa: ANN401
        *,
        tried: object = None,  # noqa: ARG002
    ) -> Prefilled | Refusal:
        """
        Compute the KV cache of a prompt and keep it until decode has fetched it.

        Args:
            kind: `chat` or `completions`.
            request: vLLM's, from `serving.replicas.engine_request.for_prefill`.
            tried: replicas that failed to prefill it; read by the router, which excludes them.
        """
        answer = await self._one_token(kind, request)
        self._kept_until_s = time.monotonic() + self._kv_deadline_s
        if isinstance(answer, Refusal):
            return answer
        timed = answer.metrics
        return Prefilled(
            kv_transfer_params=answer.kv_transfer_params,
            replica=serve.get_replica_context().replica_id.unique_id,
            queue_s=(timed.queue_time_ms or 0.0) / 1e3 if timed else 0.0,
            step_s=(timed.time_to_first_token_ms or 0.0) / 1e3 if timed else 0.0,
        )

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a completion's prompt without handing its KV cache on, and time it."""
        started = time.perf_counter()
        request = engine_request("completions", {**body, "max_tokens": 1, "stream": False})
        if isinstance(request, Refusal):
            return request
        request.min_tokens, request.temperature = 0, 0.0
        answer = await self._one_token("completions", request)
        if isinstance(answer, Refusal):
            return answer
        return PrefillTiming(
            prompt_tokens=answer.usage.prompt_tokens,
            seconds=time.perf_counter() - started,
            queue_s=answer.metrics.queue_time_ms / 1e3,
            step_s=answer.metrics.time_to_first_token_ms / 1e3,
        )

    async def _one_token(self, kind: str, request: Any) -> Any:  # noqa: ANN401
        """
        Run a request of one token; return the engine's answer, or its refusal.

        Raises:
            EngineFailed: as in `GenerationMixin.answer`, instead of an exception of vLLM's.
        """
        async with aclosing(getattr(self.engine, kind)(request, None)) as answers:
            try:
                answer = await anext(answers)
            except Exception as error:
                raise EngineFailed(repr(error)) from error
        return refusal_in(answer) or answer


class SplitDecodeServer(PlannedServer, GenerationMixin, PDDecodeServer):  # type: ignore[misc]
    """A decode engine on its planned cores; has each prompt prefilled by the prefill pool."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: Any,  # noqa: ANN401
        *,
        prefill_servers: dict[str, Any],
        domain: str,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Keep the handles of all prefill pools, by domain, and this pool's own domain."""
        self._prefill_servers = prefill_servers
        self._domain = domain
        await super().__init__(llm_config, **kwargs)

    def reconfigure(self, config: dict[str, Any]) -> None:
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
        model = self._llm_config.model_id
        requests = [CompletionRequest(model=model, prompt=p, max_tokens=2) for p in prompts]
        waiting = iter(requests)
        started = time.perf_counter()
        answers = [
            answer
            for handle in self._handles.values()
            for answer in await asyncio.to_thread(
                broadcast,
                handle,
                "prefill",
                lambda _replica: ["completions", for_prefill(next(waiting))],
            )
        ]
        prefill_s = time.perf_counter() - started
        failed = [answer for answer in answers if isinstance(answer, Refusal)]
        if len(answers) != len(requests) or failed:
            raise RuntimeError(f"not all of {len(requests)} prefill replicas answered: {failed}")
        phases = []
        for request, prefilled in zip(requests, answers, strict=True):
            decode_s = await self._answer_s(for_decode(request, prefilled))
            phases.append(RequestPhases(prefill_s=prefill_s, decode_s=decode_s))
        return phases


class MixedServer(PlannedServer, GenerationMixin, LLMServer):  # type: ignore[misc]
    """The server of an aggregated plan: one engine does prefill and decode, no KV cache moves."""

    _prefill_pool = None

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Take the deadlines from the plan."""
        self._config = from_plain(config)

    async def probe(self, prompts: list[list[int]]) -> list[RequestPhases]:
        """Run each prompt here, one after the other."""
        phases = []
        for prompt in prompts:
            request = CompletionRequest(
                model=self._llm_config.model_id, prompt=prompt, max_tokens=2
            )
            phases.append(RequestPhases(prefill_s=await self._answer_s(request), decode_s=0.0))
        return phases


def _prepare_cpu_engine() -> None:
    """
    Set the planned cores for vLLM, which this process starts, and disable torch.compile.

    vLLM compiles token sampling and the ranking of log-probabilities at the first request that
    uses them, whatever `enforce_eager` says: seconds on an idle machine, a minute on a busy one,
    for microseconds, while all requests wait.
    """
    if os.environ.get(CORES):
        rank = serve.get_replica_context().rank.rank
        labels = ray.get_runtime_context().get_node_labels()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = planned_cores(os.environ[CORES], rank, labels)
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
