"""A plan as SGLang's servers and router."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Any

from minicluster.plan.vllm_args import kv_cache_dtype, redundant_experts, two_batch_overlap
from sizing.latency.memory import slot_bytes, weight_bytes
from sizing.stacks.engines import HEAD, Engines, Pools, Texts, commands, shell
from sizing.stacks.flags import flags

if TYPE_CHECKING:
    from minicluster.plan import Plan, Pool
    from minicluster.specs.lora import LoraSpec

PORT, INIT_PORT = 30000, 20000
"""Ports of a server, and at which the nodes of one replica meet."""

PROJECTIONS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",),
}  # fmt: skip
"""SGLang's names of what vLLM's modules pack."""


def write_sglang(_plan: Plan, pools: Pools, _image: str) -> Texts:
    """Return a script of servers and, for split pools, of the router."""
    start = ["python3", "-m", "sglang.launch_server"]
    lines = {r: [[*start, *words] for words in node_words(e)] for r, e in pools.items()}
    parts = commands(pools, lines)
    if len(pools) > 1:
        router = ["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for role in ("prefill", "decode"):
            for number in range(pools[role].pool.replicas):
                router += [f"--{role}", f"http://{role}-{number}:{PORT}"]
        parts.append(f"# router\n{shell(router)}\n")
    return {"sglang.sh": "\n".join(parts)}


def node_words(engines: Engines) -> list[list[str]]:
    """
    Return the arguments of `sglang.launch_server`, one list for each node of a replica.

    Its TP counts all GPUs that share the experts, and its limits those of all ranks; its static
    memory is weights and KV cache.

    Source:
        SGLang 0.5, docs/advanced_features/server_arguments; not run here.
    """
    plan, pool = engines.plan, engines.pool
    engine, gpu = plan.engine, plan.inputs.kinds[pool.gpu]
    static_bytes = (
        weight_bytes(plan.model, slicing=pool.slicing)
        + slot_bytes(plan.model, plan.inputs.engine, slicing=pool.slicing)
        + pool.kv_bytes
    )
    arguments: dict[str, Any] = {
        "model_path": plan.model.source,
        "served_model_name": plan.model.id,
        "tp_size": pool.tp * pool.dp,
        "context_length": engine.max_model_len,
        "page_size": engine.block_size,
        "max_running_requests": pool.max_num_seqs * pool.dp,
        "chunked_prefill_size": pool.dp
        * (engine.chunked_prefill_tokens or pool.max_num_batched_tokens),
        "mem_fraction_static": floor(1000 * static_bytes / gpu.require("hbm_bytes")) / 1000,
        "kv_cache_dtype": {"fp8": "fp8_e4m3"}.get(kv_cache_dtype(plan.deployment, pool), "auto"),
    }
    if pool.pp > 1:
        arguments["pp_size"] = pool.pp
    arguments |= _groups(plan, pool)
    drafts, draft = engine.speculative_tokens, plan.model.draft
    if drafts and draft is not None:  # one chain; its `EAGLE` is also the models' own MTP
        arguments |= {
            "speculative_algorithm": "EAGLE3" if draft.method == "eagle3" else "EAGLE",
            "speculative_num_steps": drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": drafts + 1,
            **({"speculative_draft_model_path": draft.source} if draft.source else {}),
        }
    arguments |= _lora(engine.lora)
    if pool.role != "mixed":
        arguments |= {"disaggregation_mode": pool.role, "disaggregation_transfer_backend": "nixl"}
    common = flags(arguments)
    if engines.nodes == 1:
        return [common]
    at = f"{HEAD}:{INIT_PORT}"
    return [
        [*common, *flags({"nnodes": engines.nodes, "node_rank": node, "dist_init_addr": at})]
        for node in range(engines.nodes)
    ]


def _groups(plan: Plan, pool: Pool) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if pool.dp > 1:
        arguments |= {"dp_size": pool.dp, "enable_dp_attention": True}
    if pool.ep > 1:
        arguments["ep_size"] = pool.ep
    library = plan.engine.all_to_all
    if library and pool.slicing.routes_tokens:
        mode = "low_latency" if pool.role == "decode" else "normal"
        arguments |= {"moe_a2a_backend": library, "deepep_mode": mode}
    if two_batch_overlap(plan.deployment, pool):
        arguments["enable_two_batch_overlap"] = True
    copies = redundant_experts(plan.deployment, pool)
    if copies is not None:
        arguments |= {"enable_eplb": True, "ep_num_redundant_experts": copies}
    return arguments


def _lora(lora: LoraSpec | None) -> dict[str, Any]:
    """
    Return the slots for adapters.

    Source:
        docs.sglang.io, advanced_features/lora, read 2026-11-26.
    """
    if lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras_per_batch": lora.max_loras,
        "max_loaded_loras": lora.max_cpu_loras,
        "max_lora_rank": lora.max_lora_rank,
        "lora_target_modules": [n for module in lora.target_modules for n in PROJECTIONS[module]],
    }
