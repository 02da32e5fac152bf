"""
The plan, and its file: JSON that is checked field by field, and equal bytes for equal plans.

The file says each thing once. What other programs read stands at its top, and is left out of the
`inputs` there (`KEPT_AT_TOP`); `Plan` holds it once, in `inputs`, and properties show it.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minicluster.config import parse, read_json
from minicluster.errors import SET, InputError, wrong_kind
from minicluster.pages.shown import Shown
from minicluster.plan.deployment import (
    Deployment,
    EngineSettings,
    Pool,
    Routing,
    gpus_by_kind,
)
from minicluster.plan.prediction import (
    CalibrationNote,
    Confidence,
    Cost,
    Deployable,
    EndpointLoad,
    Headroom,
    Prediction,
    StepModel,
    Validation,
)
from minicluster.specs.calibration import CalibrationSpec
from minicluster.specs.checks import Spec
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.engine import EngineProfile
from minicluster.specs.gpu import GpuSpec
from minicluster.specs.model import ModelSpec
from minicluster.specs.price import ListPrice
from minicluster.specs.scenario import EngineChoice, ScenarioSpec
from minicluster.specs.slo import SloSpec, loosest
from minicluster.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path


SCHEMA_VERSION = 3
"""Of the plan's file; 2 had coefficients in place of tables of steps."""

KEPT_AT_TOP = {
    "slo": "scenario.slo",
    "workload": "scenario.workload",
    "model.id": "model.id",
    "model.source": "model.source",
    "model.config_hash": "model.config_hash",
    "engine.name": "engine.name",
    "engine.version": "engine.version",
    "engine.gpu_memory_utilization": "engine.gpu_memory_utilization",
    "engine.lora": "engine.lora",
    "engine.kv_dtype": "model.kv_dtype",
    "pools.0.dtype": "model.weight_dtype",
}
"""Where the file says what `inputs` leave out, and where in `Inputs` it is."""

KEPT_OF_CALIBRATION = {
    "calibration.name": "calibration.name",
    "calibration.date": "calibration.date",
    "step_model.prefill": "calibration.prefill",
    "step_model.decode": "calibration.decode",
    "step_model.path": "calibration.path",
    "step_model.interference": "calibration.interference",
}
"""The same of a plan whose step times come from a calibration."""

NUMBERS = re.compile(r"\[\n([-+.\de,\s]+)]")
"""A list of numbers in JSON: written on one line, because a table of steps has a thousand."""

LATER = ("users", "think_s", "lora_adapters", "lora_popularity_exponent")
"""Keys of a load that plans left out before there were such keys."""

DERIVED = ("model", "calibration", "cost")
"""Fields of the file that follow from others: written for other programs, compared when read."""


