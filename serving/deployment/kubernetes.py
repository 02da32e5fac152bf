"""A plan as Kubernetes objects for KubeRay: a ConfigMap, a NetworkPolicy and a RayService."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from serving.deployment.feasibility import RAY
from serving.deployment.manifest import KEYS_NAME, KEYS_PATH, as_yaml, ray_serve, rendered

if TYPE_CHECKING:
    from serving.deployment.manifest import Manifest

PLAN_DIRECTORY = "/etc/minicluster"


def ray_service(manifest: Manifest) -> str:
    """Return the YAML of a ConfigMap with the plan, of a NetworkPolicy and of a RayService."""
    _, documents = rendered(
        "kuberay.yaml.j2",
        manifest=manifest,
        serve_config=as_yaml(ray_serve(manifest)),
        ray=RAY,
        plan_directory=PLAN_DIRECTORY,
        keys_name=KEYS_NAME,
        keys_directory=str(Path(KEYS_PATH).parent),
    )
    return as_yaml(*documents)
