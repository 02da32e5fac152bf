"""`sizing export`: a plan as files of other serving stacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from minicluster.errors import InputError
from minicluster.plan.vllm_args import KV_ROLES
from minicluster.specs.checks import one_of
from sizing.latency.memory import stage_weight_bytes
from sizing.stacks.arguments import (
    FLAGS_PER_LINE,
    HEAD,
    Engines,
    engine_arguments,
    engines_of,
    flags,
    sglang,
    shell,
    trtllm,
    vllm,
    vllm_words,
)
from sizing.stacks.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minicluster.plan import Plan

PORTS = {"vllm": 8000, "sglang": 30000, "trtllm": 8000}
"""Ports of engines by default."""

Exported = dict[str, str]
"""Text by file name."""


def export(plan: Plan, target: str | None = None, *, image: str | None = None) -> Exported:
    """
    Write a plan for another stack.

    Args:
        target: of `TARGETS`; `None`: the command line of the plan's engine.
        image: container image, where the stack's files name one.

    Raises:
        InputError: no such target; no image where one is needed; a layout that the stack lacks.
    """
    target = target or plan.engine.name
    one_of(TARGETS, **{"--to": target})
    if plan.engine.name not in {"vllm", target}:
        planned = plan.engine.name
        expected = f"{planned}: the plan is of that engine, whose settings and rules it has"
        raise InputError("--to", target, expected, "plan again with engine.name = vllm")
    if target in NEED_IMAGE and image is None:
        raise InputError(
            "--image", None, f"the container image that {target} starts", "such as --image NAME:TAG"
        )
    checked, write = WRITERS[target]
    if plan.engine.kv_offload is not None:
        if target not in OFFLOADING_TARGETS:
            raise InputError(
                "--to",
                target,
                f"one of {', '.join(OFFLOADING_TARGETS)}: the plan has engine.kv_offload, which is"
                " written as vLLM's connectors",
                "plan without kv_offload_host_bytes",
            )
        checked += " Of KV offloading only vLLM's KVTransferConfig was checked; it was never run."
    pools = {pool.role: engines_of(plan, pool) for pool in plan.pools}
    texts = write(plan, pools, image or "")
    return {name: _head(plan, pools, target, checked) + text for name, text in texts.items()}


def _head(plan: Plan, pools: Mapping[str, Engines], target: str, checked: str) -> str:
    """Return the comment above every file: how far it is checked, and what was planned for what."""
    layout = ", ".join(
        f"{role} {each.pool.replicas} x {each.pool.slicing}" for role, each in pools.items()
    )
    planned = f"{plan.engine.name} {plan.engine.version}"
    left = [each for each in LEFT_OUT.get(target, ()) if getattr(plan.engine, each)]
    checked += f" Not carried: {', '.join(f'engine.{each}' for each in left)}." if left else ""
    adapters = "" if plan.engine.lora is None else NAME_ADAPTERS
    return (
        f"# {checked}\n{adapters}"
        f"# {plan.model.id}: {layout}; {plan.cost.gpus} GPUs, by minicluster"
        f" {plan.provenance.version} from inputs {plan.provenance.inputs_hash}.\n"
        f"# Planned for {planned}: predicted latencies are of that engine.\n"
    )


def _vllm(_plan: Plan, pools: Mapping[str, Engines], _image: str) -> Exported:
    parts = [_commands(each, [["vllm", "serve", *line] for line in vllm(each)], pools)
             for each in pools.values()]  # fmt: skip
    note = (
        "# A router sends a prompt to a prefill engine, then its KV cache to a decode engine:"
        " llm-d, production-stack, or a proxy of vLLM's examples.\n"
    )
    return {"vllm.sh": "\n".join([*parts, note] if len(pools) > 1 else parts)}


def _sglang(_plan: Plan, pools: Mapping[str, Engines], _image: str) -> Exported:
    start = ["python3", "-m", "sglang.launch_server"]
    parts = [_commands(each, [[*start, *line] for line in sglang(each)], pools)
             for each in pools.values()]  # fmt: skip
    if len(pools) > 1:
        router = ["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for role in ("prefill", "decode"):
            for number in range(pools[role].pool.replicas):
                router += [f"--{role}", f"http://{role}-{number}:{PORTS['sglang']}"]
        parts.append(f"# router\n{shell(router)}\n")
    return {"sglang.sh": "\n".join(parts)}


def _commands(engines: Engines, lines: list[list[str]], pools: Mapping[str, Engines]) -> str:
    """Return the command of each node of a replica under a comment that says how often."""
    pool = engines.pool
    where = f"{engines.gpus} GPUs of one node"
    if engines.nodes > 1:
        how = "its ranks started by mpirun or srun with trtllm-llmapi-launch"
        if len(lines) > 1:
            how = f"{HEAD} is the first one's address: set it"
        where = f"{engines.gpus} GPUs of {engines.nodes} nodes; {how}"
    role = f"{pool.role}: " if len(pools) > 1 else ""
    text = f"# {role}{pool.replicas} replicas, each on {where}\n"
    for number, words in enumerate(lines):
        text += (f"# node {number}\n" if len(lines) > 1 else "") + shell(words) + "\n"
    return text


def _trtllm(plan: Plan, pools: Mapping[str, Engines], _image: str) -> Exported:
    files = {f"{role}.yaml": _yaml(trtllm(each)) for role, each in pools.items()}
    parts = []
    for role, each in pools.items():
        words = ["trtllm-serve", plan.model.source, "--backend", "pytorch", "--config"]
        parts.append(_commands(each, [[*words, f"{role}.yaml"]], pools))
    if len(pools) > 1:
        servers = {"prefill": "context_servers", "decode": "generation_servers"}
        router: dict[str, Any] = {"hostname": "0.0.0.0", "port": 8000, "backend": "pytorch"}  # noqa: S104
        for role, name in servers.items():
            count = pools[role].pool.replicas
            urls = [f"{role}-{number}:{PORTS['trtllm']}" for number in range(count)]
            router[name] = {"num_instances": count, "urls": urls}
        files["disaggregated.yaml"] = _yaml(router)
        parts.append("# router\ntrtllm-serve disaggregated -c disaggregated.yaml\n")
    return {"trtllm.sh": "\n".join(parts), **files}


def _dynamo(plan: Plan, pools: Mapping[str, Engines], image: str) -> Exported:
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": {"image": image}},
        }
    }
    for role, each in pools.items():
        words = vllm_words(each, transfers=False)
        command = ["python3", "-m", "dynamo.vllm"]
        worker: dict[str, Any] = {
            "componentType": "worker",
            "replicas": each.pool.replicas,
            "resources": {"limits": {"gpu": str(each.gpus_per_node)}},
            "extraPodSpec": {"mainContainer": {"image": image, "command": command}},
        }
        if role != "mixed":
            worker["subComponentType"] = role
            words.append(f"--is-{role}-worker")
        if each.nodes > 1:  # the operator gives each node its rank and address
            worker["multinode"] = {"nodeCount": each.nodes}
        worker["extraPodSpec"]["mainContainer"]["args"] = ["--model", *words]
        services[f"Vllm{role.capitalize()}Worker"] = worker
    document = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": _dns_name(plan.model.id)},
        "spec": {"services": services},
    }
    return {"dynamo.yaml": _yaml(document)}


def _llm_d(plan: Plan, pools: Mapping[str, Engines], image: str) -> Exported:
    # Room for a checkpoint: weights of all GPUs of a replica, and a tenth more.
    slicing = plan.pools[0].slicing
    per_stage_gpu = sum(stage_weight_bytes(plan.model, slicing))
    gib = int(1.1 * per_stage_gpu * (slicing.gpus / slicing.pp) / 2**30) + 1
    values: dict[str, Any] = {
        "multinode": any(each.nodes > 1 for each in pools.values()),
        "modelArtifacts": {
            "name": plan.model.id,
            "uri": f"hf://{plan.model.source}",
            "size": f"{gib}Gi",
        },
        "routing": {"servicePort": PORTS["vllm"]},
    }
    for role, name in (("decode", "decode"), ("mixed", "decode"), ("prefill", "prefill")):
        if role in pools:
            values[name] = _llm_d_pool(pools[role], image)
    values.setdefault("prefill", {"create": False})
    return {"values.yaml": _yaml(values)}


def _llm_d_pool(engines: Engines, image: str) -> dict[str, Any]:
    pool, sliced = engines.pool, {"tensor_parallel_size", "data_parallel_size"}
    return {
        "create": True,
        "replicas": pool.replicas,
        "parallelism": {
            "tensor": pool.tp,
            "data": pool.dp,
            "dataLocal": max(1, pool.dp // engines.nodes),
            "workers": engines.nodes,
        },
        "containers": [
            {
                "name": "vllm",
                "image": image,
                "modelCommand": "vllmServe",
                "args": _flags_without(engines, sliced),
                "env": _nixl_environment(engines),
                "resources": _resources(engines),
                "mountModelVolume": True,
            }
        ],
    }


def _kserve(plan: Plan, pools: Mapping[str, Engines], image: str) -> Exported:
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
        "metadata": {"name": _dns_name(plan.model.id)},
        "spec": spec,
    }
    return {"kserve.yaml": _yaml(document)}


def _kserve_pool(engines: Engines, image: str) -> dict[str, Any]:
    pool = engines.pool
    said = {"tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"}
    arguments = shell(_flags_without(engines, said)).replace(FLAGS_PER_LINE, " ")
    container = {
        "name": "main",
        **({"image": image} if image else {}),
        "env": [{"name": "VLLM_ADDITIONAL_ARGS", "value": arguments}, *_nixl_environment(engines)],
        "resources": _resources(engines),
    }
    parallelism: dict[str, Any] = {"tensor": pool.tp}
    if pool.dp > 1:
        parallelism |= {"data": pool.dp, "dataLocal": pool.dp // engines.nodes}
    if pool.ep > 1:
        parallelism["expert"] = True
    template = {"containers": [container]}
    workers = {"worker": template} if engines.nodes > 1 else {}
    return {"replicas": pool.replicas, "parallelism": parallelism, "template": template, **workers}


def _flags_without(engines: Engines, said: set[str]) -> list[str]:
    """Return vLLM's flags without those that a stack's own words say; KV caches go both ways."""
    arguments = engine_arguments(engines, kv_role=None)
    return flags({name: value for name, value in arguments.items() if name not in said})


def _nixl_environment(engines: Engines) -> list[dict[str, Any]]:
    """Return the address at which a pod offers its KV cache; nothing where pools are mixed."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    known = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address}
    return [] if engines.pool.role == "mixed" else [known]


