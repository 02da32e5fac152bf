"""A pool's engines as command lines of vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.errors import InputError
from minicluster.plan import Plan, Pool
from minicluster.plan.vllm_args import (
    KV_ROLES,
    kv_cache_dtype,
    kv_transfer_config,
    redundant_experts,
    two_batch_overlap,
    vllm_arguments,
)
from sizing.latency.memory import slot_bytes, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from minicluster.specs.lora import LoraSpec

KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""vLLM's KV transfer in llm-d and KServe, whose routers decide which engine prefills."""

HEAD = "$HEAD"
"""Shell variable: address of the first node of a replica that takes several."""

DATA_PARALLEL_PORT, INIT_PORT = 13345, 20000
"""Ports at which the nodes of one replica meet."""

FLAGS_PER_LINE = " \\\n  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """
    The engines of one pool, all alike.

    Attributes:
        nodes: of one replica.
    """

    plan: Plan
    pool: Pool
    nodes: int

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.pool.slicing.gpus

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one replica on each of its nodes."""
        return self.gpus // self.nodes


def engines_of(plan: Plan, pool: Pool) -> Engines:
    """
    Return the engines of a pool on whole nodes, or a part of one.

    Raises:
        InputError: a replica that does not divide its nodes.
    """
    gpus, on_node = pool.slicing.gpus, plan.inputs.cluster.gpus_per_node
    nodes = ceil(gpus / on_node)
    if gpus % nodes or (pool.dp > 1 and pool.dp % nodes):
        raise InputError(
            f"pools[{pool.role}]",
            f"{gpus} GPUs a replica on nodes of {on_node}",
            "a replica inside a node, or one with as many ranks on each of its nodes",
        )
    return Engines(plan=plan, pool=pool, nodes=nodes)


def engine_arguments(engines: Engines, *, kv_role: str | None) -> dict[str, Any]:
    """
    Return vLLM's arguments of a pool by name, with the KV connectors that it needs.

    Args:
        kv_role: the way that the KV caches of a split pool go; absent: both ways.
    """
    deployment, pool = engines.plan.deployment, engines.pool
    role = {} if kv_role is None else {"kv_role": kv_role}
    nixl = None if pool.role == "mixed" else KV_TRANSFER | role
    connectors = kv_transfer_config(deployment, pool, nixl)
    found = vllm_arguments(deployment, pool)
    return found if connectors is None else found | {"kv_transfer_config": connectors}


def vllm_words(engines: Engines, *, transfers: bool = True) -> list[str]:
    """
    Return the arguments of `vllm serve` that are the same on every node of a replica.

    Args:
        transfers: name the KV connector of split pools.

    Source:
        vLLM 0.29.0 engine/arg_utils.py and entrypoints/launchers/cli_args.py, whose parser a test
        gives these lines.
    """
    plan, pool = engines.plan, engines.pool
    arguments = engine_arguments(engines, kv_role=KV_ROLES.get(pool.role))
    if not transfers:
        arguments.pop("kv_transfer_config", None)
    return [plan.model.source, "--served-model-name", plan.model.id, *flags(arguments)]


def vllm(engines: Engines) -> list[list[str]]:
    """Return the arguments of `vllm serve`, one list for each node of a replica."""
    pool, nodes, common = engines.pool, engines.nodes, vllm_words(engines)
    if nodes == 1:
        return [common]
    lines = []
    for node in range(nodes):
        if pool.dp > 1:
            local = pool.dp // nodes
            own: dict[str, Any] = {
                "data_parallel_size_local": local,
                "data_parallel_address": HEAD,
                "data_parallel_rpc_port": DATA_PARALLEL_PORT,
            }
            own |= {"data_parallel_start_rank": node * local} if node else {}
        else:
            own = {"nnodes": nodes, "node_rank": node, "master_addr": HEAD}
        lines.append([*common, *flags(own | ({"headless": True} if node else {}))])
    return lines


