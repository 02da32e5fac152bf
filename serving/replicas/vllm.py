"""
vLLM behind Ray's servers, alone or as ranks of a group that shares its experts.

With every private name of both that serving uses (Ray 2.60.0, vLLM 0.29.0);
tests/serving/replicas/test_ray_compat.py reports the names that an upgrade removed.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import psutil
import ray
from pydantic import ValidationError
from ray import serve
from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer
from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from serving.cluster.serve_compat import keep_log_open
from serving.protocol.app_spec import CORES, planned_cores
from serving.protocol.messages import ENGINE_DIED, EngineFailed, Prefilled, Refusal
from serving.replicas.roles import AnswerRole, EngineServer, PrefillRole
from serving.replicas.vllm_plugin import ASK, REPLICA
from serving.request.cost import engine_request_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable


SCHEMAS = {"chat": ChatCompletionRequest, "completions": CompletionRequest}

ERROR_EVENT = 'data: {"error"'
"""The start of the event with which a stream of vLLM fails; [DONE] follows nevertheless."""

SERVER_ERROR = 500

GRAMMAR = re.compile(r"grammar|structural tag|schema|regex|choices", re.IGNORECASE)
"""Words of the error messages of vLLM's grammar compilers."""

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters with which NIXL's connector keeps the KV cache of a prompt for another engine."""


