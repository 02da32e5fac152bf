"""Intervals around predictions, as the shipped evidence has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from minicluster.config import parse, read_json
from minicluster.specs.checks import Spec
from sizing.catalog import configs, find_gpu, gpu_generation, model_family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.model import ModelSpec

FILE = "validation/evidence.json"
DEPTHS = (1, 3, 4, 5, 6)
"""Labels of a path that name its groups, from coarse to fine: the last is a configuration."""
DISTANCES = (
    "this configuration",
    "this model with this engine",
    "its family with this engine",
    "its family with this engine on other GPU generations",
    "none of its family with this engine",
    "none of this kind of load",
)
"""What the nearest measurement is of; an interval never gets narrower from one to the next."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Quantiles that a spread carries."""
HIGH = 0.9
"""Upper end of the 80 % interval."""
STAND_IN_LOG = math.log(1.1)
"""
Added in squares for constants of another engine version, where rows had their own.

Versions move TPOT by up to 30 %, but rows predicted so are off as far as others (the spreads hold
them already); chosen with the coverage of left-out families in view.
"""


class Labels(NamedTuple):
    """
    Labels of a prediction, from coarse to fine.

    Attributes:
        engine: name in lower case.
        shape: architecture of the model.
        configuration: its loads are fitted on, or held out, together; empty: none was measured.
    """

    kind: str = ""
    engine: str = ""
    family: str = ""
    generation: str = ""
    shape: str = ""
    configuration: str = ""


