"""Engines of vLLM in Kubernetes: plans for llm-d's chart and for KServe, and pods that are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sizing.latency.memory import stage_weight_bytes
from sizing.stacks.documents import engines_of_container, rows, table
from sizing.stacks.engines import (
    FLAGS_PER_LINE,
    Engines,
    Pools,
    Texts,
    dns_name,
    gpu_resources,
    shell,
    yaml_text,
)
from sizing.stacks.flags import flags
from sizing.stacks.vllm import PORT, engine_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.plan import Plan
    from sizing.stacks.script import Launch

PODS = ("Deployment", "Pod", "ReplicaSet", "StatefulSet")
"""Kinds of documents whose containers are read."""


def write_llm_d(plan: Plan, pools: Pools, image: str) -> Texts:
    """Return values of the chart llm-d-modelservice."""
    # Room for a checkpoint: weights of all GPUs of a replica, and a tenth more.
    slicing = plan.pools[0].slicing
    per_stage_gpu = sum(stage_weight_bytes(plan.model, slicing))
    gib = int(1.1 * per_stage_gpu * (slicing.gpus / slicing.pp) / 2**30) + 1
    values: dict[str, Any] = {
        "multinode": any(engines.nodes > 1 for engines in pools.values()),
        "modelArtifacts": {
            "name": plan.model.id,
            "uri": f"hf://{plan.model.source}",
            "size": f"{gib}Gi",
        },
        "routing": {"servicePort": PORT},
    }
    for role, engines in pools.items():
        values["prefill" if role == "prefill" else "decode"] = _llm_d_pool(engines, image)
    values.setdefault("prefill", {"create": False})
    return {"values.yaml": yaml_text(values)}


def _llm_d_pool(engines: Engines, image: str) -> dict[str, Any]:
    pool = engines.pool
    container = {
        "name": "vllm",
        "image": image,
        "modelCommand": "vllmServe",
        "args": _flags_without(engines, {"tensor_parallel_size", "data_parallel_size"}),
        "env": _nixl_environment(engines),
        "resources": gpu_resources(engines),
        "mountModelVolume": True,
    }
    parallelism = {
        "tensor": pool.tp,
        "data": pool.dp,
        "dataLocal": max(1, pool.dp // engines.nodes),
        "workers": engines.nodes,
    }
    return {
        "create": True,
        "replicas": pool.replicas,
        "parallelism": parallelism,
        "containers": [container],
    }


def write_kserve(plan: Plan, pools: Pools, image: str) -> Texts:
    """Return a LLMInferenceService of KServe."""
    main = pools.get("mixed") or pools["decode"]
    spec: dict[str, Any] = {
        "model": {"uri": f"hf://{plan.model.source}", "name": plan.model.id},
        "router": {"route": {}, "gateway": {}, "scheduler": {}},
        **_kserve_pool(main, image),
    }
    if "prefill" in pools:
        spec["prefill"] = _kserve_pool(pools["prefill"], image)
    document = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "LLMInferenceService",
        "metadata": {"name": dns_name(plan.model.id)},
        "spec": spec,
    }
    return {"kserve.yaml": yaml_text(document)}


def _kserve_pool(engines: Engines, image: str) -> dict[str, Any]:
    pool = engines.pool
    elsewhere = {"tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"}
    arguments = shell(_flags_without(engines, elsewhere)).replace(FLAGS_PER_LINE, " ")
    container = {
        "name": "main",
        **({"image": image} if image else {}),
        "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": arguments}, *_nixl_environment(engines)],
        "resources": gpu_resources(engines),
    }
    parallelism: dict[str, Any] = {"tensor": pool.tp}
    if pool.dp > 1:
        parallelism |= {"data": pool.dp, "dataLocal": pool.dp // engines.nodes}
    if pool.ep > 1:
        parallelism["expert"] = True
    template = {"containers": [container]}
    workers = {"worker": template} if engines.nodes > 1 else {}
    return {"replicas": pool.replicas, "parallelism": parallelism, "template": template, **workers}


def _flags_without(engines: Engines, elsewhere: set[str]) -> list[str]:
    """Return vLLM's flags without those that stand elsewhere; KV caches go both ways."""
    arguments = engine_arguments(engines, kv_role=None)
    return flags({name: value for name, value in arguments.items() if name not in elsewhere})


def _nixl_environment(engines: Engines) -> list[dict[str, Any]]:
    """Return the address at which a pod offers its KV cache; nothing where pools are mixed."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    row = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address}
    return [] if engines.pool.role == "mixed" else [row]


def read_pods(document: Mapping[str, Any], place: str, notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of a document's containers."""
    kind, spec = document["kind"], table(document, "spec", place)
    where = f"{place}: {kind}"
    pod = spec if kind == "Pod" else table(table(spec, "template", where), "spec", where)
    replicas = 1 if kind == "Pod" else spec.get("replicas", 1)
    for container in rows(pod, "containers", where):
        yield from engines_of_container(container, where, notes, replicas=replicas)
