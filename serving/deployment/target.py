"""The deployment target: cores, GPUs, memory and software of this machine, or of a cluster."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from minicluster.errors import InputError
from minicluster.machine import installed_version

if TYPE_CHECKING:
    from minicluster.plan import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """
    A machine or cluster to deploy on.

    Attributes:
        kind: `cpu` or `gpu`.
        cores: core numbers that this process may use.
        num_gpus: NVIDIA GPUs of this machine.
        memory_bytes: memory of this machine that can be allocated without swapping.
        ray, vllm: installed versions; `None`: not installed.
        deep_ep: whether DeepEP is installed; `None`: not known, on another machine.
        labels: labels of an existing Ray cluster's nodes; `None`: a new one on this machine.
    """

    kind: str
    system: str
    cores: frozenset[int]
    num_gpus: int
    memory_bytes: int
    ray: str | None
    vllm: str | None
    labels: tuple[dict[str, str], ...] | None = None
    deep_ep: bool | None = None


def this_machine(kind: str, labels: tuple[dict[str, str], ...] | None = None) -> Target:
    """Return the target that this machine is; *labels* as in `Target`."""
    return Target(
        kind=kind,
        system=f"{platform.system()} {platform.machine()}",
        cores=frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()),
        num_gpus=len([*Path("/proc/driver/nvidia/gpus").glob("*")]),
        memory_bytes=psutil.virtual_memory().available,
        ray=_version("ray"),
        vllm=_version("vllm"),
        labels=labels,
        deep_ep=None if labels else find_spec("deep_ep") is not None,
    )


def located(deployment: Deployment, model: str | None = None) -> Deployment:
    """
    Return *deployment* with its model's directory, if it has one, as an absolute path.

    Args:
        deployment: what is to run.
        model: directory of the model on this machine; `None`: that of *deployment*.
    """
    source = model or deployment.model.source
    if is_directory(source):
        source = str(Path(source).absolute())
    return replace(deployment, model=replace(deployment.model, source=source))


def is_directory(source: str) -> bool:
    """Return whether *source* is a directory, existing or not, or else a model's name on a hub."""
    return source.startswith(("/", ".")) or Path(source).is_dir()


def _version(name: str) -> str | None:
    try:
        return installed_version(name)
    except InputError:
        return None
