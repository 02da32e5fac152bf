"""A plan as Kubernetes objects for KubeRay: a ConfigMap, a NetworkPolicy and a RayService."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.deployment.feasibility import RAY
from serving.deployment.manifest import KEYS_NAME, KEYS_PATH, as_yaml, ray_serve

if TYPE_CHECKING:
    from serving.deployment.manifest import Manifest
    from serving.protocol.app_spec import RayNode

NAME = "minicluster"
PLAN_DIRECTORY = "/etc/minicluster"
CLAIM = "minicluster-model"
"""Name of the PersistentVolumeClaim with the model, where the plan names a directory."""

MEMBER = {"minicluster": NAME}
"""Label of the cluster's pods; KubeRay generates the name of the cluster itself."""

OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
"""Label of KubeRay's operator, set by its Helm chart."""

OPERATOR_PORTS = (8265, 52365)
"""Ports of the head's dashboard and its agent, to which the operator sends the configuration."""

HEAD_CPU = "4"
"""CPUs of the head: Ray's own processes, the proxy and the endpoint."""


def ray_service(manifest: Manifest) -> str:
    """
    Return the YAML of a ConfigMap with the plan, of a NetworkPolicy and of a RayService.

    The RayService is of ray.io/v1, KubeRay 1.5.1 or later, whose operator makes the token of the
    cluster's processes, as a Secret.

    Each raylet of the plan is a worker group of its own, because its labels are those of one node;
    KubeRay takes them at the group and refuses them among Ray's start parameters. No memory is
    requested, because no plan says how much the host's processes need.
    """
    labels = {"app.kubernetes.io/name": NAME}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-plan", "labels": labels},
        "data": {"plan.json": manifest.plan},
    }
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {
            "serveConfigV2": as_yaml(ray_serve(manifest)),
            "rayClusterConfig": {
                "rayVersion": RAY,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _head(manifest)},
                "workerGroupSpecs": [_group(manifest, node) for node in manifest.served.nodes],
            },
        },
    }
    return as_yaml(config_map, _policy(manifest, labels), service)


def _policy(manifest: Manifest, labels: dict[str, str]) -> dict[str, Any]:
    """Return the network policy: the cluster's own pods, the operator, and the endpoint's port."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {
            "podSelector": {"matchLabels": MEMBER},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": MEMBER}}]},
                {"from": [operator], "ports": [_tcp(port) for port in OPERATOR_PORTS]},
                {"ports": [_tcp(manifest.port)]},
            ],
        },
    }


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def _head(manifest: Manifest) -> dict[str, Any]:
    """Return the pod of the head; it alone has the API keys, for the endpoint."""
    pod = _pod(manifest, "ray-head", {"cpu": HEAD_CPU})
    if not manifest.open_access:
        (container,) = pod["spec"]["containers"]
        mount = {"name": "keys", "mountPath": str(Path(KEYS_PATH).parent), "readOnly": True}
        container["volumeMounts"].append(mount)
        pod["spec"]["volumes"].append({"name": "keys", "secret": {"secretName": KEYS_NAME}})
    return pod


def _group(manifest: Manifest, node: RayNode) -> dict[str, Any]:
    devices = {"nvidia.com/gpu": str(len(node.gpus))} if node.gpus else {}
    workers = len(node.cores) or len(node.gpus)
    return {
        "groupName": f"{node.role}-{node.node}".lower().replace("_", "-").replace(".", "-"),
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "labels": node.labels,
        "rayStartParams": {"num-cpus": str(workers)},
        "template": _pod(manifest, "ray-worker", {"cpu": str(workers), **devices}),
    }


def _pod(manifest: Manifest, container: str, limits: dict[str, str]) -> dict[str, Any]:
    mounts = [
        {"name": "plan", "mountPath": PLAN_DIRECTORY},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  (the pod's own)
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "plan", "configMap": {"name": f"{NAME}-plan"}},
        # Shared by the processes of one pod: vLLM's workers and Ray's objects.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if manifest.model_source.startswith("/"):
        mounts.append({"name": "model", "mountPath": manifest.model_source})
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": CLAIM}})
    return {
        "metadata": {"labels": MEMBER},
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": manifest.image,
                    "resources": {"limits": limits, "requests": limits},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }
