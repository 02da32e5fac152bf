"""What a plan was computed from, names looked up: nothing else is needed to check it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.plan.prediction import CalibrationNote
from minicluster.specs.calibration import CalibrationSpec
from minicluster.specs.checks import Spec
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.engine import EngineProfile
from minicluster.specs.gpu import GpuSpec
from minicluster.specs.model import ModelSpec
from minicluster.specs.scenario import ScenarioSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Spec):
    """
    A scenario and everything that it names.

    Attributes:
        scenario: as asked for; `search.gpus` by the names of the catalog.
        engine: its profile with the settings that the scenario asks for.
        gpu: the cluster's.
        other_gpus: those of `search.gpus` that are not the cluster's.
    """

    scenario: ScenarioSpec
    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile
    calibration: CalibrationSpec | None
    other_gpus: tuple[GpuSpec, ...] = ()

    @property
    def kinds(self) -> dict[str, GpuSpec]:
        """GPUs that a pool may be made of, by name: those of `search.gpus`, else the cluster's."""
        known = {gpu.name: gpu for gpu in (self.gpu, *self.other_gpus)}
        return {name: known[name] for name in self.scenario.search.gpus or (self.gpu.name,)}

    def engine_on(self, gpu: str) -> EngineProfile:
        """Return the engine with its limits on one of `kinds`."""
        return self.engine.on(self.kinds[gpu])

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

    def price_usd_per_hour(self, gpus: Mapping[str, int]) -> float | None:
        """Return the user's price of *gpus*, counts by kind; `None` where one has no price."""
        choice = self.scenario.cluster.price_usd_per_gpu_hour
        prices = {} if choice is None else {self.gpu.name: choice}
        prices |= self.scenario.search.prices_usd_per_gpu_hour
        return _total(count * prices[gpu] if gpu in prices else None for gpu, count in gpus.items())

    def power_w(self, gpus: Mapping[str, int]) -> float | None:
        """
        Return the power of *gpus*, counts by kind; `None` where that of one is unknown.

        Of each it is what the scenario says (at the wall), else that of its datasheet.
        """
        powers = {name: gpu.power_w for name, gpu in self.kinds.items()}
        own = self.scenario.cluster.power_w_per_gpu
        each = {gpu: own or powers.get(gpu) for gpu in gpus}
        return _total(None if power is None else gpus[gpu] * power for gpu, power in each.items())


def _total(values: Iterable[float | None]) -> float | None:
    known = list(values)
    numbers = [value for value in known if value is not None]
    return sum(numbers) if len(numbers) == len(known) else None
