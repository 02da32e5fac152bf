"""vLLM's arguments that a plan decides, as its `AsyncEngineArgs` names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan.deployment import Deployment, Pool
    from minicluster.specs.lora import LoraSpec
    from minicluster.specs.model import DraftSpec

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's role in the KV transfer; a mixed pool has none."""

OFFLOADING = "OffloadingConnector"
"""vLLM's connector to host memory and disk."""

SCHEDULER_OPTIONS = {
    "chunked_prefill_tokens": "long_prefill_token_threshold",
    "watermark_fraction": "watermark",
}
"""Names in vLLM's `SchedulerConfig` of engine options that are one number in both."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""vLLM's names of dtypes."""


def vllm_arguments(deployment: Deployment, pool: Pool) -> dict[str, Any]:
    """
    Return the arguments of every engine of a pool, without the settings of its KV transfer.

    Source:
        vLLM 0.29.0, engine/arg_utils.py.
    """
    engine = deployment.engine
    arguments: dict[str, Any] = {
        "tensor_parallel_size": pool.tp,
        "dtype": DTYPES.get(pool.dtype, "auto"),
        "kv_cache_dtype": kv_cache_dtype(deployment, pool),
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "kv_cache_memory_bytes": int(pool.kv_bytes),
        "gpu_memory_utilization": engine.gpu_memory_utilization,
    }
    if pool.pp > 1:
        arguments["pipeline_parallel_size"] = pool.pp
    arguments |= _groups(deployment, pool)
    arguments |= {
        argument: value
        for name, argument in SCHEDULER_OPTIONS.items()
        if (value := getattr(engine, name))
    }
    if engine.speculative_tokens and deployment.model.draft is not None:
        drafts = engine.speculative_tokens
        arguments["speculative_config"] = _speculative(deployment.model.draft, drafts)
    if pool.gpu != "cpu" and pool.dtype == "fp8":
        arguments["quantization"] = "fp8"
    return arguments | _lora(engine.lora)


def kv_transfer_config(
    deployment: Deployment, pool: Pool, nixl: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """
    Return the connectors of a pool: between pools, to host memory and disk, both, or `None`.

    Args:
        deployment: what is to run.
        pool: of it; decode pools offload nothing, because no prompt is looked up there.
        nixl: the connector between the pools; `None`: a mixed pool has none.

    Source:
        vLLM 0.29.0, kv_connector/v1/multi_connector.py and offloading_connector.py,
        v1/kv_offload/cpu/spec.py (bytes of all workers of an engine) and tiering/fs/manager.py,
        whose files nothing deletes: `disk_bytes` is no setting of vLLM's.
    """
    offload = deployment.engine.kv_offload
    if offload is None or pool.role == "decode":
        return None if nixl is None else dict(nixl)
    extra: dict[str, Any] = {"cpu_bytes_to_use": int(offload.host_bytes) * pool.tp * pool.pp}
    if offload.disk_bytes:
        extra["spec_name"] = "TieringOffloadingSpec"
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": offload.disk_path}]
    own: dict[str, Any] = {
        "kv_connector": OFFLOADING,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if nixl is None:
        return own
    return {
        "kv_connector": "MultiConnector",
        "kv_role": nixl["kv_role"],
        "kv_connector_extra_config": {"connectors": [dict(nixl), own]},
    }


def kv_cache_dtype(deployment: Deployment, pool: Pool) -> str:
    """
    Return vLLM's name of the KV cache's dtype.

    `auto` is that of activations, or what a quantised checkpoint declares: there it is said.
    """
    planned = deployment.engine.kv_dtype
    plain = planned == pool.dtype and pool.dtype in DTYPES
    return "auto" if plain else DTYPES.get(planned, planned)


def redundant_experts(deployment: Deployment, pool: Pool) -> int | None:
    """Return the copies of experts in a layer of a pool; `None`: it has no load balancer."""
    moe = deployment.model.moe
    return moe.redundant_experts if moe and pool.ep > 1 else None


def all_to_all_backend(deployment: Deployment, pool: Pool) -> str:
    """
    Return vLLM's name of the way that tokens take to their experts.

    Source:
        vLLM 0.29.0 config/parallel.py, All2AllBackend; high throughput for prompts, low latency in
        CUDA graphs for decode.
    """
    if deployment.engine.all_to_all is None or not pool.slicing.routes_tokens:
        return "allgather_reducescatter"
    kernels = "low_latency" if pool.role == "decode" else "high_throughput"
    return f"{deployment.engine.all_to_all}_{kernels}"


def two_batch_overlap(deployment: Deployment, pool: Pool) -> bool:
    """Return whether a pool runs its steps in two halves."""
    return bool(deployment.engine.two_batch_overlap) and pool.slicing.routes_tokens


def _groups(deployment: Deployment, pool: Pool) -> dict[str, Any]:
    """Return what ranks share: copies of attention, and whole experts, balanced or not."""
    arguments: dict[str, Any] = {"data_parallel_size": pool.dp} if pool.dp > 1 else {}
    if pool.ep > 1:
        arguments["enable_expert_parallel"] = True
    if deployment.engine.all_to_all is not None and pool.slicing.routes_tokens:
        arguments["all2all_backend"] = all_to_all_backend(deployment, pool)
    if two_batch_overlap(deployment, pool):
        arguments["enable_dbo"] = True
    copies = redundant_experts(deployment, pool)
    if copies is not None:
        arguments["enable_eplb"] = True
        arguments["eplb_config"] = {"num_redundant_experts": copies}
    return arguments


def _lora(lora: LoraSpec | None) -> dict[str, Any]:
    """
    Return the slots for adapters; by default vLLM would also give tables of some models slots.

    Source:
        vLLM 0.29.0 config/lora.py and lora/utils.py, get_supported_lora_modules.
    """
    if lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": lora.max_loras,
        "max_lora_rank": lora.max_lora_rank,
        "max_cpu_loras": lora.max_cpu_loras,
        "lora_target_modules": list(lora.target_modules),
    }


def _speculative(draft: DraftSpec, tokens: int) -> dict[str, Any]:
    """
    Return how vLLM drafts; both pools of a split plan alike, because the draft head has a KV cache.

    Source:
        vLLM 0.29.0 config/speculative.py: `mtp` stands for the layers of every architecture; NIXL
        compares the methods of both sides (nixl/metadata.py).
    """
    config: dict[str, Any] = {"method": draft.method, "num_speculative_tokens": tokens}
    return config | ({"model": draft.source} if draft.source else {})