@dataclass(frozen=True, kw_only=True)
class Inputs(Spec):
    """
    A scenario and everything that it names.

    Attributes:
        scenario: as asked for; `search.gpus` by the names of the catalog.
        engine: its profile with the settings that the scenario asks for.
        gpu: the cluster's.
        other_gpus: those of `search.gpus` that are not the cluster's.
        list_prices: of the GPUs without a price of the user's, where `cost.prices` asks for them.
    """

    scenario: ScenarioSpec
    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile
    calibration: CalibrationSpec | None
    other_gpus: tuple[GpuSpec, ...] = ()
    list_prices: tuple[ListPrice, ...] = ()

    @property
    def kinds(self) -> dict[str, GpuSpec]:
        """GPUs that a pool may be made of, by name: those of `search.gpus`, else the cluster's."""
        known = {gpu.name: gpu for gpu in (self.gpu, *self.other_gpus)}
        return {name: known[name] for name in self.scenario.search.gpus or (self.gpu.name,)}

    def engine_on(self, gpu: str) -> EngineProfile:
        """Return the engine with its limits on one of `kinds`."""
        return self._engines[gpu]

    @cached_property
    def _engines(self) -> dict[str, EngineProfile]:
        return {name: self.engine.on(gpu) for name, gpu in self.kinds.items()}

    @property
    def calibration_note(self) -> CalibrationNote:
        """The fit that step times stand on: the calibration, or the tables of the GPU."""
        found = self.calibration
        if found is not None:
            error = max(found.prefill.error_fraction, found.decode.error_fraction)
            return CalibrationNote(name=found.name, date=found.date, error_fraction=error)
        efficiency = self.gpu.efficiency
        tables = "op tables" if efficiency and efficiency.fitted else "documented defaults"
        dates = [source.date for source in self.gpu.sources if "efficiency" in source.covers]
        return CalibrationNote(
            name=f"{self.gpu.name} {tables}", date=max(dates, default=""), error_fraction=None
        )

    @property
    def own_prices(self) -> dict[str, float]:
        """US dollars per GPU and hour that the scenario states, by GPU."""
        choice = self.scenario.cluster.price_usd_per_gpu_hour
        prices = {} if choice is None else {self.gpu.name: choice}
        return prices | self.scenario.search.prices_usd_per_gpu_hour

    def price_usd_per_hour(self, gpus: Mapping[str, int]) -> float | None:
        """Return the price of *gpus*, counts by kind; `None` where one has no price."""
        prices = {each.gpu: each.usd_per_gpu_hour for each in self.list_prices}
        prices |= self.own_prices
        known = all(gpu in prices for gpu in gpus)
        return sum(count * prices[gpu] for gpu, count in gpus.items()) if known else None

    def usd_per_hour(self, gpus: Mapping[str, int]) -> float | None:
        """Return the price of *gpus* and of their energy, where that is paid apart."""
        usd, power_w = self.price_usd_per_hour(gpus), self.power_w(gpus)
        energy = self.scenario.cluster.energy_usd_per_kwh
        if usd is None or energy is None or power_w is None:
            return usd
        return usd + power_w / 1e3 * energy

    def power_w(self, gpus: Mapping[str, int]) -> float | None:
        """
        Return the power of *gpus*, counts by kind; `None` where that of one is unknown.

        Of each it is what the scenario says (at the wall), else that of its datasheet.
        """
        own, kinds = self.scenario.cluster.power_w_per_gpu, self.kinds
        powers = {gpu: own or (kinds[gpu].power_w if gpu in kinds else None) for gpu in gpus}
        known = {gpu: power for gpu, power in powers.items() if power is not None}
        return sum(gpus[gpu] * known[gpu] for gpu in gpus) if len(known) == len(gpus) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance(Spec):
    """Version of minicluster and SHA-256 (16 hex digits) of the inputs that were planned for."""

    version: str
    inputs_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Spec, Shown):
    """
    A cluster order: pools, the load they are for, and the latencies promised.

    `engine`, and the step model of a calibration, repeat what `inputs` say of them. `confidence` is
    what was simulated; `None` on a calibrated machine. `endpoint` is `None` in plans of versions
    that did not count it.
    """

    inputs: Inputs
    engine: EngineSettings
    step_model: StepModel
    pools: tuple[Pool, ...]
    routing: Routing
    prediction: Prediction
    headroom: Headroom
    validated_on: Validation
    deployable: Deployable
    provenance: Provenance
    confidence: Confidence | None = None
    endpoint: EndpointLoad | None = None

    def _check(self) -> None:
        roles = [pool.role for pool in self.pools]
        if sorted(roles) not in (["decode", "prefill"], ["mixed"]):
            raise InputError("pools", roles, "one prefill and one decode pool, or one mixed pool")
        seen = [(p.node, g) for pool in self.pools for p in pool.placement for g in p.gpus]
        if len(set(seen)) != len(seen) and self.inputs.gpu.kind != "cpu":
            raise InputError("pools[].placement", seen, "no GPU in two replicas")
        dtype = self.inputs.model.weight_dtype
        for pool in self.pools:
            if pool.dtype != dtype:
                place = f"pools[{pool.role}].dtype"
                raise InputError(place, pool.dtype, f"{dtype!r}, as in the inputs", "plan again")

    @property
    def slo(self) -> SloSpec:
        """Limits that the plan holds for every request: of several classes the loosest ones."""
        return (
            loosest(self.promises.values()) if self.workload.classes else self.inputs.scenario.slo
        )

    @property
    def promises(self) -> dict[str, SloSpec]:
        """Limits of each class of requests by its name; without classes `slo` by an empty one."""
        return self.inputs.scenario.promises

    @property
    def workload(self) -> WorkloadSpec:
        """The load that the plan is for."""
        return self.inputs.scenario.workload

    @property
    def model(self) -> ModelSpec:
        """The model that is served."""
        return self.inputs.model

    @property
    def calibration(self) -> CalibrationNote:
        """The fit that the step times stand on."""
        return self.inputs.calibration_note

    @property
    def gpus_by_kind(self) -> Counter[str]:
        """GPUs of all pools, spare replicas included, by kind."""
        return gpus_by_kind(self.pools)

    @property
    def cost(self) -> Cost:
        """GPUs, whole nodes, power and dollars of the pools."""
        used = self.gpus_by_kind
        gpus = used.total()
        nodes = len({p.node for pool in self.pools for p in pool.placement})
        return Cost(
            gpus=gpus,
            nodes=nodes,
            gpu_power_w=self.inputs.power_w(used),
            price_usd_per_hour=self.inputs.price_usd_per_hour(used),
            stranded_gpus=nodes * self.inputs.cluster.gpus_per_node - gpus,
        )

    @property
    def deployment(self) -> Deployment:
        """What is to run."""
        return Deployment(
            model=self.model, engine=self.engine, pools=self.pools, routing=self.routing
        )

    def pool(self, role: str) -> Pool:
        """Return the pool of *role*."""
        return self.deployment.pool(role)

    def under(self, *, workload: WorkloadSpec | None = None, slo: SloSpec | None = None) -> Plan:
        """Return the same pools under another load or SLO; what was predicted stays."""
        own = self.inputs.scenario
        scenario = replace(own, workload=workload or own.workload, slo=slo or own.slo)
        return replace(self, inputs=replace(self.inputs, scenario=scenario))


