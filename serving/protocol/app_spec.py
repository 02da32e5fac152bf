"""What `serving up` starts, as plain values: raylets, pools and the endpoint's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.protocol.endpoint_config import EndpointConfig
from serving.protocol.simulated_settings import SimulatedSettings

APP = "minicluster"
"""Name of the Ray Serve application."""

CORES = "MINICLUSTER_CORES"
"""Environment variable: cores of each replica; `;` separates replicas, `|` workers."""

DEVICES_LABEL = "minicluster-devices"
"""Label of a raylet that `serving scale` moved to another pool: its devices, separated by `_`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """
    One raylet: the devices of one planned node that belong to one pool.

    If it was *moved*, the plan assigned its devices to another pool; on a CPU its replica reads
    them from a label.
    """

    node: str
    role: str
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    moved: bool = False

    @property
    def labels(self) -> dict[str, str]:
        """Labels that the pool's replicas select it by."""
        found = {ROLE_LABEL: self.role, NODE_LABEL: self.node}
        devices = "_".join(map(str, self.cores or self.gpus))
        return found | ({DEVICES_LABEL: devices} if self.moved else {})


def planned_cores(cores: str, rank: int, labels: Mapping[str, str]) -> str:
    """
    Return the cores of one replica, its workers separated by `|`.

    Args:
        cores: value of `CORES`.
        rank: of the replica in its deployment.
        labels: of its raylet; a moved raylet names its cores itself.
    """
    if DEVICES_LABEL in labels:
        return labels[DEVICES_LABEL].replace("_", "|")
    replicas = cores.split(";")
    return replicas[rank % len(replicas)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPool:
    """
    The replicas of one role in one domain: one Ray Serve deployment.

    The model's name follows *prefix* in the deployment's name; *llm_config* holds the fields of
    `ray.serve.llm.LLMConfig`, of which simulated engines need the `deployment_config` alone.
    """

    role: str
    domain: str
    prefix: str
    name: str
    replicas: int
    llm_config: Mapping[str, Any]
    simulated: SimulatedSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApp:
    """Everything that `serving up` starts; the same input gives the same value."""

    model_id: str
    pools: tuple[ServedPool, ...]
    nodes: tuple[RayNode, ...]
    endpoint: EndpointConfig

    def of(self, role: str) -> tuple[ServedPool, ...]:
        """Return the pools of one role, one per domain."""
        return tuple(pool for pool in self.pools if pool.role == role)

    @property
    def servers(self) -> tuple[ServedPool, ...]:
        """The pools that answer requests."""
        return self.of("decode") or self.of("mixed")