class VllmAnswers:
    """Ray's server of a vLLM engine; requests are vLLM's."""

    def __init__(self, server: Any) -> None:  # noqa: ANN401
        """Take an `LLMServer`, whose engine may start later."""
        self._server = server
        self._computed_tokens: dict[str, int] = {}

    @property
    def _client(self) -> Any:  # noqa: ANN401
        return self._server.engine._engine_client  # noqa: SLF001

    def started(self) -> None:
        """
        Take the engine once it has started.

        It notes how many tokens of a prompt it computes itself, when the first token comes, for the
        requests that are in `_computed_tokens`.
        """
        computed, processor = self._computed_tokens, self._client.output_processor
        update = processor._update_stats_from_output  # noqa: SLF001

        def noting(state: Any, output: Any, *args: Any) -> None:  # noqa: ANN401
            if output.prefill_stats is not None and state.external_req_id in computed:
                computed[state.external_req_id] = output.prefill_stats.num_computed_tokens
            update(state, output, *args)

        processor._update_stats_from_output = noting  # noqa: SLF001

    def read(self, kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """See `AnswerEngine`."""
        return engine_request(kind, body)

    async def prompt_tokens(self, request: Any) -> int | None:  # noqa: ANN401
        """See `AnswerEngine`; Ray's `tokenize` calls a server that vLLM 0.29 does not have."""
        if isinstance(getattr(request, "prompt", None), list):
            return len(request.prompt)
        engine = self._server.engine
        try:
            if _kind(request) == "chat":
                server = engine._oai_serving_chat  # noqa: SLF001
                rendered = await server.render_chat_request(request)
                inputs = rendered[1] if isinstance(rendered, tuple) else None
            else:
                server = engine._oai_serving_completion  # noqa: SLF001
                rendered = await server.render_completion_request(request)
                inputs = rendered if isinstance(rendered, list) else None
        except (ValueError, VLLMClientError):
            inputs = None  # the answer will report the error
        return inputs and sum(server._extract_prompt_len(prompt) for prompt in inputs)  # noqa: SLF001

    def for_decode(self, request: Any, prefilled: Prefilled) -> Any:  # noqa: ANN401
        """See `AnswerEngine`."""
        return request.model_copy(update={"kv_transfer_params": prefilled.kv_transfer_params})

    async def answer(
        self,
        request: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Refusal | list[str] | dict[str, Any], None]:
        """See `AnswerEngine`; raises what vLLM raises."""
        name = _name(request)
        self._computed_tokens[name] = 0
        async with aclosing(self._stream(request)) as items:
            try:
                async for item in items:
                    refusal = refusal_in(item)
                    if refusal is not None:
                        yield refusal
                        return
                    yield [item] if isinstance(item, str) else item.model_dump()
            except EngineDeadError:
                yield ENGINE_DIED
            finally:
                del self._computed_tokens[name]

    def first_token_seen(self, request: Any) -> bool:  # noqa: ANN401
        """See `AnswerEngine`."""
        processor = self._client.output_processor
        names = processor.external_req_ids.get(_name(request), ())
        states = [processor.request_states.get(name) for name in names]
        return any(state is not None and not state.is_prefilling for state in states)

    def pull_failed(self, request: Any) -> bool:  # noqa: ANN401
        """See `AnswerEngine`."""
        block_tokens: int = self._client.vllm_config.cache_config.block_size
        # Decode computes the end of every prompt that it fetches, which may be a whole block.
        return self._computed_tokens.get(_name(request), 0) > block_tokens

    async def compute(self, request: Any, *, keep: bool) -> Prefilled | Refusal:  # noqa: ANN401
        """See `AnswerEngine`; raises no exception of vLLM's."""
        request = for_prefill(request, keep=keep)
        async with aclosing(self._stream(request)) as items:
            try:
                answer = await anext(items)
            except Exception as error:
                raise EngineFailed(repr(error)) from error
        refusal = refusal_in(answer)
        if refusal is not None:
            return refusal
        timed = answer.metrics
        return Prefilled(
            prompt_tokens=answer.usage.prompt_tokens,
            kv_transfer_params=answer.kv_transfer_params or {},
            queue_s=(timed.queue_time_ms or 0.0) / 1e3 if timed else 0.0,
            step_s=(timed.time_to_first_token_ms or 0.0) / 1e3 if timed else 0.0,
        )

    def died(self) -> bool:
        """See `AnswerEngine`."""
        return bool(self._client.errored)

    async def kv_is_free(self) -> bool:
        """See `AnswerEngine`."""
        return bool(await self._client.reset_prefix_cache())

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> list[list[float]]:
        """See `AnswerEngine`."""
        core = self._client.engine_core
        rows: list[list[float]] = await core.call_utility_async(ASK, begin_unix_s, end_unix_s)
        return rows

    def facts(self) -> dict[str, Any]:
        """See `AnswerEngine`."""
        config = self._client.vllm_config
        parallel = config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
        kv_transfer, drafts = config.kv_transfer_config, config.speculative_config
        lora = config.lora_config
        return {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
            "ep": ranks if parallel.enable_expert_parallel else 1,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "chunked_prefill_tokens": config.scheduler_config.long_prefill_token_threshold,
            "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
            "max_model_len": config.model_config.max_model_len,
            "block_size": config.cache_config.block_size,
            "kv_bytes": config.cache_config.kv_cache_memory_bytes,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "kv_dtype": config.cache_config.cache_dtype,
            "model": config.model_config.model,
            "kv_role": kv_transfer and kv_transfer.kv_role,
            "kv_connector": kv_transfer and kv_transfer.kv_connector,
            "speculative_tokens": drafts.num_speculative_tokens if drafts else 0,
            "redundant_experts": (
                parallel.eplb_config.num_redundant_experts if parallel.enable_eplb else None
            ),
            "all_to_all_backend": parallel.all2all_backend,
            "two_batch_overlap": parallel.enable_dbo,
            "lora": lora
            and {
                "max_loras": lora.max_loras,
                "max_lora_rank": lora.max_lora_rank,
                "max_cpu_loras": lora.max_cpu_loras,
                "target_modules": lora.target_modules,
            },
            "labels": ray.get_runtime_context().get_node_labels(),
            "cores": worker_cores(os.getpid()),
        }

    def _stream(self, request: Any) -> Any:  # noqa: ANN401
        return getattr(self._server.engine, _kind(request))(request, None)


def _kind(request: Any) -> str:  # noqa: ANN401
    return "chat" if isinstance(request, ChatCompletionRequest) else "completions"


def _name(request: Any) -> str:  # noqa: ANN401
    """Return the name that vLLM gives a request; of several prompts that of the first."""
    form = "chatcmpl-{}" if _kind(request) == "chat" else "cmpl-{}-0"
    return form.format(request.request_id)


def worker_cores(replica: int) -> list[list[int]]:
    """Return the cores that each vLLM worker below the process *replica* is bound to."""
    below = psutil.Process(replica).children(recursive=True)
    cores = []
    for process in sorted(below, key=lambda each: each.pid):
        with suppress(psutil.NoSuchProcess):  # other child processes start and end
            # The kernel cuts names at 15 characters; vLLM calls its workers VLLM::Worker,
            # VLLM::Worker_TP0 and so on.
            if process.name().startswith("VLLM::Worker"):
                cores.append(sorted(process.cpu_affinity()))
    return cores


def engine_request(kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return vLLM's request of *kind* (`chat` or `completions`), or the refusal of the body."""
    try:
        request = SCHEMAS[kind].model_validate({**body, "request_id": engine_request_id(body)})
        _read_content(getattr(request, "messages", ()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # What `_read_content` reads, and vLLM's own check of calls, begins with a place in a list.
        within = ("messages",) if isinstance(next(iter(first["loc"]), None), int) else ()
        param = ".".join(str(part) for part in (*within, *first["loc"]))
        message = f"{param}: {first['msg']}" if param else first["msg"]
        return Refusal(status=400, message=message, param=param or None)
    except VLLMClientError as error:  # from vLLM's own checks, which pydantic lets through
        return Refusal(status=400, message=str(error), param=getattr(error, "parameter", None))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        # Its checks look at values before their types have been checked.
        return Refusal(status=400, message=f"The body is malformed: {error}")
    return request


def _read_content(messages: Iterable[Any]) -> None:
    """
    Check content now that pydantic would check only when it is read.

    Pydantic accepts any other content as an iterable of parts and checks each when it is read,
    which is possible only once.
    """
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str | list | None):
            message["content"] = list(content)


def for_prefill(request: Any, *, keep: bool) -> Any:  # noqa: ANN401
    """
    Return *request* for prefill: its prompt, with an answer of one token that is discarded.

    With *keep* the engine keeps the KV cache until another one fetches it.
    """
    changes: dict[str, Any] = {
        "kv_transfer_params": dict(REMOTE_DECODE) if keep else None,
        "max_tokens": 1,
        "min_tokens": 0,
        "temperature": 0.0,
        "stream": False,
        "stream_options": None,
        "logprobs": None,
        "response_format": None,
        "structured_outputs": None,
    }
    if isinstance(request, ChatCompletionRequest):
        changes |= {"max_completion_tokens": 1, "logprobs": False, "top_logprobs": None}
    return request.model_copy(update=changes)


def refusal_in(item: Any) -> Refusal | None:  # noqa: ANN401
    """
    Return the refusal that an event or an answer of the engine is; `None`: it is none.

    The client's errors keep their message, and that of internal ones is hidden.
    """
    if isinstance(item, str):
        if not item.startswith(ERROR_EVENT):
            return None
        error = json.loads(item.removeprefix("data: "))["error"]
    elif hasattr(item, "usage"):
        return None
    else:
        error = vars(item.error)
    code = error.get("code")
    status = code if isinstance(code, int) and code else SERVER_ERROR
    message, param = str(error.get("message")), error.get("param")
    if status >= SERVER_ERROR:
        return Refusal(status=status, message="The engine failed while answering.")
    if param is None and GRAMMAR.search(message):
        # vLLM's grammar compiler does not know the request, and so names no parameter.
        param = "structured_outputs"
        message = f"structured_outputs or response_format: {message}"
    return Refusal(status=status, message=message, param=param)


class PlannedServer(EngineServer):
    """A vLLM engine on its planned cores."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # noqa: ANN401
        """Take the planned cores, then start the engine."""
        keep_log_open()
        _prepare_cpu_engine()
        os.environ[REPLICA] = str(os.getpid())
        _take_side_channel_port(llm_config)
        self.answers = answers = VllmAnswers(self)
        await super().__init__(llm_config, **kwargs)  # type: ignore[call-arg, misc]
        answers.started()
        await self.begin()

    async def _start_engine(self) -> None:
        """
        Start the engine, and nothing else.

        Ray would also start an agent that reports usage and a task that downloads model files: 8 s
        and 0.6 GB each, because each imports the engine again.
        """
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            callback = self._llm_config.get_or_create_callback()  # type: ignore[attr-defined]
            callback.ctx.run_init_node = False
        await self.engine.start()  # type: ignore[attr-defined]

    async def __del__(self) -> None:
        """Drain; Ray Serve awaits this once a replica that ends has no requests of its own."""
        await self.drain()
        await super().__del__()  # type: ignore[misc]


class PrefillServer(PlannedServer, PrefillRole, LLMServer):  # type: ignore[misc]
    """A prefill engine."""


class AnswerServer(PlannedServer, AnswerRole, LLMServer):  # type: ignore[misc]
    """A decode engine, or the mixed engine of an aggregated plan."""


class GroupedPrefillServer(PrefillServer, DPServer):  # type: ignore[misc]
    """
    A prefill engine that is a rank of a data-parallel group: one copy of attention.

    Ray Serve starts the ranks of a group together, and all of them again when one dies.
    """


class GroupedAnswerServer(AnswerServer, DPServer):  # type: ignore[misc]
    """An engine that answers and is a rank of a data-parallel group."""


def _take_side_channel_port(llm_config: Any) -> None:  # noqa: ANN401
    """
    Give a rank of a group a NIXL port that no other engine of its deployment has.

    Ray counts ports from the rank in the group, which is the same in every group, and vLLM adds
    that rank once more; a port in the environment is left alone by Ray.
    """
    context = serve.get_replica_context()
    base = llm_config.experimental_configs.get("NIXL_SIDE_CHANNEL_PORT_BASE")
    if base is None or context.gang_context is None:
        return
    width = llm_config.engine_kwargs["tensor_parallel_size"]
    port = base + context.rank.rank * width - context.gang_context.rank
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)


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
