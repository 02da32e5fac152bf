"""
Every private name of vLLM, and of Ray's server of an engine, that serving uses.

Ray 2.60.0, vLLM 0.29.0; tests/serving/replicas/test_ray_compat.py reports the names that an
upgrade removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil
import ray
from vllm.exceptions import VLLMClientError

REQUEST_IDS = {"chat": "chatcmpl-{}", "completions": "cmpl-{}-0"}
"""The ids that vLLM derives from a request's id; of several prompts that of the first."""


def skip_download(llm_config: Any) -> None:  # noqa: ANN401
    """Disable Ray's task on each node that downloads the model."""
    llm_config.get_or_create_callback().ctx.run_init_node = False


def engine_is_dead(engine: Any) -> bool:  # noqa: ANN401
    """Return whether a replica's engine has lost its processes, which it never restarts."""
    return bool(engine._engine_client.errored)  # noqa: SLF001


async def prompt_tokens(engine: Any, kind: str, request: Any) -> int | None:  # noqa: ANN401
    """
    Return the tokens of a prompt, rendered as for an answer; `None`: the engine refuses it.

    Ray's `tokenize` calls a server that vLLM 0.29 does not have.
    """
    if isinstance(getattr(request, "prompt", None), list):
        return len(request.prompt)
    try:
        if kind == "chat":
            server = engine._oai_serving_chat  # noqa: SLF001
            rendered = await server.render_chat_request(request)
            inputs = rendered[1] if isinstance(rendered, tuple) else None
        else:
            server = engine._oai_serving_completion  # noqa: SLF001
            rendered = await server.render_completion_request(request)
            inputs = rendered if isinstance(rendered, list) else None
    except (ValueError, VLLMClientError):
        inputs = None  # the answer will report the error
    return inputs and sum(server._extract_prompt_len(each) for each in inputs)  # noqa: SLF001


def first_token_seen(engine: Any, kind: str, request_id: str) -> bool:  # noqa: ANN401
    """Return whether a request that is answered in one piece has its first token."""
    processor = engine._engine_client.output_processor  # noqa: SLF001
    names = processor.external_req_ids.get(request_name(kind, request_id), ())
    states = [processor.request_states.get(name) for name in names]
    return any(state is not None and not state.is_prefilling for state in states)


def request_name(kind: str, request_id: str) -> str:
    """Return the name that vLLM gives a request of an answer in one piece or a stream."""
    return REQUEST_IDS[kind].format(request_id)


def note_computed_tokens(engine: Any, computed: dict[str, int]) -> None:  # noqa: ANN401
    """
    Have the engine note how many tokens of a prompt it computes itself.

    Args:
        engine: a started vLLM engine.
        computed: tokens by `request_name`, written when the first token comes, and only for
            requests that are in it.
    """
    processor = engine._engine_client.output_processor  # noqa: SLF001
    update = processor._update_stats_from_output  # noqa: SLF001

    def noting(state: Any, output: Any, *args: Any) -> None:  # noqa: ANN401
        if output.prefill_stats is not None and state.external_req_id in computed:
            computed[state.external_req_id] = output.prefill_stats.num_computed_tokens
        update(state, output, *args)

    processor._update_stats_from_output = noting  # noqa: SLF001


def block_size(engine: Any) -> int:  # noqa: ANN401
    """Return the tokens of a block of an engine's KV cache."""
    return int(engine._engine_client.vllm_config.cache_config.block_size)  # noqa: SLF001


def engine_facts(server: Any) -> dict[str, Any]:  # noqa: ANN401
    """
    Return the settings of a replica's engine that a plan decides, asked of the engine.

    Args:
        server: the replica, an `LLMServer` with a started vLLM engine.
    """
    config = server.engine._engine_client.vllm_config  # noqa: SLF001
    parallel = config.parallel_config
    kv_transfer = config.kv_transfer_config
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "ep": parallel.tensor_parallel_size * parallel.data_parallel_size
        if parallel.enable_expert_parallel
        else 1,
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
        "labels": ray.get_runtime_context().get_node_labels(),
        "cores": worker_cores(os.getpid()),
    }


def worker_cores(replica: int) -> list[list[int]]:
    """Return the cores that each vLLM worker below the process *replica* is bound to."""
    below = psutil.Process(replica).children(recursive=True)
    found = []
    for process in sorted(below, key=lambda each: each.pid):
        with suppress(psutil.NoSuchProcess):  # other child processes start and end
            # The kernel cuts names at 15 characters; vLLM calls its workers VLLM::Worker,
            # VLLM::Worker_TP0 and so on.
            if process.name().startswith("VLLM::Worker"):
                found.append(sorted(process.cpu_affinity()))
    return found