def _resources(engines: Engines) -> dict[str, dict[str, str]]:
    return {kind: {"nvidia.com/gpu": str(engines.gpus_per_node)} for kind in ("limits", "requests")}


def _ray(plan: Plan, pools: Mapping[str, Engines], _image: str) -> Exported:
    """
    Return a Serve config of Ray's own LLM applications, without this project's endpoint.

    `serving manifest` deploys the same plan with its admission, routing and keys.
    """
    configs: dict[str, Any] = {}
    for role, each in pools.items():
        accelerator = each.pool.ray_accelerator
        configs[role] = {
            "model_loading_config": {
                "model_id": plan.model.id,
                "model_source": plan.model.source,
            },
            **({"accelerator_type": accelerator} if accelerator else {}),
            "engine_kwargs": engine_arguments(each, kv_role=KV_ROLES.get(role)),
            "deployment_config": {"num_replicas": each.pool.replicas},
        }
    if "mixed" in configs:
        path, args = "build_openai_app", {"llm_configs": [configs["mixed"]]}
    else:
        path, args = "build_pd_openai_app", {f"{role}_config": configs[role] for role in KV_ROLES}
    application = {"name": "llm", "route_prefix": "/", "import_path": f"ray.serve.llm:{path}"}
    return {"ray-serve-llm.yaml": _yaml({"applications": [application | {"args": args}]})}


