"""Intervals around predictions, as the shipped evidence has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minicluster.config import parse, read_json
from minicluster.specs.checks import Spec
from minicluster.stats.student_t import student
from sizing.catalog import configs, find_gpu, gpu_generation, model_family
from sizing.catalog.engine import release

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from minicluster.specs.model import ModelSpec

    Floats = NDArray[np.float64]

FILE = "validation/evidence.json"
UNLOADED = "static"
"""Kind of measured rows without queues: TTFT is one prefill step there, TPOT one decode step."""
HIGH = 0.9
"""Upper end of the 80 % interval."""
PRIOR_FREEDOM = 2.0
"""Groups as which a variance counts that the other kinds of load suggest for a level."""
ROW_FREEDOM = 5.0
"""Degrees of freedom of rows around their groups: few are far off, and by much."""
MEAN_FREEDOM = 30.0
"""Degrees of freedom of the error that is left in the mean of measured groups."""


class Labels(NamedTuple):
    """
    Labels of a prediction.

    Attributes:
        kind: of load, with experts or without.
        attention: `plain`, `latent` or `linear`.
        engine: name in lower case.
        version: line of the engine's releases; empty: not said, which counts as one line.
        generation: of the GPU.
        configuration: its loads are fitted on, or held out, together; empty: none was measured.
    """

    kind: str = ""
    attention: str = ""
    engine: str = ""
    version: str = ""
    family: str = ""
    generation: str = ""
    gpu: str = ""
    configuration: str = ""


LEVELS: tuple[tuple[str, ...], ...] = (
    (),
    ("attention",),
    ("engine",),
    ("engine", "version"),
    ("family",),
    ("family", "engine"),
    ("generation",),
    ("gpu",),
    ("family", "engine", "generation"),
    ("configuration",),
)
"""Labels that the rows of one group share, for each level of groups; all are of one kind."""

DISTANCES = (
    "this configuration",
    "its family with this engine",
    "its family with this engine on other GPU generations",
    "none of its family with this engine",
    "none of this kind of load",
)
"""What the nearest measurement is of."""
NEAREST = (("configuration",), ("family", "engine", "generation"), ("family", "engine"), ())
"""Levels of the first four of them."""


def labels_of(  # noqa: PLR0913  (a label each)
    load: str,
    engine: str,
    version: str,
    model: ModelSpec,
    *,
    name: str,
    gpu: str,
    configuration: str = "",
) -> Labels:
    """
    Return the labels of a prediction.

    Args:
        load: as `kind_of` names it.
        version: of the engine; empty: unknown.
        model: its architecture; names differ between repositories of the same weights.
        name: of the model, by which its family is found.
    """
    # An open loop of known lengths errs as closed ones do, of which there are many more.
    known = load.startswith("closed") or load == "open"
    attention = "latent" if model.mla else "linear" if model.linear else "plain"
    kind = find_gpu(gpu).name
    return Labels(
        kind=f"{'loaded' if known else load} {'MoE' if model.moe else 'dense'}",
        attention=attention,
        engine=engine.lower(),
        version=".".join(map(str, release(version)[:2])),
        family=model_family(name),
        generation=gpu_generation(kind),
        gpu=kind,
        configuration=configuration,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup(Spec):
    """
    Rows of one quantity that have all labels in common.

    Attributes:
        log: their mean ln(measured / predicted).
        weight: rows that it is as good as: those far off weigh less.
    """

    quantity: str
    labels: Labels
    rows: int
    weight: float
    log: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Variances(Spec):
    """
    How far groups lie apart in ln(measured / predicted).

    Attributes:
        kind: of load; empty: one that was never measured.
        levels: variance between the groups of each of `LEVELS`.
        rows: squared scale of rows around their groups, which are Student's t.
    """

    quantity: str
    kind: str
    levels: tuple[float, ...]
    rows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInterval:
    """
    80 % interval around a prediction.

    Attributes:
        rows: measurements at that distance.
        distance: of the nearest measurement, a place in `DISTANCES`.
        unmeasured: labels of engine version, family and GPU that no row of the kind has.
    """

    low_s: float
    high_s: float
    rows: int
    distance: int
    unmeasured: tuple[str, ...] = ()


class KnownError(NamedTuple):
    """What is known of ln(measured / predicted): its mean, and Student's t around it."""

    mean: float
    deviation: float
    freedom: float

    def above(self, level: float) -> float:
        """Return how far the quantile of a level from one half on lies above the mean."""
        return self.deviation * student(self.freedom, 2 * level - 1) if level > 1 / 2 else 0.0

    def ends(self, off: float) -> tuple[float, float]:
        """
        Return the ends of an interval whose quantiles lie so far *off* the mean.

        A group whose predictions were too high moves the lower end only, since a plan that counts
        on such an error fails where a row was mislabelled.
        """
        return min(self.mean - off, 0.0), max(self.mean, 0.0) + off

    def needed(self, log: float) -> float:
        """Return how far off the mean the quantiles are of the interval that just holds *log*."""
        return max(log - max(self.mean, 0.0) if log >= 0 else self.mean - log, 0.0)


