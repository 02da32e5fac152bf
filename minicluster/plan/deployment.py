"""What is to run: pools, where their replicas go, and how requests find them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.routing import LEAST_TOKENS, POLICIES
from minicluster.specs.checks import (
    Count,
    Fraction,
    NotNegative,
    Positive,
    Spec,
    Whole,
    choice,
    one_of,
)
from minicluster.specs.engine import EngineOptions, EngineRules
from minicluster.specs.lora import LoraSpec
from minicluster.specs.model import ModelSpec
from minicluster.specs.slicing import Slicing

if TYPE_CHECKING:
    from collections.abc import Iterable

ROLE_LABEL = "minicluster-role"
"""Label of a Ray node: the role of the pool whose devices it holds."""

NODE_LABEL = "minicluster-node"
"""Label of a Ray node: `node` of the placement that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffload(Spec):
    """
    KV blocks that pools which compute prompts keep beside the GPUs; bytes are those per GPU.

    Attributes:
        host_bytes: host memory.
        host_bytes_per_s: rate of copies from there, by the name of the GPU.
        disk_bytes: 0: no disk.
        disk_bytes_per_s: rate of reads; `None` without disk, like the next one.
        disk_path: folder of the files.
    """

    _TABLE: ClassVar[str] = "engine.kv_offload"

    host_bytes: Positive
    host_bytes_per_s: dict[str, Positive]
    disk_bytes: NotNegative = 0.0
    disk_bytes_per_s: Positive | None = None
    disk_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(EngineOptions):
    """
    Settings that all replicas share.

    Attributes:
        max_model_len: tokens of the longest sequence.
        block_size: tokens of a KV block.
        gpu_memory_utilization: share of a GPU's memory that the engine takes.
        all_to_all: library that sends tokens to the ranks of their experts; `None`: vLLM's own way.
        kv_offload: `None`: KV blocks are on the GPUs alone.
        lora: adapters, and slots for them; `None`: none.
        rules: of the engine; `None`: the defaults.
    """

    name: str
    version: str
    max_model_len: Count
    block_size: Count
    kv_dtype: str
    gpu_memory_utilization: Fraction
    all_to_all: Annotated[str, choice("deepep")] | None = None
    kv_offload: KvOffload | None = None
    lora: LoraSpec | None = None
    rules: EngineRules | None = None

    def _check(self) -> None:
        if self.two_batch_overlap and self.all_to_all is None:
            place = self._place("two_batch_overlap")
            raise InputError(
                place, self.two_batch_overlap, "no such key without all_to_all", "plan again"
            )
        EngineOptions._check(self)  # noqa: SLF001  (super() knows no class with slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Spec):
    """GPUs (on a CPU: cores) of one node that one replica runs on; a node is known by its label."""

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Spec):
    """
    Replicas of one role.

    Attributes:
        max_num_seqs: sequences of one copy of attention, shared by its stages.
        max_num_batched_tokens: token budget of one step.
        kv_bytes: KV cache per GPU.
        placement: one entry a node of each replica, replica after replica; a replica wider
            than a node takes several entries.
        dp: copies of attention in one replica, each with its own requests.
        spare_replicas: of the replicas, those that the SLO does not need.
        ray_accelerator: accelerator type that Ray is asked for; `None`: Ray has no name for it.
    """

    _TABLE: ClassVar[str] = "pools[{0.role}]"

    role: Annotated[str, choice("prefill", "decode", "mixed")]
    replicas: Count
    tp: Count
    pp: Count
    ep: Count
    gpu: str
    dtype: str
    max_num_seqs: Count
    max_num_batched_tokens: Count
    kv_bytes: Positive
    placement: tuple[Placement, ...]
    dp: Count = 1
    spare_replicas: Whole = 0
    ray_accelerator: str | None = None

    def _check(self) -> None:
        placed = sum(len(p.gpus) for p in self.placement)
        if placed != self.gpus:
            expected = f"{self.gpus}: replicas x tp x pp x dp"
            raise InputError(self._place("placement"), f"{placed} GPUs", expected)
        seen = [(p.node, g) for p in self.placement for g in p.gpus]
        if len(set(seen)) != len(seen):
            raise InputError(self._place("placement"), seen, "each GPU used once")

    @property
    def gpus(self) -> int:
        """GPUs of all replicas together."""
        return self.replicas * self.slicing.gpus

    @property
    def slicing(self) -> Slicing:
        """How a replica's GPUs share the model."""
        return Slicing(tp=self.tp, pp=self.pp, ep=self.ep, dp=self.dp)

    @property
    def engines(self) -> int:
        """Engines of the pool: every copy of attention of every replica is a vLLM engine."""
        return self.replicas * self.dp

    @property
    def lanes(self) -> int:
        """Queues of the pool: every copy of attention and every stage has a batch of its own."""
        return self.engines * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(Spec):
    """Replica choice; prompts up to `local_threshold_tokens` skip the prefill pool."""

    _TABLE: ClassVar[str] = "routing"

    policy: str = LEAST_TOKENS
    local_threshold_tokens: Whole = 0
    fallback: Annotated[str, choice("fail", "local")] = "fail"

    def _check(self) -> None:
        one_of(tuple(POLICIES), **{"routing.policy": self.policy})


def gpus_by_kind(pools: Iterable[Pool]) -> Counter[str]:
    """Return the GPUs of pools, spare replicas included, by kind."""
    used: Counter[str] = Counter()
    for pool in pools:
        used[pool.gpu] += pool.gpus
    return used


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(Spec):
    """
    What is to run: the part of a plan that needs no prediction.

    `serving measure` deploys one to take the measurements that a plan is computed from.

    Attributes:
        model: `id` is its name at the endpoint, `source` where a server loads it from.
    """

    model: ModelSpec
    engine: EngineSettings
    pools: tuple[Pool, ...]
    routing: Routing

    def _check(self) -> None:
        drafts = self.engine.speculative_tokens
        if drafts and self.model.draft is None:
            place, expected = "engine.speculative_tokens", "0: the model has no draft head"
            raise InputError(place, drafts, expected, "plan again with a model that has one")

    def pool(self, role: str) -> Pool:
        """Return the pool of *role*."""
        for pool in self.pools:
            if pool.role == role:
                return pool
        raise InputError("pools", [p.role for p in self.pools], f"a pool with role {role}")
