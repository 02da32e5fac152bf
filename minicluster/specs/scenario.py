"""A scenario file, before its names are looked up in the catalogs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.routing import LEAST_TOKENS, POLICIES
from minicluster.specs.checks import Count, Fraction, Positive, Spec, choice, one_of
from minicluster.specs.lora import MODULES
from minicluster.specs.model import Dtype
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import MOST_TOKENS, WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice(Spec):
    """
    `[model]`: which model, and in which precision.

    Attributes:
        id: catalog name, hub id of the catalog, or path to a `config.json` or its directory.
        weight_dtype: of the weights that are quantised; absent: as published.
        kv_dtype: of cached keys and values; absent: as the checkpoint declares, else as the model
            computes.
        max_context_tokens: longest sequence to serve; absent: the model's own limit.
        assumed_context_tokens: a limit beyond the model's own, as if it had been trained for it; an
            assumption that every answer repeats.
    """

    _TABLE: ClassVar[str] = "model"

    id: str
    weight_dtype: Dtype | None = None
    kv_dtype: Dtype | None = None
    max_context_tokens: int | None = None
    assumed_context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice(Spec):
    """
    `[cluster]`: a preset, or a GPU and how many of it share a node.

    Attributes:
        preset: name of a cluster preset; the other keys go over what it says.
        gpu: name of a GPU in the catalog, needed without a preset.
        gpus_per_node: GPUs that share a host, needed without a preset.
        max_gpus: the budget, needed without a preset.
        price_usd_per_gpu_hour: what you pay for one GPU; absent: as cost.prices says.
        power_w_per_gpu: at the wall, with its share of host, network and cooling; absent: the
            datasheet's power of the GPU alone.
        energy_usd_per_kwh: price of energy where it is paid apart; absent: in the price of the GPU.
        pools_meet_in: tier of the preset's network within which prefill and decode replicas are
            placed; absent: the innermost one that holds max_gpus.
        gpu_mtbf_s: mean time between failures of one GPU that stop its replica; absent: the
            preset's.
        repair_s: until a failed replica serves again; absent: the preset's.
    """

    _TABLE: ClassVar[str] = "cluster"

    preset: str | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    max_gpus: int | None = None
    price_usd_per_gpu_hour: float | None = None
    power_w_per_gpu: float | None = None
    energy_usd_per_kwh: float | None = None
    pools_meet_in: str | None = None
    gpu_mtbf_s: float | None = None
    repair_s: float | None = None

    def _check(self) -> None:
        if self.preset is None and self.gpu is None:
            raise InputError("cluster", None, "a `preset`, or a `gpu` with `gpus_per_node`")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice(Spec):
    """
    `[engine]`: an engine profile, and limits of its scheduler and KV cache.

    Attributes:
        name: engine with a profile.
        version: version with a profile, in full or without its last number; absent: the newest
            that can be deployed.
        max_num_seqs: sequences that may run at a time on one copy of attention; the plan's batch
            limit is lower where memory or the SLO asks for it; absent: the engine's default for
            the GPU's memory, like the next key.
        max_num_batched_tokens: most tokens in a step, prompts and decoded ones.
        chunked_prefill_tokens: most tokens of one prompt in a step; absent: max_num_batched_tokens.
        gpu_memory_utilization: share of a GPU's memory that the engine takes, weights included;
            absent: the engine's default.
        block_size: tokens of a KV block; absent: the engine's default for the device.
        speculative_tokens: tokens that the model's draft head drafts for each sequence and step,
            which one step verifies together; absent or 0: no speculative decoding.
        mean_accepted_tokens: of these, accepted on average; the token that every step gives is not
            counted. It depends on the texts: measure it (vLLM's counters of accepted tokens and of
            drafts), or take what is published for the model.
        redundant_experts: copies of popular experts in each layer, which the engine's load balancer
            (EPLB) places where groups of GPUs hold whole experts; 0: it only moves experts; absent:
            no balancer.
        all_to_all: library that sends tokens to the ranks of their experts (deepep), in split pools
            of data-parallel ranks with whole experts; absent: the engine's own way.
        two_batch_overlap: such a pool splits its steps in two halves, of which one communicates
            while the other computes (vLLM's DBO, SGLang's TBO); asks for all_to_all.
        watermark_fraction: share of the KV blocks that stays free while requests are admitted
            beside others (vLLM's `watermark`): running ones are preempted less often; absent: 0.
        kv_offload_host_bytes: host memory per GPU for KV blocks that prompts find again (vLLM's
            OffloadingConnector); a copy of every block goes there, so that less than the GPU's KV
            cache gains nothing; absent or 0: none.
        kv_offload_disk_bytes: disk per GPU behind the host memory, which has a copy of every block
            as well; absent or 0: none.
        kv_offload_disk_bytes_per_s: rate at which a GPU's blocks are read from there: measure it.
        kv_offload_disk_path: folder of these blocks' files on every node.
        max_loras: distinct LoRA adapters in a batch; as many slots for adapters take GPU memory.
            It needs workload.lora_adapters; absent: no adapters.
        max_lora_rank: rank of the slots, and of the adapters; absent: 16, as vLLM's.
        max_cpu_loras: adapters in host memory, from which they are copied to slots; absent: all of
            workload.lora_adapters.
        lora_target_modules: layers that adapters change, of qkv_proj, o_proj, gate_up_proj and
            down_proj; empty: all of them.
    """

    _TABLE: ClassVar[str] = "engine"

    name: str = "vllm"
    version: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chunked_prefill_tokens: int | None = None
    gpu_memory_utilization: Fraction | None = None
    block_size: int | None = None
    speculative_tokens: int | None = None
    mean_accepted_tokens: float | None = None
    redundant_experts: int | None = None
    all_to_all: str | None = None
    two_batch_overlap: bool | None = None
    watermark_fraction: float | None = None
    kv_offload_host_bytes: float | None = None
    kv_offload_disk_bytes: float | None = None
    kv_offload_disk_bytes_per_s: float | None = None
    kv_offload_disk_path: str | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    lora_target_modules: tuple[Annotated[str, choice(*MODULES)], ...] = ()


YOURS, CATALOG = "yours", "catalog"
"""Prices that there are: the scenario's alone, or also the list prices of configs/prices.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostChoice(Spec):
    """
    `[cost]`: where prices come from, and budgets beside cluster.max_gpus.

    Attributes:
        prices: `yours`: those of this scenario, and no others; `catalog`: for a GPU without one,
            the median of the public list prices in configs/prices.toml.
        max_usd_per_hour: budget of the plan, energy included where it is paid apart; absent: none.
        max_power_w: budget of the plan, of the same watts as its cost (cluster.power_w_per_gpu or
            the datasheet's); absent: none.
    """

    _TABLE: ClassVar[str] = "cost"

    prices: Annotated[str, choice(YOURS, CATALOG)] = YOURS
    max_usd_per_hour: float | None = None
    max_power_w: float | None = None


MIDDLE, SUREST = 0.5, 0.99
"""Confidence that may be asked for: beyond, a few hundred measured rows say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChoice(Spec):
    """
    `[search]`: what the search may choose from.

    Attributes:
        tp: tensor-parallel degrees to try; empty: all legal ones.
        max_utilisation_fraction: no pool is planned above this share of its capacity.
        objective: what the plan has least of: `gpus`, `usd` (price per hour) or `watts`.
        confidence_fraction: chance that the SLO holds, of arrivals and of the step-time model's
            own error.
        layouts: `deployable`: what the engine profile can pair, for models with experts also
            groups of data-parallel ranks; `any`: also pipelines, which `serving up` refuses.
        pools: `split` into prefill and decode, `mixed` (aggregated), or `any`: the better one.
        class_pools: `shared` by all classes of requests, each class on its `own`, or `any`: the
            cheaper.
        gpus: names of the GPUs that a pool may be made of; empty: the cluster's. With several,
            prefill may run on one kind and decode on another.
        prices_usd_per_gpu_hour: what you pay for one GPU, by name, where kinds differ.
        spare_replicas: k of N + k: replicas of each pool beyond those that hold the SLO.
        availability_fraction: share of the time in which every pool has the replicas that hold
            the SLO: spares are added to each from the cluster's failures; absent: none.
        local_threshold_tokens: prompts up to this length are computed by their decode replica;
            0: none; absent: the search chooses where prompts differ.
        routing: policy by which the endpoint chooses a prefill replica: least-tokens (fewest prompt
            tokens outstanding), prefix-aware (fewest to compute, of this prompt as well, without
            those in its prefix cache; also in aggregated pools), power-of-two (the less loaded of
            two), round-robin or random.
    """

    _TABLE: ClassVar[str] = "search"

    tp: tuple[Count, ...] = ()
    max_utilisation_fraction: Fraction = 0.95
    objective: Annotated[str, choice("gpus", "usd", "watts")] = "gpus"
    confidence_fraction: float = 0.9
    layouts: Annotated[str, choice("deployable", "any")] = "deployable"
    pools: Annotated[str, choice("split", "mixed", "any")] = "any"
    class_pools: Annotated[str, choice("shared", "own", "any")] = "any"
    gpus: tuple[str, ...] = ()
    prices_usd_per_gpu_hour: dict[str, Positive] = field(default_factory=dict)
    spare_replicas: int = 0
    availability_fraction: float | None = None
    local_threshold_tokens: int | None = None
    routing: str = field(default=LEAST_TOKENS, metadata={"choices": tuple(POLICIES)})

    def _check(self) -> None:
        one_of(tuple(POLICIES), **{"search.routing": self.routing})
        if len(set(self.gpus)) != len(self.gpus):
            raise InputError("search.gpus", self.gpus, "no GPU named twice")
        if self.spare_replicas and self.availability_fraction is not None:
            raise InputError(
                "search.spare_replicas",
                self.spare_replicas,
                "0 beside availability_fraction, which decides the spares",
            )
        if self.pools == "mixed" and self.local_threshold_tokens:
            raise InputError(
                "search.local_threshold_tokens",
                self.local_threshold_tokens,
                '0 with search.pools = "mixed": its replicas compute every prompt themselves',
            )


LIMITS = {
    "model.max_context_tokens": (1, 100_000_000),
    "model.assumed_context_tokens": (1, 100_000_000),
    "cluster.gpus_per_node": (1, 1_024),
    "cluster.max_gpus": (1, 131_072),  # beyond, a search is no matter of minutes
    "cluster.price_usd_per_gpu_hour": (1e-6, 10_000),
    "cluster.power_w_per_gpu": (1, 100_000),
    "cluster.energy_usd_per_kwh": (1e-6, 100),
    "cluster.gpu_mtbf_s": (60, 999_999_999),
    "cluster.repair_s": (1, 100_000_000),
    "cost.max_usd_per_hour": (1e-6, 1_000_000_000),
    "cost.max_power_w": (1, 10_000_000_000),
    "workload.users": (1, 10_000_000),
    "workload.think_s": (0, 86_400),
    "workload.requests_per_s": (1e-6, 1_000_000),
    "workload.input_tokens.max_tokens": (1, MOST_TOKENS),
    "workload.output_tokens.max_tokens": (1, MOST_TOKENS),
    "workload.prefix_tokens": (0, MOST_TOKENS),
    "slo.ttft_s": (1e-6, 3_600),
    "slo.tpot_s": (1e-6, 3_600),
    "slo.itl_s": (1e-6, 3_600),
    "slo.e2e_s": (1e-6, 36_000),
    "engine.max_num_seqs": (1, 65_536),
    "engine.max_num_batched_tokens": (16, 1_048_576),
    "engine.chunked_prefill_tokens": (16, 1_048_576),
    "engine.block_size": (1, 1_024),
    "engine.speculative_tokens": (0, 32),
    "engine.mean_accepted_tokens": (0, 32),
    "engine.watermark_fraction": (0, 0.99),
    "engine.redundant_experts": (0, 4_096),
    "engine.kv_offload_host_bytes": (0, 10_000_000_000_000),
    "engine.kv_offload_disk_bytes": (0, 1_000_000_000_000_000),
    "engine.kv_offload_disk_bytes_per_s": (1_000_000, 1_000_000_000_000),
    "engine.max_loras": (1, 1_000),
    "engine.max_lora_rank": (1, 512),
    "engine.max_cpu_loras": (1, 100_000),
    "workload.lora_adapters": (0, 1_000),
    "workload.lora_popularity_exponent": (0, 10),
    "search.confidence_fraction": (MIDDLE, SUREST),
    "search.spare_replicas": (0, 1_024),
    "search.availability_fraction": (0.5, 0.999_999),
    "search.local_threshold_tokens": (0, 100_000_000),
}
"""Smallest and largest value that is taken for meant; beyond lie slips of unit, not clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSpec(Spec):
    """The one input of `sizing plan`."""

    model: ModelChoice
    cluster: ClusterChoice
    workload: WorkloadSpec
    slo: SloSpec = field(default_factory=SloSpec)
    engine: EngineChoice = field(default_factory=EngineChoice)
    search: SearchChoice = field(default_factory=SearchChoice)
    cost: CostChoice = field(default_factory=CostChoice)

    @property
    def promises(self) -> dict[str, SloSpec]:
        """Limits of each class of requests by its name; without classes `slo` by an empty one."""
        return self.workload.promises(self.slo)

    def _check(self) -> None:
        for key, (low, high) in LIMITS.items():
            for place, value in _values(self, key):
                if value is not None and not low <= value <= high:
                    raise InputError(place, value, f"a number from {low:,} to {high:,}")
        _check_drafts(self.engine)
        _check_offload(self.engine)
        _check_lora(self.engine, self.workload)
        if self.search.class_pools != "any" and not self.workload.classes:
            way_out = "leave it out, or give [[workload.classes]]"
            raise InputError(
                "search.class_pools",
                self.search.class_pools,
                "no such key without classes",
                way_out,
            )


def _values(scenario: ScenarioSpec, key: str) -> Iterator[tuple[str, float | None]]:
    """Yield the value of a key, and those that the classes of requests have for it."""
    table, name, *inner = key.split(".")
    holders: list[tuple[str, object]] = [(table, getattr(scenario, table))]
    for each in scenario.workload.classes:
        if table in {"workload", "slo"}:
            own = (each.place, each) if table == "workload" else (f"{each.place}.slo", each.slo)
            if hasattr(own[1], name):  # adapters are the whole load's
                holders.append(own)
    for place, holder in holders:
        value = getattr(holder, name)
        for attribute in inner:
            value = None if value is None else getattr(value, attribute)
        yield f"{place}.{name}", value


def _check_drafts(engine: EngineChoice) -> None:
    """Refuse drafts without the share that is accepted, or with more accepted than drafted."""
    drafts, accepted = engine.speculative_tokens, engine.mean_accepted_tokens
    if drafts is None and accepted is None:
        return
    if drafts is None or accepted is None:
        key = "speculative_tokens" if drafts is None else "mean_accepted_tokens"
        way_out = "set both, or neither: what drafting gains depends on what is accepted"
        raise InputError(f"engine.{key}", None, "a number beside the other one", way_out)
    if accepted > drafts:
        expected = f"at most engine.speculative_tokens = {drafts}"
        way_out = "an acceptance length counts the token of the step itself, too: take 1 off"
        raise InputError("engine.mean_accepted_tokens", accepted, expected, way_out)


def _check_offload(engine: EngineChoice) -> None:
    """Refuse a disk without host memory before it, with less than that, or without its rate."""
    host, disk = engine.kv_offload_host_bytes or 0, engine.kv_offload_disk_bytes or 0
    rest = {
        "kv_offload_disk_bytes_per_s": engine.kv_offload_disk_bytes_per_s,
        "kv_offload_disk_path": engine.kv_offload_disk_path,
    }
    if disk and (disk <= host or not host):
        expected = f"more than engine.kv_offload_host_bytes = {host:,.0f}, which is above 0"
        way_out = "the disk has a copy of every block in host memory: give both, or no disk"
        raise InputError("engine.kv_offload_disk_bytes", disk, expected, way_out)
    for name, value in rest.items():
        if disk and not value:
            raise InputError(f"engine.{name}", value, "a value beside kv_offload_disk_bytes")
        if value is not None and not disk:
            way_out = "give kv_offload_disk_bytes, or leave it out"
            raise InputError(f"engine.{name}", value, "no such key without a disk", way_out)


def _check_lora(engine: EngineChoice, workload: WorkloadSpec) -> None:
    """Refuse slots without adapters, adapters beyond host memory, and what is not modelled."""
    adapters, slots, most = workload.lora_adapters, engine.max_loras, engine.max_cpu_loras
    if slots is None:
        _check_without_slots(engine, workload)
        return
    if not adapters:
        way_out = "give the number of adapters, or leave out engine.max_loras"
        raise InputError("workload.lora_adapters", adapters, "1 or more beside max_loras", way_out)
    if most is not None and most < max(adapters, slots):
        raise InputError(
            "engine.max_cpu_loras",
            most,
            f"{max(adapters, slots)} or more, all of workload.lora_adapters and of max_loras:"
            " loads from disk are not modelled",
            "leave it out, or give host memory for all adapters",
        )
    for name in ("speculative_tokens", "two_batch_overlap"):
        if getattr(engine, name):
            raise InputError(
                "engine.max_loras", slots, f"no such key with {name}: not modelled together"
            )


def _check_without_slots(engine: EngineChoice, workload: WorkloadSpec) -> None:
    """Refuse adapters, and keys about them, without slots."""
    if workload.lora_adapters:
        expected = "the distinct adapters of a batch, beside workload.lora_adapters"
        raise InputError("engine.max_loras", None, expected, "such as 4")
    keys = {
        "engine.max_lora_rank": engine.max_lora_rank,
        "engine.max_cpu_loras": engine.max_cpu_loras,
        "engine.lora_target_modules": engine.lora_target_modules,
        "workload.lora_popularity_exponent": workload.lora_popularity_exponent,
    }
    for place, value in keys.items():
        if value:
            expected = "no such key without engine.max_loras and workload.lora_adapters"
            raise InputError(place, value, expected, "give both, or leave it out")
