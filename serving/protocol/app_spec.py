"""What `serving up` starts, as plain values: raylets, pools and the endpoint's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.true_steps import TrueSteps
from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.protocol.messages import EndpointConfig

APP = "minicluster"
"""Name of the Ray Serve application."""

INGRESS, GATE = "Ingress", "Gate"
"""Names of the deployments of the endpoint processes and of the gate."""

CORES = "MINICLUSTER_CORES"
"""Environment variable: cores of each replica; `;` separates replicas, `|` workers."""

DEVICES_LABEL = "minicluster-devices"
"""Label of a raylet that `serving scale` moved to another pool: its devices, separated by `_`."""

GENERATION_LABEL = "minicluster-generation"
"""Label of a raylet that `serving up --replace` started: the generation of its replicas."""

POOL_NAME = re.compile(r"(?P<role>[A-Z][a-z]+)(?:-d\d+)?(?:-g(?P<generation>\d+))?:")
"""Start of the name of a pool's Ray Serve deployment, as `pool_prefix` writes it."""


def pool_prefix(role: str, domain: str, generation: int) -> str:
    """Return the start of a deployment's name; *domain* is empty where there is only one."""
    parts = [role.capitalize(), domain, f"g{generation}" if generation > 1 else ""]
    return "-".join(filter(None, parts)) + ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """
    One raylet: the devices of one planned node that belong to one pool.

    If it was *moved*, the plan assigned its devices to another pool; on a CPU its replica reads
    them from a label. Those of a later *generation* are beside others of the same node and role.
    """

    node: str
    role: str
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    moved: bool = False
    generation: int = 1

    @property
    def labels(self) -> dict[str, str]:
        """Labels that the pool's replicas select it by."""
        labels = {ROLE_LABEL: self.role, NODE_LABEL: self.node}
        if self.moved:
            labels[DEVICES_LABEL] = "_".join(map(str, self.cores or self.gpus))
        if self.generation > 1:
            labels[GENERATION_LABEL] = str(self.generation)
        return labels


def planned_cores(cores: str, rank: int, labels: Mapping[str, str]) -> str:
    """
    Return the cores of the replica of this *rank*, its workers separated by `|`.

    *cores* is the value of `CORES`; a moved raylet names its cores itself, in its *labels*.
    """
    if DEVICES_LABEL in labels:
        return labels[DEVICES_LABEL].replace("_", "|")
    replicas = cores.split(";")
    return replicas[rank % len(replicas)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """
    The simulated engines of one pool; seconds are the plan's.

    Attributes:
        slowdown: clock seconds for each of them.
        limits: of each lane, or rank.
        lanes: batches of one replica, each with its own queue and KV cache.
        ranks: size of its group, each rank with one lane; 1: it is no group.
        lora: slots for adapters of each lane.
        steps: step times, and the way to an engine and of KV caches between two.
        keeps_steps: whether these are not the plan's, so that the engines report their steps.
        lease_s: time for which a prefill engine keeps a KV cache.
        source: directory of the model, which may hold a tokenizer.
        unasked_tokens: length of an answer that names none.
        facts: settings that the plan decides, as vLLM reports them.
        places: labels of the planned node of each replica, by its rank.
    """

    role: str
    slowdown: float
    limits: EngineLimits
    lanes: int
    ranks: int
    lora: LoraLimits | None
    steps: TrueSteps
    keeps_steps: bool
    lease_s: float
    model: str
    adapters: tuple[str, ...]
    source: str
    vocab_size: int
    max_model_len: int
    unasked_tokens: int
    facts: dict[str, Any]
    places: tuple[dict[str, str], ...]


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
    """
    Everything that `serving up` starts; the same input gives the same value.

    Attributes:
        endpoints: number of endpoint processes, which listen at one port.
        endpoint_hosts: hosts over which they are spread; 1: all are on the head's.
    """

    model_id: str
    pools: tuple[ServedPool, ...]
    nodes: tuple[RayNode, ...]
    endpoint: EndpointConfig
    endpoints: int = 1
    endpoint_hosts: int = 1

    def of(self, role: str) -> tuple[ServedPool, ...]:
        """Return the pools of one role, one per domain."""
        return tuple(pool for pool in self.pools if pool.role == role)

    @property
    def servers(self) -> tuple[ServedPool, ...]:
        """The pools that answer requests."""
        return self.of("decode") or self.of("mixed")
