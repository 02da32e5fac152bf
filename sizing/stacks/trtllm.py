"""A plan as TensorRT-LLM's servers and router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.errors import InputError
from minicluster.plan.vllm_args import kv_cache_dtype, two_batch_overlap
from sizing.stacks.engines import Engines, Pools, Texts, commands, yaml_text

if TYPE_CHECKING:
    from minicluster.plan import Plan
    from minicluster.specs.lora import LoraSpec

PORT = 8000

PROJECTIONS = {
    "qkv_proj": ("attn_q", "attn_k", "attn_v"), "o_proj": ("attn_dense",),
    "gate_up_proj": ("mlp_gate", "mlp_h_to_4h"), "down_proj": ("mlp_4h_to_h",),
}  # fmt: skip
"""TensorRT-LLM's names of what vLLM's modules pack."""


def write_trtllm(plan: Plan, pools: Pools, _image: str) -> Texts:
    """Return a script, the settings of each pool and, for split pools, the router's."""
    files = {f"{role}.yaml": yaml_text(server(engines)) for role, engines in pools.items()}
    start = ["trtllm-serve", plan.model.source, "--backend", "pytorch", "--config"]
    parts = commands(pools, {role: [[*start, f"{role}.yaml"]] for role in pools})
    if len(pools) > 1:
        router: dict[str, Any] = {"hostname": "0.0.0.0", "port": PORT, "backend": "pytorch"}  # noqa: S104
        for role, name in {"prefill": "context_servers", "decode": "generation_servers"}.items():
            count = pools[role].pool.replicas
            urls = [f"{role}-{number}:{PORT}" for number in range(count)]
            router[name] = {"num_instances": count, "urls": urls}
        files["disaggregated.yaml"] = yaml_text(router)
        parts.append("# router\ntrtllm-serve disaggregated -c disaggregated.yaml\n")
    return {"trtllm.sh": "\n".join(parts), **files}


def server(engines: Engines) -> dict[str, Any]:
    """
    Return the settings of one server, as `trtllm-serve --config` reads them.

    Raises:
        InputError: copies of attention that are sliced, which its attention DP does not have, or
            two-batch overlap.

    Source:
        TensorRT-LLM 1.x, features/disagg-serving and the LLM API's arguments; not run here.
    """
    plan, pool = engines.plan, engines.pool
    if two_batch_overlap(plan.deployment, pool):
        raise InputError(
            "engine.two_batch_overlap",
            True,  # noqa: FBT003
            "a plan without it: TensorRT-LLM does not split a step in two",
            "plan again without two_batch_overlap, or export to vllm or sglang",
        )
    if pool.dp > 1 and pool.tp > 1:
        raise InputError(
            f"pools[{pool.role}].tp",
            pool.tp,
            "1: TensorRT-LLM's attention DP has one GPU a rank",
            "plan again with search.layouts that it has, or export to another engine",
        )
    engine, limits = plan.engine, planned_limits(plan.deployment, pool)
    settings: dict[str, Any] = {
        "tensor_parallel_size": pool.tp * pool.dp,
        "pipeline_parallel_size": pool.pp,
        "max_batch_size": pool.max_num_seqs,
        "max_num_tokens": pool.max_num_batched_tokens,
        "max_seq_len": engine.max_model_len,
        "enable_chunked_prefill": limits.rules.chunked_prefill,
        "kv_cache_config": {
            "max_tokens": limits.max_tokens * pool.pp,
            "tokens_per_block": engine.block_size,
            "dtype": {"fp8": "fp8"}.get(kv_cache_dtype(plan.deployment, pool), "auto"),
        },
    }
    if pool.dp > 1:
        settings["enable_attention_dp"] = True
    if pool.ep > 1:
        settings["moe_expert_parallel_size"] = pool.ep
    if pool.role != "mixed":
        transfer = {"backend": "NIXL", "max_tokens_in_buffer": engine.max_model_len}
        settings["cache_transceiver_config"] = transfer
    if pool.role == "prefill":
        settings["disable_overlap_scheduler"] = True  # its prefill servers have to
    if engine.speculative_tokens:
        drafts = engine.speculative_tokens
        settings["speculative_config"] = {
            "decoding_type": "MTP",
            "num_nextn_predict_layers": drafts,
        }
    return settings | _lora(engine.lora)


def _lora(lora: LoraSpec | None) -> dict[str, Any]:
    """
    Return the slots for adapters.

    Source:
        nvidia.github.io/TensorRT-LLM, features/lora, read 2026-11-26; names of modules from memory.
    """
    if lora is None:
        return {}
    slots = {
        "max_loras": lora.max_loras,
        "max_cpu_loras": lora.max_cpu_loras,
        "max_lora_rank": lora.max_lora_rank,
        "lora_target_modules": [n for module in lora.target_modules for n in PROJECTIONS[module]],
    }
    return {"lora_config": slots}
