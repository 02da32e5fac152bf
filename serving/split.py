"""The two servers of a split deployment: prefill fills the KV cache, decode fetches it."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve.llm.deployment import PDDecodeServer, PDPrefillServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMClientError

from serving.engine_facts import engine_facts
from serving.front import front_from
from serving.phases import Phases, PrefillTiming
from serving.ray_compat import broadcast, connector_backend, engine_stream, skip_download
from serving.requests import Refusal
from serving.served import CORES, planned_cores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SCHEMAS = {"chat": ChatCompletionRequest, "completions": CompletionRequest}


class Planned:
    """What replicas of both pools do alike."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Take the planned cores, then start the engine."""
        _take_planned_cores()
        self._closing: set[asyncio.Task[None]] = set()
        await super().__init__(llm_config, **kwargs)  # type: ignore[call-arg, misc]

    async def _start_engine(self) -> None:
        """
        Start the engine, and nothing else.

        Ray would also start an agent that reports usage, and a task that looks for model files to
        download: 8 s and 0.6 GB each, for importing the engine once more.
        """
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            skip_download(self._llm_config)  # type: ignore[attr-defined]
        await self.engine.start()  # type: ignore[attr-defined]

    async def facts(self) -> dict[str, Any]:
        """Return what this replica really runs with."""
        return engine_facts(self)


class SplitPrefillServer(Planned, PDPrefillServer):  # type: ignore[misc]
    """A prefill engine on its planned cores."""

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a completion's prompt without handing its KV cache on, and time it."""
        started = time.perf_counter()
        request = _request("completions", {**body, "max_tokens": 1, "stream": False})
        if isinstance(request, Refusal):
            return request
        request.min_tokens = 0
        answer = await anext(aiter(self.engine.completions(request, None)))
        if not hasattr(answer, "usage"):
            return _refusal_of(answer)
        return PrefillTiming(
            prompt_tokens=answer.usage.prompt_tokens,
            seconds=time.perf_counter() - started,
            queue_s=answer.metrics.queue_time_ms / 1e3,
            step_s=answer.metrics.time_to_first_token_ms / 1e3,
        )


class SplitDecodeServer(Planned, PDDecodeServer):  # type: ignore[misc]
    """A decode engine on its planned cores; sends each request through prefill first."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: Any,  # noqa: ANN401
        *,
        prefill_servers: dict[str, Any],
        domain: str,
        front: dict[str, Any],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Keep what the plan says: see `serving.front`."""
        self._front = front_from(front)
        self._prefill_handles = {
            each: prefill_servers[each].options(stream=True) for each in self._front.pairing[domain]
        }
        await super().__init__(llm_config, **kwargs)

    async def answer(
        self, kind: str, body: dict[str, Any]
    ) -> AsyncIterator[Refusal | Phases | list[str] | dict[str, Any]]:
        """
        Prefill elsewhere, decode here.

        Args:
            kind: `chat` or `completions`.
            body: what `serving.requests.check` let through.

        Yields:
            A refusal; or the phases of the first token, followed by server-sent events as they
            come, or by the whole answer.
        """
        request = _request(kind, body)
        if isinstance(request, Refusal):
            yield request
            return
        started = time.perf_counter()
        call = getattr(self._prefill_handle, kind)
        prefill = await anext(aiter(call.remote(self._for_prefill(request), None)))
        if not hasattr(prefill, "usage"):
            yield _refusal_of(prefill)
            return
        prefilled = time.perf_counter()
        decode = request.model_copy(update={"kv_transfer_params": prefill.kv_transfer_params})
        stream = await engine_stream(self, kind, decode)
        item = await self._first(stream)
        if not isinstance(item, list) and not hasattr(item, "usage"):
            yield _refusal_of(item)
            return
        yield Phases(prefill_s=prefilled - started, handoff_s=time.perf_counter() - prefilled)
        yield item if isinstance(item, list) else item.model_dump()
        async for events in stream:
            yield events

    async def probe(self, prompts: list[list[int]]) -> list[Phases]:
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
        answers = await asyncio.to_thread(
            broadcast,
            self._prefill_handle,
            "prewarm_prefill",
            lambda _replica: [self._for_prefill(next(waiting))],
        )
        prefill_s = time.perf_counter() - started
        if len(answers) != len(requests) or None in answers:
            raise RuntimeError(f"of {len(requests)} prefill replicas not all answered: {answers}")
        phases = []
        for request, params in zip(requests, answers, strict=True):
            decode = request.model_copy(update={"kv_transfer_params": params})
            handed_over = time.perf_counter()
            answer = await anext(aiter(self.engine.completions(decode, None)))
            if not hasattr(answer, "usage"):
                raise RuntimeError(str(answer))
            handoff_s = time.perf_counter() - handed_over
            phases.append(Phases(prefill_s=prefill_s, handoff_s=handoff_s))
        return phases

    def _for_prefill(self, request: Any) -> Any:  # noqa: ANN401
        """Return what prefill gets of *request*: its prompt, for one token that nobody reads."""
        prefill = connector_backend(self).prepare_prefill_request(request=request, peer=None)
        prefill.min_tokens = 0
        prefill.logprobs = None
        if isinstance(prefill, ChatCompletionRequest):
            prefill.logprobs, prefill.top_logprobs = False, None
        return prefill

    async def _first(self, stream: AsyncIterator[Any]) -> Any:  # noqa: ANN401
        """
        Wait for the first item of *stream*.

        A request given up while its blocks are in flight can bring the engine down (vllm #43226),
        so it is let run to its first token and closed then.
        """
        first = asyncio.ensure_future(anext(stream))
        try:
            return await asyncio.shield(first)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_close_after(first, stream))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise


async def _close_after(first: asyncio.Future[Any], stream: Any) -> None:  # noqa: ANN401
    """Close *stream* once its first item is there."""
    await asyncio.wait({first})
    if not first.cancelled():
        first.exception()  # seen: nobody waits for it any more
    await stream.aclose()


def _request(kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return vLLM's request, or why it is none."""
    try:
        # An id of ours: the client's could be that of a request under way.
        return SCHEMAS[kind].model_validate({**body, "request_id": uuid.uuid4().hex})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        message = f"{param}: {first['msg']}" if param else first["msg"]
        return Refusal(status=400, message=message, param=param or None)
    except VLLMClientError as error:  # from vLLM's own checks, which pydantic lets through
        return Refusal(status=400, message=str(error), param=getattr(error, "parameter", None))


def _refusal_of(answer: Any) -> Refusal:  # noqa: ANN401
    """Turn an error of the engine into ours."""
    error = answer.error
    return Refusal(
        status=int(error.code or 500), message=error.message, param=getattr(error, "param", None)
    )


def _take_planned_cores() -> None:
    """Tell vLLM, which this process starts, the cores of this replica of the plan."""
    if os.environ.get(CORES):
        rank = serve.get_replica_context().rank.rank
        labels = ray.get_runtime_context().get_node_labels()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = planned_cores(os.environ[CORES], rank, labels)
