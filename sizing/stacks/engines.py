"""Engines of a plan's pools, and what the files of every stack have in common."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import yaml

from minicluster.errors import InputError
from minicluster.plan import Plan, Pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


HEAD = "$HEAD"
"""Shell variable: address of the first node of a replica that takes several."""

FLAGS_PER_LINE = " \\\n  "

Texts = dict[str, str]
"""Text of each file by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines of one pool, all alike, each on *nodes* nodes."""

    plan: Plan
    pool: Pool
    nodes: int

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one replica on each of its nodes."""
        return self.pool.slicing.gpus // self.nodes


Pools = dict[str, Engines]
"""Engines by role."""


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


def commands(pools: Pools, lines: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    """
    Return each pool's commands under a comment with the number of its replicas.

    Args:
        lines: words of each node's command by role; one command for several nodes is started on
            all of them by a launcher.
    """
    parts = []
    for role, engines in pools.items():
        where = f"{engines.pool.slicing.gpus} GPUs of one node"
        if engines.nodes > 1:
            how = "its ranks started by mpirun or srun with trtllm-llmapi-launch"
            if len(lines[role]) > 1:
                how = f"{HEAD} is the first one's address: set it"
            where = f"{engines.pool.slicing.gpus} GPUs of {engines.nodes} nodes; {how}"
        named = f"{role}: " if len(pools) > 1 else ""
        text = f"# {named}{engines.pool.replicas} replicas, each on {where}\n"
        for number, words in enumerate(lines[role]):
            text += (f"# node {number}\n" if len(lines[role]) > 1 else "") + shell(words) + "\n"
        parts.append(text)
    return parts


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


def yaml_text(document: Mapping[str, Any]) -> str:
    """Write a document as YAML, its keys in their order."""
    text: str = yaml.safe_dump(dict(document), sort_keys=False, width=100)
    return text


def dns_name(model_id: str) -> str:
    """Return a model's name as Kubernetes takes names."""
    return re.sub(r"[^a-z0-9-]+", "-", model_id.lower()).strip("-")[:50]


def gpu_resources(engines: Engines) -> dict[str, dict[str, str]]:
    """Return the GPUs that a pod asks for, as Kubernetes writes them."""
    return {kind: {"nvidia.com/gpu": str(engines.gpus_per_node)} for kind in ("limits", "requests")}