def path_of(
    load: str, engine: str, model: ModelSpec, *, name: str, gpu: str, configuration: str = ""
) -> Labels:
    """
    Return the labels of a prediction.

    Args:
        load: as `kind_of` names it.
        model: its architecture; names differ between repositories of the same weights.
        name: of the model, by which its family is found.
    """
    experts = " MoE" if model.moe else " dense"
    # An open loop of known lengths errs as closed ones do, of which there are many more.
    known = load.startswith("closed") or load == "open"
    kind = f"loaded{experts}" if known else load
    shape = f"{model.num_layers} layers of {model.hidden_size}"
    generation = gpu_generation(find_gpu(gpu).name)
    return Labels(kind, engine.lower(), model_family(name), generation, shape, configuration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Centre(Spec):
    """
    Mean error of one group of rows.

    Attributes:
        path: quantity and labels, joined by `/`.
        log: ln(measured / predicted), shrunk to that of the larger group.
    """

    path: str
    rows: int
    log: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Spec):
    """
    How far left-out rows of one kind of load lay from the centre that they were given.

    Attributes:
        kind: of load; empty: one that was never measured.
        distance: place in `DISTANCES`.
        logs: distance from the centre, in the logarithm, at each of `LEVELS`.
        stand_in_fraction: share of the rows predicted with constants of another engine version.
    """

    quantity: str
    kind: str
    distance: int
    logs: tuple[float, ...]
    stand_in_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInterval:
    """
    80 % interval around a prediction.

    Attributes:
        rows: measurements of the nearest group.
        distance: of the nearest measurement, a place in `DISTANCES`.
    """

    low_s: float
    high_s: float
    rows: int
    group: str
    distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Centres by path, and spreads by quantity, kind of load and distance."""

    centres: dict[str, Centre]
    spreads: dict[tuple[str, str, int], Spread]

    def around(
        self, value_s: float, quantity: str, path: Sequence[str], *, stand_in: bool = False
    ) -> PredictionInterval | None:
        """
        Interval around a prediction; `None` where no row of the quantity was ever measured.

        Its upper end is the bound of 90 %: a group whose predictions were too high moves the lower
        end only, since a plan that counts on such an error fails where a row was mislabelled.

        Args:
            value_s: predicted; always inside.
            path: of the prediction (`path_of`); labels that no row has widen the interval.
            stand_in: predicted with the constants of another version of the engine; widens the
                interval by 10 % where the rows behind it had their own.
        """
        found = self._nearest(quantity, path)
        if found is None:
            return None
        centre, spread = found
        off = _away(spread, HIGH, stand_in=stand_in)
        return PredictionInterval(
            low_s=value_s * math.exp(min(centre.log - off, 0.0)),
            high_s=value_s * math.exp(max(centre.log, 0.0) + off),
            rows=centre.rows,
            group=centre.path,
            distance=spread.distance,
        )

    def bound(
        self, quantity: str, path: Sequence[str], level: float, *, stand_in: bool = False
    ) -> float | None:
        """
        Factor of at least 1 on a prediction that the measurement exceeds by chance 1 - *level*.

        Arguments as of `around`; *level* is at least one half.
        """
        found = self._nearest(quantity, path)
        if found is None:
            return None
        centre, spread = found
        return math.exp(max(centre.log, 0.0) + _away(spread, level, stand_in=stand_in))

    def _nearest(self, quantity: str, path: Sequence[str]) -> tuple[Centre, Spread] | None:
        """Return the centre of the finest group with rows, and the spread at its distance."""
        names = groups_of(quantity, path)
        known = next((n for n in range(len(names), 0, -1) if names[n - 1] in self.centres), 0)
        kind = path[0] if known else ""
        spread = self.spreads.get((quantity, kind, len(DEPTHS) - known))
        if spread is None:
            return None
        nothing = Centre(path=quantity, rows=0, log=0.0)
        return self.centres[names[known - 1]] if known else nothing, spread


def groups_of(quantity: str, path: Sequence[str]) -> list[str]:
    """Return the names of the groups of a prediction, from coarse to fine."""
    return ["/".join((quantity, *path[:depth])) for depth in DEPTHS]


def _away(spread: Spread, level: float, *, stand_in: bool) -> float:
    """Distance from the centre at a level from 0.5 on, as if normal between and beyond `LEVELS`."""
    normal = NormalDist()
    deviates = [normal.inv_cdf(each) for each in LEVELS]
    at = normal.inv_cdf(level)
    above = next((n for n in range(1, len(LEVELS)) if level <= LEVELS[n]), len(LEVELS) - 1)
    low, high, first, second = *deviates[above - 1 : above + 1], *spread.logs[above - 1 : above + 1]
    off = first + (second - first) * (at - low) / (high - low)
    own = (1 - spread.stand_in_fraction) * at / normal.inv_cdf(HIGH)
    return math.hypot(off, STAND_IN_LOG * own) if stand_in else off


@dataclass(frozen=True, slots=True, kw_only=True)
class Support(Spec):
    """Rows of one kind of deployment, and the median errors of their predictions."""

    split: bool
    engine: str
    gpu: str
    weight_dtype: str
    rows: int
    ttft_median: float | None
    tpot_median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals(Spec):
    """
    What predictions are bounded by: the part of the evidence that every plan reads.

    Attributes:
        centres: mean errors by group.
        spreads: how far rows lie from them, by distance of the nearest measurement.
        support: predicted rows by kind of deployment.
    """

    centres: tuple[Centre, ...]
    spreads: tuple[Spread, ...]
    support: tuple[Support, ...]

    @property
    def intervals(self) -> Intervals:
        """Return the intervals that the run made."""
        return Intervals(
            centres={each.path: each for each in self.centres},
            spreads={(each.quantity, each.kind, each.distance): each for each in self.spreads},
        )


@cache
def _evidence() -> object:
    """Return the shipped evidence as its file has it; `None` where none is shipped."""
    path = configs() / FILE
    return read_json(path, "what `sizing validate --evidence` writes") if path.exists() else None


@cache
def measured_versions(engine: str) -> frozenset[str]:
    """Return the versions of an engine of which there are measured rows."""
    raw = _evidence()
    slices = raw.get("errors", ()) if isinstance(raw, dict) else ()
    names = (each["name"].partition(" ") for each in slices if each["by"] == "engine")
    return frozenset(version for name, _, version in names if name.lower() == engine and version)


@cache
def read_residuals() -> Residuals:
    """
    Read that part of the shipped evidence; empty where none is shipped.

    Raises:
        InputError: a file that is not what `sizing validate --evidence` writes.
    """
    raw = _evidence()
    if raw is None:
        return Residuals(centres=(), spreads=(), support=())
    names = {each.name for each in fields(Residuals)}
    own = {k: v for k, v in raw.items() if k in names} if isinstance(raw, dict) else raw
    return parse(Residuals, own, place=FILE)
