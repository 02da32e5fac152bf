"""The plan: the only thing that serving and loadtest know of sizing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from sizing.config import parse
from sizing.errors import InputError
from sizing.specs.calibration import CalibrationSpec
from sizing.specs.checks import STRICT, fraction, not_negative, one_of, positive
from sizing.specs.cluster import ClusterSpec
from sizing.specs.engine import EngineProfile
from sizing.specs.gpu import GpuSpec
from sizing.specs.model import ModelSpec
from sizing.specs.scenario import ScenarioSpec
from sizing.specs.slo import SloSpec
from sizing.specs.step import Interference, PathCoefficients, StepCoefficients
from sizing.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 1
ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """The model: its id at the endpoint, where a server loads it from, its architecture's hash."""

    __pydantic_config__ = STRICT

    id: str
    source: str
    config_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that all replicas share."""

    __pydantic_config__ = STRICT

    name: str
    version: str
    max_model_len: int
    block_size: int
    kv_dtype: str
    memory_fraction: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        positive(
            **{
                "engine.max_model_len": self.max_model_len,
                "engine.block_size": self.block_size,
            }
        )
        fraction(**{"engine.memory_fraction": self.memory_fraction})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Step times per pool and what lies between them; `sizing.steptime` evaluates it."""

    __pydantic_config__ = STRICT

    prefill: StepCoefficients
    decode: StepCoefficients
    path: PathCoefficients
    interference: Interference


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything the plan was computed from, so that no other file is needed to check it."""

    __pydantic_config__ = STRICT

    scenario: ScenarioSpec
    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile
    calibration: CalibrationSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One replica: its node, and the GPUs (CPU target: cores) of that node it runs on."""

    __pydantic_config__ = STRICT

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """
    Replicas of one role.

    Attributes:
        max_batch_size: sequences in one step (`max_num_seqs`).
        max_batched_tokens: token budget of one step (`max_num_batched_tokens`).
        kv_bytes: KV cache per GPU.
        placement: one entry a node of each replica, replica after replica; a replica wider
            than a node takes several entries.
    """

    __pydantic_config__ = STRICT

    role: str
    replicas: int
    tp: int
    pp: int
    ep: int
    gpu: str
    dtype: str
    max_batch_size: int
    max_batched_tokens: int
    kv_bytes: float
    placement: tuple[Placement, ...]

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
                    "max_batch_size",
                    "max_batched_tokens",
                    "kv_bytes",
                )
            }
        )
        placed = sum(len(p.gpus) for p in self.placement)
        if placed != self.gpus:
            raise InputError(
                f"pools[{self.role}].placement",
                f"{placed} GPUs",
                f"{self.gpus}: replicas x tp x pp",
            )
        seen = [(p.node, g) for p in self.placement for g in p.gpus]
        if len(set(seen)) != len(seen):
            raise InputError(f"pools[{self.role}].placement", seen, "each GPU used once")

    @property
    def gpus(self) -> int:
        """GPUs of all replicas together."""
        return self.replicas * self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Replica choice; prompts up to `local_threshold_tokens` skip the prefill pool."""

    __pydantic_config__ = STRICT

    policy: str = "power-of-two"
    local_threshold_tokens: int = 0
    fallback: str = "fail"

    def __post_init__(self) -> None:
        """Check the names."""
        one_of(
            ("power-of-two", "round-robin", "least-tokens", "random"),
            **{"routing.policy": self.policy},
        )
        one_of(("fail", "local"), **{"routing.fallback": self.fallback})
        not_negative(**{"routing.local_threshold_tokens": self.local_threshold_tokens})


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """
    What is to run: the part of a plan that needs no prediction.

    `serving measure` deploys one to take the measurements that a plan is computed from.
    """

    model: PlanModel
    architecture: ModelSpec
    engine: EngineSettings
    pools: tuple[Pool, ...]
    routing: Routing

    def pool(self, role: str) -> Pool:
        """Return the pool of *role*."""
        for pool in self.pools:
            if pool.role == role:
                return pool
        raise InputError("pools", [p.role for p in self.pools], f"a pool with role {role}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """
    One latency at every statistic.

    Attributes:
        error_fraction: half-width of the interval around each, relative; `None`: no measurement
            says how far off it may be.
    """

    __pydantic_config__ = STRICT

    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    error_fraction: float | None

    def __post_init__(self) -> None:
        """Check signs and order."""
        not_negative(mean_s=self.mean_s, p50_s=self.p50_s, p99_s=self.p99_s)
        if not self.p50_s <= self.p90_s <= self.p95_s <= self.p99_s:
            raise InputError("prediction", "percentiles", "p50 <= p90 <= p95 <= p99")

    def at(self, statistic: str) -> float:
        """Return one statistic, named as in `PERCENTILES`."""
        value: float = getattr(self, f"{statistic}_s")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """
    What the plan promises.

    Attributes:
        capacity_requests_per_s: rate at which the first pool saturates.
        utilisation_fraction: per role, busy share of the pool at the planned rate.
        bottleneck: per role, `compute`, `memory bandwidth`, `capacity`, `network` or `queue`.
        ttft_parts_s: mean TTFT by phase; the phases add up to `ttft.mean_s`.
    """

    __pydantic_config__ = STRICT

    ttft: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency
    output_tokens_per_s: float
    capacity_requests_per_s: float
    utilisation_fraction: dict[str, float]
    bottleneck: dict[str, str]
    ttft_parts_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Largest load factor at which the SLO still holds, and what breaks first beyond it."""

    __pydantic_config__ = STRICT

    load_factor: float
    binds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNote:
    """Which fit the step times stand on; `error_fraction` is its residual."""

    __pydantic_config__ = STRICT

    name: str
    date: str
    error_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """How many measured rows are like this plan, and how far off predictions of them were."""

    __pydantic_config__ = STRICT

    num_rows: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployable:
    """Whether `serving up` can realise the plan, by which engine profile; else the rule broken."""

    __pydantic_config__ = STRICT

    profile: str
    ok: bool
    rule_broken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """GPUs used, whole nodes taken, and dollars where the scenario gives a price."""

    __pydantic_config__ = STRICT

    gpus: int
    nodes: int
    gpu_power_w: float | None
    price_usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Version of minicluster and SHA-256 (16 hex digits) of the inputs."""

    __pydantic_config__ = STRICT

    version: str
    inputs_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cluster order: pools, the load they are for, and the latencies promised."""

    __pydantic_config__ = STRICT

    schema_version: int
    model: PlanModel
    engine: EngineSettings
    step_model: StepModel
    inputs: Inputs
    slo: SloSpec
    workload: WorkloadSpec
    pools: tuple[Pool, ...]
    routing: Routing
    prediction: Prediction
    cost: Cost
    headroom: Headroom
    calibration: CalibrationNote
    validated_on: Validation
    deployable: Deployable
    provenance: Provenance

    def __post_init__(self) -> None:
        """Check that the pools make a system, and that they fit one another."""
        roles = [pool.role for pool in self.pools]
        if sorted(roles) not in (["decode", "prefill"], ["mixed"]):
            raise InputError("pools", roles, "one prefill and one decode pool, or one mixed pool")
        seen = [(p.node, g) for pool in self.pools for p in pool.placement for g in p.gpus]
        if len(set(seen)) != len(seen):
            raise InputError("pools[].placement", seen, "no GPU in two replicas")

    @property
    def deployment(self) -> Deployment:
        """What is to run."""
        return Deployment(
            model=self.model,
            architecture=self.inputs.model,
            engine=self.engine,
            pools=self.pools,
            routing=self.routing,
        )

    def pool(self, role: str) -> Pool:
        """Return the pool of *role*."""
        return self.deployment.pool(role)


def to_json(plan: Plan) -> str:
    """Write *plan* so that equal plans give equal bytes."""
    return json.dumps(asdict(plan), indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_plan(path: Path) -> Plan:
    """
    Read a plan from *path*, checking every field.

    Raises:
        InputError: no such file, not JSON, another schema version, a field missing, unknown or
            out of range; the message names the place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), error.strerror, "a plan written by `sizing plan`") from None
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InputError(str(path), str(error), "JSON, as `sizing plan -o` writes it") from None
    return plan_from(raw, place=str(path))


def plan_from(raw: object, *, place: str) -> Plan:
    """Turn parsed JSON into a plan; *place* is named in errors."""
    if not isinstance(raw, dict):
        raise InputError(place, type(raw).__name__, "a JSON object with the fields of a plan")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{place}: schema_version",
            version,
            str(SCHEMA_VERSION),
            "plan again with this version of minicluster",
        )
    unknown = set(raw) - {field.name for field in fields(Plan)}
    if unknown:
        raise InputError(f"{place}: {min(unknown)}", raw[min(unknown)], "no such field in a plan")
    return parse(Plan, raw, place=place)
