"""The two servers of a split deployment: prefill fills the KV cache, decode fetches it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.llm.deployment import PDDecodeServer, PDPrefillServer
from ray.serve.llm.openai_api_models import CompletionRequest

from serving.cluster.serve_compat import broadcast, keep_log
from serving.protocol.app_spec import CORES, planned_cores
from serving.protocol.backend import EngineFailed
from serving.protocol.endpoint_config import front_from
from serving.protocol.phases import Prefilled, PrefillTiming, RequestPhases
from serving.protocol.refusal import Refusal
from serving.protocol.request_policy import order_of
from serving.replicas.end_with_replica import REPLICA
from serving.replicas.engine_compat import engine_is_dead, skip_download
from serving.replicas.engine_facts import engine_facts
from serving.replicas.engine_request import engine_request, for_decode, for_prefill, refusal_of
from serving.replicas.generation import Answering
from serving.replicas.prefill_handles import PrefillHandles

if TYPE_CHECKING:
    from serving.replicas.pending_answer import PendingAnswer

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""How often a replica looks whether its engine lives."""

LAST_WORDS_S = 1.0
"""How long a replica without an engine still tells its clients so."""

FETCHED_S = 0.2
"""How often a prefill replica that leaves looks whether its KV caches have been fetched."""


class Planned:
    """
    What replicas of all pools do alike.

    Ray Serve calls `reconfigure` with what the front door knows of the plan
    (`serving.protocol.endpoint_config`) when
    a replica has started, and again when another plan is laid over the same engines.
    """

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Take the planned cores, then start the engine."""
        keep_log()
        _take_planned_cores()
        _sample_without_compiling()
        os.environ[REPLICA] = str(os.getpid())
        self._closing: dict[asyncio.Task[None], PendingAnswer] = {}
        await super().__init__(llm_config, **kwargs)  # type: ignore[call-arg, misc]
        self._watch = asyncio.create_task(self._end_with_the_engine())

    async def _start_engine(self) -> None:
        """
        Start the engine, and nothing else.

        Ray would also start an agent that reports usage, and a task that looks for model files to
        download: 8 s and 0.6 GB each, for importing the engine once more.
        """
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            skip_download(self._llm_config)  # type: ignore[attr-defined]
        await self.engine.start()  # type: ignore[attr-defined]

    async def _end_with_the_engine(self) -> None:
        """
        End this process when its engine has died.

        Ray Serve would notice after three failed health checks and send it requests until then,
        all the more as it fails them so fast.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if engine_is_dead(self.engine):  # type: ignore[attr-defined]
                logger.error("the engine died; this replica ends, Ray Serve starts another")
                await asyncio.sleep(LAST_WORDS_S)
                os._exit(1)

    async def facts(self) -> dict[str, Any]:
        """Return what this replica really runs with."""
        return engine_facts(self)

    async def kv_is_free(self) -> bool:
        """Tell whether no request holds KV cache; what is cached of earlier ones is dropped."""
        return bool(await self.engine._engine_client.reset_prefix_cache())  # type: ignore[attr-defined]  # noqa: SLF001


class SplitPrefillServer(Planned, PDPrefillServer):  # type: ignore[misc]
    """A prefill engine on its planned cores."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Start the engine."""
        self._kept_until_s = 0.0
        await super().__init__(llm_config, **kwargs)

    def reconfigure(self, front: dict[str, Any]) -> None:
        """Take the deadline until which decode may fetch a KV cache from the plan."""
        self._kv_deadline_s = front_from(front).kv_wait_deadline_s

    async def __del__(self) -> None:
        """
        Stay until what was prefilled last has been fetched, or its deadline has passed.

        Ray Serve waits for this once a leaving replica has no requests, and gets no more. That a
        prompt is prefilled ends its request here, not what decode does with it.
        """
        while time.monotonic() < self._kept_until_s:
            if await self.kv_is_free():
                break
            await asyncio.sleep(FETCHED_S)
        await super().__del__()

    async def prefill(
        self,
        kind: str,
        request: Any,  # noqa: ANN401
        *,
        asked: object = None,  # noqa: ARG002
    ) -> Prefilled | Refusal:
        """
        Compute the KV cache of a prompt and keep it until decode has fetched it.

        Args:
            kind: `chat` or `completions`.
            request: vLLM's, from `serving.replicas.engine_request.for_prefill`.
            asked: replicas that had it; for the router, which leaves them out.
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
        Run a request of one token; return the engine's answer, or why there is none.

        Raises:
            EngineFailed: as in `Answering.answer`, instead of an exception of vLLM's.
        """
        async with aclosing(getattr(self.engine, kind)(request, None)) as answers:
            try:
                answer = await anext(answers)
            except Exception as error:
                raise EngineFailed(repr(error)) from error
        return answer if hasattr(answer, "usage") else refusal_of(answer)


class SplitDecodeServer(Planned, Answering, PDDecodeServer):  # type: ignore[misc]
    """A decode engine on its planned cores; sends each request through prefill first."""

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

    def reconfigure(self, front: dict[str, Any]) -> None:
        """Take deadlines, fallback and pairing from the plan."""
        planned = front_from(front)
        self._order = order_of(planned)
        self._handles = {
            each: self._prefill_servers[each] for each in planned.pairing[self._domain]
        }
        self._reach = PrefillHandles(self._handles)

    async def probe(self, prompts: list[list[int]]) -> list[RequestPhases]:
        """
        Run one prompt through each prefill replica and this decode replica.

        Args:
            prompts: one for each prefill replica, all different: what a replica has cached it
                does not fetch.
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
            raise RuntimeError(f"of {len(requests)} prefill replicas not all answered: {failed}")
        phases = []
        for request, prefilled in zip(requests, answers, strict=True):
            handed_over = time.perf_counter()
            answer = await anext(aiter(self.engine.completions(for_decode(request, prefilled))))
            if not hasattr(answer, "usage"):
                raise RuntimeError(str(answer))
            handoff_s = time.perf_counter() - handed_over
            phases.append(RequestPhases(prefill_s=prefill_s, handoff_s=handoff_s))
        return phases


def _sample_without_compiling() -> None:
    """
    Have a CPU engine sample as its code stands.

    vLLM compiles what draws a token, and what ranks log-probabilities, when the first request asks
    for it, whatever `enforce_eager` says: seconds on an idle machine, a minute on a busy one, for
    microseconds, and everybody waits.
    """
    if os.environ.get(CORES):
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def _take_planned_cores() -> None:
    """Tell vLLM, which this process starts, the cores of this replica of the plan."""
    if os.environ.get(CORES):
        rank = serve.get_replica_context().rank.rank
        labels = ray.get_runtime_context().get_node_labels()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = planned_cores(os.environ[CORES], rank, labels)
