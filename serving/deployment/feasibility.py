"""Feasibility: every reason why a deployment cannot be realised on a target, before any start."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_pages
from minicluster.engine_model.parallelism import expert_rule, nixl_rule, tp_rule
from minicluster.errors import NegativeAnswer
from minicluster.plan import NODE_LABEL, ROLE_LABEL
from minicluster.plan.vllm_args import DTYPES, redundant_experts
from minicluster.specs.lora import adapter_bytes
from minicluster.specs.model import architecture_hash, mtp_layers
from serving.deployment.engine_args import SIMULATED
from serving.deployment.target import is_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from minicluster.plan import Deployment, Plan, Pool
    from minicluster.specs.lora import LoraSpec
    from serving.deployment.target import Target

SYSTEM = "Linux x86_64"
RAY = "2.60.0"
"""The version whose private names `serving.replicas.vllm` uses."""

REPLICA_BYTES = 2.2e9
"""Resident memory of one replica's processes without weights and KV (measured: 0.7 + 0.6 + 0.9)."""

SYSTEM_BYTES = 1.5e9
"""Resident memory of Ray and the endpoint."""

FURTHER_DTYPES = {"cpu": (), "gpu": ("fp8",)}
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def refuse(reasons: Iterable[str]) -> None:
    """Raise NegativeAnswer with one of *reasons* per line, if there are any."""
    lines = [*reasons]
    if lines:
        raise NegativeAnswer("\n  ".join(["this deployment cannot be realised here:", *lines]))


def plan_findings(plan: Plan) -> Iterator[str]:
    """Yield the reason of the plan itself, if there is one."""
    deployable = plan.deployable
    if not deployable.ok:
        yield (
            "deployable: the plan says that it cannot be deployed: "
            f"{deployable.rule_broken} ({deployable.profile})"
        )


def findings(deployment: Deployment, target: Target) -> tuple[str, ...]:
    """Return the reasons why *deployment* cannot be realised on *target*; none: it can."""
    roles = sorted(pool.role for pool in deployment.pools)
    if roles not in (["decode", "prefill"], ["mixed"]):
        return (f"pools: {roles}; serving deploys one prefill and one decode pool, or a mixed one",)
    return (
        *_software(deployment, target),
        *_model(deployment),
        *(_pairing(deployment) if roles != ["mixed"] else ()),
        *(finding for pool in deployment.pools for finding in _pool(deployment, pool, target)),
        *offload_findings(deployment, target.kind),
        *_room(deployment, target),
    )


def _software(deployment: Deployment, target: Target) -> Iterator[str]:
    if target.system != SYSTEM:
        yield f"platform: this is {target.system}; serving runs on {SYSTEM}"
    if target.ray != RAY:
        yield f"ray: {target.ray or 'not installed'}; expected {RAY} (run `make setup`)"
    engine = deployment.engine
    if engine.name != "vllm":
        yield f"engine.name: {engine.name!r}; serving deploys vllm"
    elif target.vllm != engine.version:
        yield (
            f"engine.version: the plan wants vllm {engine.version}, "
            f"here is {target.vllm or 'none'} (run `make setup`)"
        )
    chunk = engine.chunked_prefill_tokens
    if chunk > engine.max_model_len:
        yield f"engine.chunked_prefill_tokens: {chunk}; at most {engine.max_model_len}, the context"


def _model(deployment: Deployment) -> Iterator[str]:
    model = deployment.model
    if not is_directory(model.source):
        return  # a hub name: vLLM downloads the model and checks it
    config = Path(model.source) / "config.json"
    try:
        raw = json.loads(config.read_text(encoding="utf-8"))
        config_hash = architecture_hash(raw)
    except (OSError, ValueError) as error:
        yield (
            f"model.source: {config}: {error} (--model, where it lies elsewhere; "
            "`serving demo-model` makes the demo's)"
        )
        return
    if config_hash != model.config_hash:
        yield (
            f"model.config_hash: {config} has {config_hash}, the plan was made for "
            f"{model.config_hash} (plan again)"
        )
    drafts = deployment.engine.speculative_tokens
    if drafts and model.draft and not model.draft.source and not mtp_layers(raw):
        yield (
            f"engine.speculative_tokens: {drafts}; {config} has no multi-token-prediction layers"
            " (plan without speculative_tokens)"
        )
    if not any(Path(model.source).glob("*.safetensors")):
        yield f"model.source: {model.source} holds no weights (*.safetensors)"