def to_json(plan: Plan | Deployment) -> str:
    """Write a plan, or what is to run, so that equal values give equal bytes."""
    raw = _document(plan) if isinstance(plan, Plan) else asdict(plan)
    leave_out_unset(raw["engine"], EngineSettings)
    text = json.dumps(raw, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def leave_out_unset(
    settings: dict[str, Any], spec: type, names: Collection[str] | None = None
) -> None:
    """Take settings at the defaults of *spec* out of a table: new ones leave old plans equal."""
    for field in fields(spec):
        unset = field.default is not MISSING and settings.get(field.name, MISSING) == field.default
        if unset and (names is None or field.name in names):
            del settings[field.name]


def read_plan(path: Path) -> Plan:
    """
    Read a plan from *path*, checking every field.

    Raises:
        InputError: no such file, not JSON, another schema version, a field missing, unknown or
            out of range; the message names the place.
    """
    return plan_from(read_json(path, "a plan written by `sizing plan -o`"), place=str(path))


def read_plan_or_deployment(path: Path) -> Plan | Deployment:
    """
    Read a plan, or a deployment that `sizing calibrate` wrote, which no prediction stands behind.

    Raises:
        InputError: as `read_plan`.
    """
    raw = read_json(path, "a plan written by `sizing plan -o`")
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
        raise InputError(place, wrong_kind(raw), "a JSON object with the fields of a plan")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        expected = str(SCHEMA_VERSION)
        way_out = f"plan again with this version: `sizing plan SCENARIO -o {place}`"
        raise InputError(f"{place}: schema_version", version, expected, way_out)
    fields_of_plan = _in_memory(raw, place)
    try:
        plan = parse(Plan, fields_of_plan, place=place)
    except InputError as error:
        raise _where_the_file_says_it(error) from None
    written = _document(plan)
    for name in DERIVED:
        _check_derived(f"{place}: {name}", raw[name], written[name])
    return plan


def _document(plan: Plan) -> dict[str, Any]:
    """Return the file's content: `KEPT_AT_TOP` moved there from the inputs, `DERIVED` added."""
    raw = asdict(plan)
    leave_out_unset(raw["inputs"]["scenario"]["engine"], EngineChoice)
    leave_out_unset(raw["inputs"]["scenario"]["workload"], WorkloadSpec, LATER)
    raw |= {"schema_version": SCHEMA_VERSION, "model": {}, "cost": asdict(plan.cost)}
    raw["calibration"] = asdict(plan.calibration)
    for top, inside in _moves(raw["inputs"]):
        table, key = _slot(raw["inputs"], inside)
        value = table.pop(key)
        table, key = _slot(raw, top)
        table[key] = value
    return raw


def _in_memory(document: dict[str, Any], place: str) -> dict[str, Any]:
    raw = copy.deepcopy(document)
    names = {field.name for field in fields(Plan)}
    moved = ("slo", "workload", *DERIVED)
    unknown = set(raw) - names - {"schema_version", *moved}
    if unknown:
        raise InputError(f"{place}: {min(unknown)}", raw[min(unknown)], "no such field in a plan")
    absent = next((name for name in moved if name not in raw), None)
    if absent is not None:
        raise InputError(f"{place}: {absent}", None, "a value")
    for top, inside in _moves(raw.get("inputs")):
        try:
            table, key = _slot(raw, top)
            value = table[key]
            table, key = _slot(raw["inputs"], inside)
            said, table[key] = key in table, value
        except (IndexError, KeyError, TypeError, ValueError):
            continue  # what is missing there is missing in the inputs, too, and refused there
        if said:
            raise InputError(
                f"{place}: inputs.{inside}", SET, f"no such key: a plan says it once, in {top}"
            )
    return {name: value for name, value in raw.items() if name in names}


def _moves(inputs: object) -> Iterator[tuple[str, str]]:
    """Yield where the file keeps a value, and where in the inputs it belongs."""
    yield from KEPT_AT_TOP.items()
    if isinstance(inputs, dict) and inputs.get("calibration") is not None:
        yield from KEPT_OF_CALIBRATION.items()


def _slot(raw: Any, path: str) -> tuple[Any, str]:  # noqa: ANN401  (parsed JSON)
    *parts, key = path.split(".")
    for part in parts:
        raw = raw[int(part)] if isinstance(raw, list | tuple) else raw[part]
    return raw, key


def _where_the_file_says_it(error: InputError) -> InputError:
    for top, inside in (KEPT_AT_TOP | KEPT_OF_CALIBRATION).items():
        before, here, rest = error.place.partition(f": inputs.{inside}")
        if here and rest[:1] in {"", "."}:
            place = f"{before}: {top}{rest}"
            return InputError(place, error.value, error.expectation, error.way_out)
    return error


def _check_derived(place: str, said: object, derived: dict[str, Any]) -> None:
    """Refuse a file that was edited into contradicting itself."""
    if not isinstance(said, dict):
        raise InputError(place, said, "an object")
    for key in sorted(said.keys() | derived.keys()):
        if key not in derived:
            raise InputError(f"{place}.{key}", said[key], "no such key")
        if said.get(key) != derived[key]:
            raise InputError(
                f"{place}.{key}", said.get(key), f"{derived[key]!r}, as the rest of it says"
            )