def sglang(engines: Engines) -> list[list[str]]:
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
    arguments |= _sglang_groups(plan, pool)
    drafts, draft = engine.speculative_tokens, plan.model.draft
    if drafts and draft is not None:  # one chain; its `EAGLE` is also the models' own MTP
        arguments |= {
            "speculative_algorithm": "EAGLE3" if draft.method == "eagle3" else "EAGLE",
            "speculative_num_steps": drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": drafts + 1,
            **({"speculative_draft_model_path": draft.source} if draft.source else {}),
        }
    arguments |= _lora("sglang", engine.lora)
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


def _sglang_groups(plan: Plan, pool: Pool) -> dict[str, Any]:
    """Return what ranks share in SGLang: copies of attention, and whole experts."""
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


def trtllm(engines: Engines) -> dict[str, Any]:
    """
    Return the settings of one TensorRT-LLM server, as `trtllm-serve --config` reads them.

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
    cache = {"fp8": "fp8"}.get(kv_cache_dtype(plan.deployment, pool), "auto")
    found: dict[str, Any] = {
        "tensor_parallel_size": pool.tp * pool.dp,
        "pipeline_parallel_size": pool.pp,
        "max_batch_size": pool.max_num_seqs,
        "max_num_tokens": pool.max_num_batched_tokens,
        "max_seq_len": engine.max_model_len,
        "enable_chunked_prefill": limits.rules.chunked_prefill,
        "kv_cache_config": {
            "max_tokens": limits.max_tokens * pool.pp,
            "tokens_per_block": engine.block_size,
            "dtype": cache,
        },
    }
    if pool.dp > 1:
        found["enable_attention_dp"] = True
    if pool.ep > 1:
        found["moe_expert_parallel_size"] = pool.ep
    if pool.role != "mixed":
        found["cache_transceiver_config"] = {
            "backend": "NIXL",
            "max_tokens_in_buffer": engine.max_model_len,
        }
    if pool.role == "prefill":
        found["disable_overlap_scheduler"] = True  # its prefill servers have to
    if engine.speculative_tokens:
        found["speculative_config"] = {
            "decoding_type": "MTP",
            "num_nextn_predict_layers": engine.speculative_tokens,
        }
    found |= _lora("trtllm", engine.lora)
    return found


PROJECTIONS = {
    "sglang": {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",),
        "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",),
    },
    "trtllm": {
        "qkv_proj": ("attn_q", "attn_k", "attn_v"), "o_proj": ("attn_dense",),
        "gate_up_proj": ("mlp_gate", "mlp_h_to_4h"), "down_proj": ("mlp_4h_to_h",),
    },
}  # fmt: skip
"""By stack, its names of what vLLM's modules pack."""


def _lora(stack: str, lora: LoraSpec | None) -> dict[str, Any]:
    """
    Return the slots for adapters.

    Source:
        docs.sglang.io, advanced_features/lora; nvidia.github.io/TensorRT-LLM, features/lora, its
        names of modules from memory; read 2026-11-26.
    """
    if lora is None:
        return {}
    modules = [name for each in lora.target_modules for name in PROJECTIONS[stack][each]]
    common = {"max_lora_rank": lora.max_lora_rank, "lora_target_modules": modules}
    if stack == "sglang":
        own = {"max_loras_per_batch": lora.max_loras, "max_loaded_loras": lora.max_cpu_loras}
        return {"enable_lora": True, **own, **common}
    own = {"max_loras": lora.max_loras, "max_cpu_loras": lora.max_cpu_loras}
    return {"lora_config": own | common}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write `a_key` as `--a-key` with its value: a switch has none, that of a table is JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def shell(words: Iterable[str]) -> str:
    """Write words for a shell, one flag a line; variables stay variables."""
    lines: list[str] = []
    for word in words:
        text = f'"{word}"' if word.startswith(HEAD) else shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(text)
        else:
            lines[-1] += f" {text}"
    return FLAGS_PER_LINE.join(lines)