def offload_findings(deployment: Deployment, kind: str) -> Iterator[str]:
    """Yield why blocks cannot go to host memory: vLLM's CPUOffloadingSpec asks for CUDA or ROCm."""
    offload = deployment.engine.kv_offload
    if offload is not None and kind != "gpu":
        yield (
            f"engine.kv_offload: {offload.host_bytes:,.0f} bytes of host memory; {kind} engines"
            " offload nothing (plan without kv_offload_host_bytes)"
        )


def lora_findings(deployment: Deployment, modules: Mapping[str, str], kind: str) -> Iterator[str]:
    """
    Yield why adapters cannot be served: none for the plan's slots, or more than host memory takes.

    *modules* are folders of adapters by name, which simulated engines do not read.
    """
    lora, place = deployment.engine.lora, "--lora-modules"
    if lora is None:
        if modules:
            yield f"{place}: {len(modules)} adapters; the plan has no slots (engine.max_loras)"
        return
    if not modules:
        form = "NAME" if kind == SIMULATED else "NAME=PATH"
        yield f"{place}: none; the plan has slots for adapters: {form} of each"
    elif len(modules) > lora.max_cpu_loras:
        slots = lora.max_cpu_loras
        yield f"{place}: {len(modules)} adapters; at most engine.max_cpu_loras, {slots}"
    for name, path in modules.items():
        if name == deployment.model.id:
            yield f"{place}: {name}; expected another name than the model's"
        if kind != SIMULATED:
            yield from _adapter(f"{place}: {name}", Path(path) / "adapter_config.json", lora)


