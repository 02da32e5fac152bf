"""What an engine really runs with, asked of the engine itself."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import psutil
import ray


def engine_facts(server: Any) -> dict[str, Any]:  # noqa: ANN401
    """
    Return the settings of a replica's engine that a plan decides.

    Args:
        server: the replica, an `LLMServer` with a started vLLM engine.
    """
    config = server.engine._engine_client.vllm_config  # noqa: SLF001
    kv_transfer = config.kv_transfer_config
    return {
        "tp": config.parallel_config.tensor_parallel_size,
        "pp": config.parallel_config.pipeline_parallel_size,
        "max_batch_size": config.scheduler_config.max_num_seqs,
        "max_batched_tokens": config.scheduler_config.max_num_batched_tokens,
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
    """Return the cores on which each vLLM worker below the process *replica* may compute."""
    below = psutil.Process(replica).children(recursive=True)
    found = []
    for process in sorted(below, key=lambda each: each.pid):
        with suppress(psutil.NoSuchProcess):  # others below come and go
            # The kernel cuts names at 15 characters; vLLM calls its workers VLLM::Worker,
            # VLLM::Worker_TP0 and so on.
            if process.name().startswith("VLLM::Worker"):
                found.append(sorted(process.cpu_affinity()))
    return found