class GroupEffects:
    """
    Groups of one quantity and kind of load: the error of each is a sum of effects of its levels.

    Shapes: n groups, and `LEVELS` in the first axis of what is by level.
    """

    def __init__(self, labels: Sequence[Labels]) -> None:
        """Number the groups of each level."""
        names = [[at(each, level) for each in labels] for level in LEVELS]
        self.numbers = [{name: n for n, name in enumerate(dict.fromkeys(row))} for row in names]
        self.counts = np.array([float(len(each)) for each in self.numbers])
        self.ids: NDArray[np.int64] = np.array(
            [[of[name] for name in row] for of, row in zip(self.numbers, names, strict=True)]
        )
        self.shared: Floats = np.array(self.ids[:, :, None] == self.ids[:, None, :], float)

    def shared_with(self, labels: Labels) -> Floats:
        """Return by level and group whether a prediction belongs to the same one, 1 or 0."""
        levels = zip(LEVELS, self.numbers, strict=True)
        own = np.array([of.get(at(labels, level), -1) for level, of in levels])
        return np.array(self.ids == own[:, None], float)

    def solve(
        self, variances: Floats, noise: Floats, logs: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return covariances of the effects, the inverse with noise, and that times the logs."""
        covariance = np.asarray(np.tensordot(variances, self.shared, 1), np.float64)
        inverse = np.asarray(np.linalg.inv(covariance + np.diag(noise)), np.float64)
        return covariance, inverse, inverse @ logs


class KindErrors:
    """The errors of one quantity and kind of load, as the groups and their variances have them."""

    def __init__(self, groups: Sequence[RowGroup], variances: Variances) -> None:
        self.variances = variances
        self.effects = GroupEffects([each.labels for each in groups])
        self.by_level = np.array(variances.levels)
        noise = variances.rows / np.array([each.weight for each in groups])
        logs = np.array([each.log for each in groups])
        _, self.inverse, self.solved = self.effects.solve(self.by_level, noise, logs)
        self._errors: dict[Labels, KnownError] = {}

    def error(self, labels: Labels) -> KnownError:
        """Return what is known of the error of a prediction (docs/model.md, eq. V5)."""
        if labels not in self._errors:
            self._errors[labels] = self._error(labels)
        return self._errors[labels]

    def _error(self, labels: Labels) -> KnownError:
        shared = self.effects.shared_with(labels)
        seen = shared.any(axis=1)
        like = self.by_level @ shared
        left = self.by_level[seen].sum() - like @ self.inverse @ like
        unseen = zip(
            self.by_level[~seen], PRIOR_FREEDOM + self.effects.counts[~seen] - 1, strict=True
        )
        return _sum_of(
            float(like @ self.solved),
            [(max(left, 0.0), MEAN_FREEDOM), (self.variances.rows, ROW_FREEDOM), *unseen],
        )


@cache
def at(labels: Labels, level: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels that name the group of a level."""
    return tuple(getattr(labels, name) for name in level)


def _sum_of(mean: float, parts: Iterable[tuple[float, float]]) -> KnownError:
    """
    Add variances with their degrees of freedom (Satterthwaite 1946).

    The squared scale of rows is added like one; the scale of all that rows are inside of makes up.
    """
    known = [(variance, freedom) for variance, freedom in parts if variance > 0]
    total = sum(variance for variance, _ in known)
    freedom = total**2 / sum(variance**2 / each for variance, each in known)
    # Tenths of a degree: quantiles are kept, and differ by less than 1 %.
    return KnownError(mean, math.sqrt(total), max(round(freedom, 1), 1.0))


@dataclass(frozen=True)
class Intervals:
    """Groups of measured rows, and how far groups lie apart."""

    groups: tuple[RowGroup, ...]
    variances: tuple[Variances, ...]

    def around(self, value_s: float, quantity: str, labels: Labels) -> PredictionInterval | None:
        """
        Interval around a prediction; `None` where no row of the quantity was ever measured.

        Its upper end is the bound of 90 %.

        Args:
            value_s: predicted; always inside.
            labels: of the prediction (`labels_of`); what no row has widens the interval.
        """
        error = self._error(quantity, labels)
        if error is None:
            return None
        low, high = error.ends(error.above(HIGH))
        known = self._of_kind(quantity, labels.kind)
        rows = 0
        for distance, level in enumerate(NEAREST):  # noqa: B007  (read after the loop)
            rows = sum(each.rows for each in known if at(each.labels, level) == at(labels, level))
            if rows:
                break
        else:
            distance = len(NEAREST)
        return PredictionInterval(
            low_s=value_s * math.exp(low),
            high_s=value_s * math.exp(high),
            rows=rows,
            distance=distance,
            unmeasured=tuple(
                " ".join(at(labels, level)).rstrip()
                for level in (("engine", "version"), ("family",), ("gpu",))
                if all(at(each.labels, level) != at(labels, level) for each in known)
            ),
        )

    def bound(self, quantity: str, labels: Labels, level: float) -> float | None:
        """
        Factor of at least 1 on a prediction that the measurement exceeds by chance 1 - *level*.

        Arguments as of `around`; *level* is at least one half.
        """
        error = self._error(quantity, labels)
        return None if error is None else math.exp(error.ends(error.above(level))[1])

    def _error(self, quantity: str, labels: Labels) -> KnownError | None:
        """Return the error, on a GPU that only other kinds of load have rows of the largest."""
        known = {each.kind: each for each in self.variances if each.quantity == quantity}
        if not known:
            return None
        own = self._of_kind(quantity, labels.kind)
        errors = [self._kind_errors(known[labels.kind]).error(labels)] if own else []
        if not own:
            parts = [*known[""].levels, known[""].rows]
            errors = [_sum_of(0.0, [(variance, PRIOR_FREEDOM) for variance in parts])]
        # With experts or without: what the kind of load is called after its last blank.
        *_, experts = labels.kind.split(" ")
        on_gpu = {
            each.labels.kind
            for each in self.groups
            if (each.quantity, each.labels.gpu) == (quantity, labels.gpu)
            and each.labels.kind.endswith(experts)
        }
        # Rows of static batches say how far steps are off; others are off by queues, too.
        if labels.kind not in on_gpu and not labels.kind.startswith(UNLOADED):
            errors += [self._kind_errors(known[kind]).error(labels) for kind in sorted(on_gpu)]
        return max(errors, key=lambda error: error.ends(error.above(HIGH))[1])

    def _kind_errors(self, variances: Variances) -> KindErrors:
        key = variances.quantity, variances.kind
        if key not in self._kinds:
            self._kinds[key] = KindErrors(self._of_kind(*key), variances)
        return self._kinds[key]

    def _of_kind(self, quantity: str, kind: str) -> list[RowGroup]:
        return [
            each for each in self.groups if (each.quantity, each.labels.kind) == (quantity, kind)
        ]

    @cached_property
    def _kinds(self) -> dict[tuple[str, str], KindErrors]:
        """Those that were asked for."""
        return {}


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
        groups: mean errors of rows that have everything in common.
        variances: how far groups lie apart, and rows in them.
        support: predicted rows by kind of deployment.
    """

    groups: tuple[RowGroup, ...]
    variances: tuple[Variances, ...]
    support: tuple[Support, ...]

    @property
    def intervals(self) -> Intervals:
        """Return the intervals that the run made."""
        return Intervals(self.groups, self.variances)


@cache
def _evidence() -> object:
    """Return the shipped evidence as its file has it; `None` where none is shipped."""
    path = configs() / FILE
    return read_json(path, "what `sizing validate --evidence` writes") if path.exists() else None


@cache
def read_residuals() -> Residuals:
    """
    Read that part of the shipped evidence; empty where none is shipped.

    Raises:
        InputError: a file that is not what `sizing validate --evidence` writes.
    """
    raw = _evidence()
    if raw is None:
        return Residuals(groups=(), variances=(), support=())
    names = {each.name for each in fields(Residuals)}
    own = {k: v for k, v in raw.items() if k in names} if isinstance(raw, dict) else raw
    return parse(Residuals, own, place=FILE)
