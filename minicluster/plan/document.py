"""The plan as a file: JSON that is checked field by field, and equal bytes for equal plans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from minicluster.config import parse
from minicluster.errors import InputError
from minicluster.plan.deployment import Deployment, EngineSettings, PlanModel, Pool, Routing
from minicluster.plan.prediction import (
    CalibrationNote,
    Confidence,
    Cost,
    Deployable,
    Headroom,
    Prediction,
    StepModel,
    Validation,
)
from minicluster.specs.calibration import CalibrationSpec
from minicluster.specs.checks import STRICT
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.engine import EngineProfile
from minicluster.specs.gpu import GpuSpec
from minicluster.specs.model import ModelSpec
from minicluster.specs.scenario import ScenarioSpec
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """
    Everything the plan was computed from, so that no other file is needed to check it.

    Attributes:
        gpus: kinds that `search.gpus` allows; empty: `gpu` alone.
    """

    __pydantic_config__ = STRICT

    scenario: ScenarioSpec
    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile
    calibration: CalibrationSpec | None
    gpus: tuple[GpuSpec, ...] = ()

    @property
    def kinds(self) -> dict[str, GpuSpec]:
        """GPUs that a pool may be made of, by name."""
        return {gpu.name: gpu for gpu in self.gpus or (self.gpu,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Version of minicluster and SHA-256 (16 hex digits) of the inputs."""

    __pydantic_config__ = STRICT

    version: str
    inputs_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    A cluster order: pools, the load they are for, and the latencies promised.

    Attributes:
        confidence: what was simulated; `None` where closed forms alone decided.
    """

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
    confidence: Confidence | None = None

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


def to_json(plan: Plan | Deployment) -> str:
    """Write a plan, or what is to run, so that equal values give equal bytes."""
    return json.dumps(asdict(plan), indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_plan(path: Path) -> Plan:
    """
    Read a plan from *path*, checking every field.

    Raises:
        InputError: no such file, not JSON, another schema version, a field missing, unknown or
            out of range; the message names the place.
    """
    return plan_from(_read_json(path), place=str(path))


def read_plan_or_deployment(path: Path) -> Plan | Deployment:
    """
    Read a plan, or a deployment that `sizing calibrate` wrote, which no prediction stands behind.

    Raises:
        InputError: as `read_plan`.
    """
    raw = _read_json(path)
    if isinstance(raw, dict) and "schema_version" not in raw:
        return parse(Deployment, raw, place=str(path))
    return plan_from(raw, place=str(path))


def read_deployment(path: Path) -> Deployment:
    """Read what is to run, a plan's or a bare deployment; raises as `read_plan`."""
    found = read_plan_or_deployment(path)
    return found.deployment if isinstance(found, Plan) else found


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


def _read_json(path: Path) -> object:
    """Read JSON, or say what is wrong with the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(path), error.strerror, "a plan written by `sizing plan`") from None
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), str(error), "JSON, as `sizing plan -o` writes it") from None