def _yaml(document: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(document), sort_keys=False, width=100)
    return text


def _dns_name(model_id: str) -> str:
    """Return a model's name as Kubernetes takes names."""
    return re.sub(r"[^a-z0-9-]+", "-", model_id.lower()).strip("-")[:50]


CHECKED = "Checked in a test with the argument parser of vLLM 0.29.0."
CHECKED_RAY = "Checked in a test with the schemas of Ray Serve LLM 2.60.0."

NAME_ADAPTERS = (
    "# LoRA: name the adapters, NAME=PATH of --lora-modules (vLLM) or --lora-paths (SGLang).\n"
)
"""Comment of files for a plan with slots for adapters, which says none of their paths."""

LEFT_OUT = {"trtllm": ("all_to_all", "chunked_prefill_tokens")}
"""Settings of engines for which a stack's files have no word."""

OFFLOADING_TARGETS = ("vllm", "llm-d", "kserve", "ray")
"""Stacks whose files name vLLM's connectors."""

NEED_IMAGE = ("dynamo", "llm-d")

WRITERS: dict[str, tuple[str, Callable[[Plan, Mapping[str, Engines], str], Exported]]] = {
    "vllm": (CHECKED, _vllm),
    "sglang": ("not validated: SGLang's argument parser does not install beside vLLM.", _sglang),
    "trtllm": ("not validated: TensorRT-LLM installs on GPU machines only.", _trtllm),
    "dynamo": ("not validated: the schema of DynamoGraphDeployment is not on the package index.",
               _dynamo),
    "llm-d": ("not validated: the chart llm-d-modelservice is not on the package index.", _llm_d),
    "kserve": ("not validated: the schema of LLMInferenceService is alpha.", _kserve),
    "ray": (CHECKED_RAY, _ray),
}  # fmt: skip
"""Per target how far its files are checked (their first line), and what writes them."""
