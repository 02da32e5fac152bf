"""What is to run: pools, where their replicas go, and how requests find them."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.routing import POLICIES, POWER_OF_TWO
from minicluster.specs.checks import STRICT, fraction, not_negative, one_of, positive
from minicluster.specs.model import ModelSpec
from minicluster.specs.slicing import Slicing

ROLES = ("prefill", "decode", "mixed")

ROLE_LABEL = "minicluster-role"
"""Label of a Ray node: the role of the pool whose devices it holds."""

NODE_LABEL = "minicluster-node"
"""Label of a Ray node: `node` of the placement that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """
    Settings that all replicas share.

    Attributes:
        max_model_len: tokens of the longest sequence.
        block_size: tokens of a KV block.
        gpu_memory_utilization: share of a GPU's memory that the engine takes.
        chunked_prefill_tokens: most tokens of one prompt in a step
            (`long_prefill_token_threshold`); 0: the token budget.
    """

    __pydantic_config__ = STRICT

    name: str
    version: str
    max_model_len: int
    block_size: int
    kv_dtype: str
    gpu_memory_utilization: float
    chunked_prefill_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        positive(
            **{
                "engine.max_model_len": self.max_model_len,
                "engine.block_size": self.block_size,
            }
        )
        fraction(**{"engine.gpu_memory_utilization": self.gpu_memory_utilization})
        not_negative(**{"engine.chunked_prefill_tokens": self.chunked_prefill_tokens})


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs (on a CPU: cores) of one node that one replica runs on; a node is known by its label."""

    __pydantic_config__ = STRICT

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """
    Replicas of one role.

    Attributes:
        max_num_seqs: sequences of one copy of attention (`max_num_seqs`), shared by its stages.
        max_num_batched_tokens: token budget of one step (`max_num_batched_tokens`).
        kv_bytes: KV cache per GPU.
        placement: one entry a node of each replica, replica after replica; a replica wider
            than a node takes several entries.
        dp: copies of attention in one replica, each with its own requests.
        spare_replicas: of the replicas, those that the SLO does not need.
        ray_accelerator: accelerator type that Ray is asked for; `None`: Ray has no name for it.
    """

    __pydantic_config__ = STRICT

    role: str
    replicas: int
    tp: int
    pp: int
    ep: int
    gpu: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: float
    placement: tuple[Placement, ...]
    dp: int = 1
    spare_replicas: int = 0
    ray_accelerator: str | None = None

    def __post_init__(self) -> None:
        """Check role and counts, and that the placement holds every GPU of every replica."""
        one_of(ROLES, **{"pools[].role": self.role})
        positive(
            **{
                f"pools[{self.role}].{name}": getattr(self, name)
                for name in (
                    "replicas",
                    "tp",
                    "pp",
                    "ep",
                    "dp",
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "kv_bytes",
                )
            }
        )
        not_negative(**{f"pools[{self.role}].spare_replicas": self.spare_replicas})
        placed = sum(len(p.gpus) for p in self.placement)
        if placed != self.gpus:
            raise InputError(
                f"pools[{self.role}].placement",
                f"{placed} GPUs",
                f"{self.gpus}: replicas x tp x pp x dp",
            )
        seen = [(p.node, g) for p in self.placement for g in p.gpus]
        if len(set(seen)) != len(seen):
            raise InputError(f"pools[{self.role}].placement", seen, "each GPU used once")

    @property
    def gpus(self) -> int:
        """GPUs of all replicas together."""
        return self.replicas * self.slicing.gpus

    @property
    def slicing(self) -> Slicing:
        """How a replica's GPUs share the model."""
        return Slicing(tp=self.tp, pp=self.pp, ep=self.ep, dp=self.dp)

    @property
    def lanes(self) -> int:
        """Queues of the pool: every copy of attention and every stage has a batch of its own."""
        return self.replicas * self.dp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Replica choice; prompts up to `local_threshold_tokens` skip the prefill pool."""

    __pydantic_config__ = STRICT

    policy: str = POWER_OF_TWO
    local_threshold_tokens: int = 0
    fallback: str = "fail"

    def __post_init__(self) -> None:
        """Check the names."""
        one_of(tuple(POLICIES), **{"routing.policy": self.policy})
        one_of(("fail", "local"), **{"routing.fallback": self.fallback})
        not_negative(**{"routing.local_threshold_tokens": self.local_threshold_tokens})


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """
    What is to run: the part of a plan that needs no prediction.

    `serving measure` deploys one to take the measurements that a plan is computed from.

    Attributes:
        model: `id` is its name at the endpoint, `source` where a server loads it from.
    """

    __pydantic_config__ = STRICT

    model: ModelSpec
    engine: EngineSettings
    pools: tuple[Pool, ...]
    routing: Routing

    def pool(self, role: str) -> Pool:
        """Return the pool of *role*."""
        for pool in self.pools:
            if pool.role == role:
                return pool
        raise InputError("pools", [p.role for p in self.pools], f"a pool with role {role}")
