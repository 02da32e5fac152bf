"""Graphs of Dynamo, whose workers are vLLM's engines: written of a plan, and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError
from minicluster.plan.vllm_args import KV_ROLES
from sizing.stacks.documents import engines_of_container, gpus_of, listed, rows, table
from sizing.stacks.engines import Pools, Texts, dns_name, yaml_text
from sizing.stacks.flags import only, positive
from sizing.stacks.vllm import vllm_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan
    from sizing.stacks.script import Launch

KIND = "DynamoGraphDeployment"


def write_dynamo(plan: Plan, pools: Pools, image: str) -> Texts:
    """Return a graph in the words of `v1alpha1`."""
    frontend = {
        "componentType": "frontend",
        "replicas": 1,
        "extraPodSpec": {"mainContainer": {"image": image}},
    }
    services: dict[str, Any] = {"Frontend": frontend}
    for role, engines in pools.items():
        words = ["--model", *vllm_words(engines, transfers=False)]
        words += [] if role == "mixed" else [f"--is-{role}-worker"]
        command = ["python3", "-m", "dynamo.vllm"]
        worker: dict[str, Any] = {
            "componentType": "worker",
            "replicas": engines.pool.replicas,
            "resources": {"limits": {"gpu": str(engines.gpus_per_node)}},
            "extraPodSpec": {"mainContainer": {"image": image, "command": command, "args": words}},
        }
        if role != "mixed":
            worker["subComponentType"] = role
        if engines.nodes > 1:  # the operator gives each node its rank and address
            worker["multinode"] = {"nodeCount": engines.nodes}
        services[f"Vllm{role.capitalize()}Worker"] = worker
    document = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": KIND,
        "metadata": {"name": dns_name(plan.model.id)},
        "spec": {"services": services},
    }
    return {"dynamo.yaml": yaml_text(document)}


def read_dynamo(document: Mapping[str, Any], place: str, notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of a graph in the words of either version of Dynamo's API."""
    version = f"{document.get('apiVersion') or 'nvidia.com/v1alpha1'}"
    if version.rpartition("/")[2] not in {"v1alpha1", "v1beta1"}:
        raise InputError(f"{place}: apiVersion", version, "nvidia.com/v1alpha1 or v1beta1")
    spec = table(document, "spec", place, "spec.services with a worker")
    label = "components" if "components" in spec else "services"
    services = spec.get(label)
    if not isinstance(services, Mapping):
        services = {row.get("name"): row for row in rows(spec, label, place)}
    for name, service in services.items():
        where = f"{place}: spec.{label}.{name}"
        if not isinstance(service, Mapping):
            raise InputError(where, service, "a table")
        kind = service.get("componentType") or service.get("type")
        if kind == "planner":
            notes.append(f"{where}: a planner changes replicas; those of the file are read")
        if kind in ("worker", *KV_ROLES):
            role = service.get("subComponentType") or (kind if kind in KV_ROLES else None)
            if role not in (None, *KV_ROLES):
                shown = role if isinstance(role, str) else Fault("is no text")
                raise InputError(f"{where}: subComponentType", shown, "prefill or decode")
            yield replace(_worker(service, where, spec, notes), role=role)


def _worker(
    service: Mapping[str, Any], place: str, spec: Mapping[str, Any], notes: list[str]
) -> Launch:
    only(service, "dynamo_worker", place)
    if "podTemplate" in service:
        pod = table(table(service, "podTemplate", place), "spec", f"{place}: podTemplate")
        containers = {row.get("name"): row for row in rows(pod, "containers", place)}
        main = containers.get("main", {})
    else:
        main = table(table(service, "extraPodSpec", place), "mainContainer", place)
    variables = [*rows(spec, "envs", place), *rows(service, "envs", place)]
    replicas = service.get("replicas", 1)
    engines = engines_of_container(main, place, notes, replicas=replicas, variables=variables)
    if len(engines) != 1 or not engines[0].dynamo:
        shown = " ".join(map(str, (*listed(main, "command", place), *listed(main, "args", place))))
        expected = "a worker of dynamo.vllm: python3 -m dynamo.vllm"
        raise InputError(place, shown[:60] or None, expected)
    nodes = positive(table(service, "multinode", place).get("nodeCount", 1), f"{place}: nodeCount")
    gpus = gpus_of(service, place) or engines[0].gpus
    return replace(engines[0], gpus=gpus and gpus * nodes)
