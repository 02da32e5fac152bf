"""What a scenario file says, before names are looked up in the catalogs."""

from __future__ import annotations

from dataclasses import dataclass, field

from sizing.errors import InputError
from sizing.specs.checks import STRICT, fraction, one_of, positive
from sizing.specs.model import DTYPE_BYTES
from sizing.specs.slo import SloSpec
from sizing.specs.workload import WorkloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """`[model]`: a catalog name, a hub id of the catalog, or a path to a `config.json`."""

    __pydantic_config__ = STRICT

    id: str
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check dtypes and the context."""
        one_of(tuple(DTYPE_BYTES), weight_dtype=self.weight_dtype, kv_dtype=self.kv_dtype)
        positive(max_context_tokens=self.max_context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """`[cluster]`: a preset, or a GPU and how many of it share a node."""

    __pydantic_config__ = STRICT

    preset: str | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    max_gpus: int | None = None
    price_usd_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        """Check that a preset or a GPU is named."""
        positive(
            gpus_per_node=self.gpus_per_node,
            max_gpus=self.max_gpus,
            price_usd_per_gpu_hour=self.price_usd_per_gpu_hour,
        )
        if self.preset is None and self.gpu is None:
            raise InputError("cluster", None, "a `preset`, or a `gpu` with `gpus_per_node`")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """`[engine]`: name and version of an engine profile."""

    __pydantic_config__ = STRICT

    name: str = "vllm"
    version: str = "0.29.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChoice:
    """
    `[search]`: what the search may choose from.

    Attributes:
        tp: tensor-parallel degrees to try; empty: all legal ones.
        max_utilisation_fraction: no pool is planned above this share of its capacity.
    """

    __pydantic_config__ = STRICT

    tp: tuple[int, ...] = ()
    max_utilisation_fraction: float = 0.95

    def __post_init__(self) -> None:
        """Check the degrees and the ceiling."""
        positive(**{f"search.tp[{i}]": tp for i, tp in enumerate(self.tp)})
        fraction(max_utilisation_fraction=self.max_utilisation_fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSpec:
    """The one input of `sizing plan`."""

    __pydantic_config__ = STRICT

    model: ModelChoice
    cluster: ClusterChoice
    workload: WorkloadSpec
    slo: SloSpec = field(default_factory=SloSpec)
    engine: EngineChoice = field(default_factory=EngineChoice)
    search: SearchChoice = field(default_factory=SearchChoice)