def _adapter(place: str, config: Path, lora: LoraSpec) -> Iterator[str]:
    try:
        rank = json.loads(config.read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{place}: {config}: {error!r}; expected a PEFT adapter with its rank r"
        return
    if not isinstance(rank, int) or not 1 <= rank <= lora.max_lora_rank:
        expected = f"1 to engine.max_lora_rank, {lora.max_lora_rank}"
        yield f"{place}: rank {rank}; expected {expected}"


def _pairing(deployment: Deployment) -> Iterator[str]:
    prefill, decode = deployment.pool("prefill"), deployment.pool("decode")
    rule = nixl_rule(deployment.model, prefill_tp=prefill.tp, decode_tp=decode.tp)
    if rule is not None:
        yield f"tp: prefill {prefill.tp} and decode {decode.tp}; expected {rule}"
    if prefill.dtype != decode.dtype:
        yield f"dtype: prefill {prefill.dtype}, decode {decode.dtype}; a KV cache has one dtype"


def _pool(deployment: Deployment, pool: Pool, target: Target) -> Iterator[str]:
    place = f"pools[{pool.role}]"
    if pool.pp != 1:
        yield f"{place}.pp: {pool.pp}; NIXL transfers between pools of pp 1 only"
    experts = expert_rule(deployment.model, pool.slicing)
    if experts is not None:
        yield f"{place}: dp {pool.dp}, ep {pool.ep}; expected {experts}"
    rule = tp_rule(deployment.model, pool.tp)
    if rule is not None:
        yield f"{place}.tp: {pool.tp}; expected {rule}"
    yield from _groups(deployment, pool, target)
    if pool.max_num_batched_tokens < pool.max_num_seqs:
        yield (
            f"{place}.max_num_batched_tokens: {pool.max_num_batched_tokens}; "
            f"at least max_num_seqs = {pool.max_num_seqs}"
        )
    for node in sorted({p.node for p in pool.placement}):
        if not LABEL.fullmatch(node):
            yield f"{place}.placement: {node!r} is no node label (letters, digits, `-`, `_`, `.`)"
    yield from _numbers(deployment, pool, target.kind)


def _groups(deployment: Deployment, pool: Pool, target: Target) -> Iterator[str]:
    copies = redundant_experts(deployment, pool)
    if copies is not None and target.kind == "cpu":
        yield f"model.moe.redundant_experts: {copies}; vLLM balances no experts on a CPU"
    library = deployment.engine.all_to_all
    if library is not None and pool.slicing.routes_tokens:
        without = "(plan without all_to_all and two_batch_overlap)"
        if target.kind == "cpu":
            yield f"engine.all_to_all: {library}; vLLM has it on NVIDIA GPUs alone {without}"
        elif target.deep_ep is False:
            yield (
                f"engine.all_to_all: {library}; the Python package deep_ep is not installed here"
                f" (vLLM's tools/ep_kernels builds it) {without}"
            )


def _numbers(deployment: Deployment, pool: Pool, kind: str) -> Iterator[str]:
    place = f"pools[{pool.role}]"
    engine = deployment.engine
    dtypes = {*DTYPES, *FURTHER_DTYPES[kind]}
    if pool.dtype not in dtypes:
        yield f"{place}.dtype: {pool.dtype}; on a {kind} one of {', '.join(sorted(dtypes))}"
    if engine.kv_dtype not in {pool.dtype, *FURTHER_DTYPES[kind]}:
        yield f"engine.kv_dtype: {engine.kv_dtype} with weights in {pool.dtype} on a {kind}"
    pages = kv_pages(
        replace(deployment.model, kv_dtype=engine.kv_dtype),
        slicing=pool.slicing,
        block_size=engine.block_size,
        drafts=engine.speculative_tokens,
    )
    needed = pages.block_bytes * (pages.blocks(engine.max_model_len) + 1)
    if needed > pool.kv_bytes:
        yield (
            f"{place}.kv_bytes: {pool.kv_bytes:.0f}; one sequence of {engine.max_model_len} tokens "
            f"needs {needed:.0f}"
        )


def _room(deployment: Deployment, target: Target) -> Iterator[str]:
    if target.labels is not None:
        yield from missing_nodes(deployment, target.labels)
        return
    at = [(p.node, gpu) for pool in deployment.pools for p in pool.placement for gpu in p.gpus]
    placed = {gpu for _, gpu in at}
    if len(set(at)) > len(placed):
        # The plan's nodes are raylets of this machine here, whose devices exist only once.
        yield f"placement: {len(at)} devices on several nodes, but all nodes are this machine"
    if target.kind == "gpu" and len(at) > len(set(at)):
        yield "placement: a GPU in two pools; expected each once (cores may be shared, GPUs not)"
    if target.kind == "gpu":
        if missing := sorted(gpu for gpu in placed if gpu >= target.num_gpus):
            way_out = "`serving up --engine simulated` runs the plan without them"
            yield f"placement: GPUs {missing}; this machine has {target.num_gpus} ({way_out})"
        return
    if missing := sorted(placed - target.cores):
        yield f"placement: cores {missing}; this machine has {sorted(target.cores)}"
    needed = _memory_bytes(deployment)
    if needed > target.memory_bytes:
        yield (
            f"memory: about {needed / 1e9:.1f} GB needed, {target.memory_bytes / 1e9:.1f} GB free "
            "(fewer replicas, or a smaller kv_bytes)"
        )


def missing_nodes(deployment: Deployment, labels: tuple[dict[str, str], ...]) -> Iterator[str]:
    """Yield findings on an existing cluster: it has a node for each part of the placement."""
    for pool in deployment.pools:
        for node in sorted({p.node for p in pool.placement}):
            wanted = {ROLE_LABEL: pool.role, NODE_LABEL: node}
            if not any(wanted.items() <= node_labels.items() for node_labels in labels):
                yield (
                    f"pools[{pool.role}].placement: no node of the cluster is labelled "
                    f"{ROLE_LABEL}={pool.role}, {NODE_LABEL}={node}"
                )


def _memory_bytes(deployment: Deployment) -> float:
    source = Path(deployment.model.source)
    stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    total, lora, model = SYSTEM_BYTES, deployment.engine.lora, deployment.model
    for pool in deployment.pools:
        weights = stored * (2.0 if pool.dtype == "fp32" else 1.0)
        if lora is not None:  # in slots, and once more in host memory
            adapter = adapter_bytes(lora, model, tp=pool.tp, layers=model.num_layers)
            weights += pool.tp * (lora.max_loras + lora.max_cpu_loras) * adapter
        total += pool.engines * (REPLICA_BYTES + weights + pool.tp * pool.kv_bytes)
    return total
