"""Residuals, and intervals made of them: quantiles by group, backing off to larger groups."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from minicluster.specs.checks import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
T = TypeVar("T")

QUANTITIES = ("ttft", "tpot")
ENGINE = 1
"""Place of the engine among the labels of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResidual:
    """
    One latency of one row, `ttft` or `tpot`.

    Attributes:
        log_ratio: ln(measured / predicted).
        configuration: all loads of one configuration are fitted on, or held out, together.
        path: labels from coarse to fine; intervals back off along it.
        stand_in: predicted with the constants of another version of the engine.
        family: of the model: what `sizing.catalog.model_family` names.
        generation: of the GPU.
        row_class: of the row: what `class_of` names.
    """

    quantity: str
    predicted_s: float
    log_ratio: float
    source: str
    configuration: str
    path: tuple[str, ...]
    stand_in: bool = False
    family: str = ""
    generation: str = ""
    row_class: str = ""

    @property
    def engine(self) -> str:
        """Name of the engine, in lower case."""
        return self.path[ENGINE] if len(self.path) > ENGINE else ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of `origin_keys`."""
        return origin_keys(
            self.path,
            family=self.family,
            generation=self.generation,
            configuration=self.configuration,
        )


DISTANCES = (
    "this configuration",
    "this model with this engine",
    "its family with this engine",
    "its family with this engine on other GPU generations",
    "none of its family with this engine",
)
"""What the nearest measurement is of; an interval gets wider from one to the next."""
NEAR = 1
"""Distance that the quantiles of cells are for: those of rows in a left-out configuration."""


def origin_keys(
    path: Sequence[str], *, family: str, generation: str, configuration: str = ""
) -> tuple[str, ...]:
    """
    Return a key for each distance but the last: rows with an equal key are that near.

    Args:
        path: labels of a prediction, its engine the second and its architecture the last one.
        family: of the model.
        generation: of the GPU.
        configuration: of a row; empty: none that was measured.
    """
    engine = path[ENGINE] if len(path) > ENGINE else ""
    return (
        configuration,
        f"{engine}/{path[-1]}/{generation}",
        f"{engine}/{family}/{generation}",
        f"{engine}/{family}",
    )


def folds(
    items: Sequence[T], count: int, key: Callable[[T], str]
) -> Iterator[tuple[list[T], list[T]]]:
    """
    Yield, per fold, the items outside and inside it.

    Items of one key stay together; keys are dealt out in their order, so that those that begin
    alike are spread over all folds.
    """
    keys = [key(item) for item in items]
    number = {name: place % count for place, name in enumerate(sorted(set(keys)))}
    for fold in range(count):
        inside = [item for item, name in zip(items, keys, strict=True) if number[name] == fold]
        outside = [item for item, name in zip(items, keys, strict=True) if number[name] != fold]
        if inside:
            yield outside, inside


LEVELS = (0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95)
"""Quantiles that a group carries."""
MIDDLE = LEVELS.index(0.5)
LOW, HIGH = 0.1, 0.9
"""Ends of the 80 % interval."""
PARENT_ROWS = 20.0
"""Rows of its own at which a group's quantiles weigh as much as its parent's."""
LARGEST_SHARE = 0.25
"""A configuration measured at many loads counts for at most this share of its group."""
FOLDS = 10
LOAD = 3
"""Place of the load among the labels of a cell, the quantity first."""
LEAST_ROWS = 40
"""Rows of a kind of load from which on it has stretches of its own."""
STAND_IN_LOG = math.log(1.3)
"""Versions of an engine differ by 30 % in TPOT: added in squares where rows had own constants."""
DEVIATES = tuple(NormalDist().inv_cdf(level) for level in LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Spec):
    """
    Residuals of one group of rows.

    Attributes:
        path: labels from coarse to fine, joined by `/`, the quantity first.
        rows: measurements behind it.
        configurations: different ones among them.
        logs: quantiles of ln(measured / predicted) at `LEVELS`, shrunk to the parent's.
        stand_in_fraction: share of the rows that were predicted with the constants of another
            version of the engine.
    """

    path: str
    rows: int
    configurations: int
    logs: tuple[float, ...]
    stand_in_fraction: float

    def log_at(self, level: float) -> float:
        """Quantile at any level, between and beyond `LEVELS` as if normal."""
        at = NormalDist().inv_cdf(level)
        steps = list(zip(pairwise(DEVIATES), pairwise(self.logs), strict=True))
        (low, high), (first, second) = next((s for s in steps if at <= s[0][1]), steps[-1])
        return first + (second - first) * (at - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInterval:
    """
    80 % interval around a prediction.

    Attributes:
        rows: measurements behind it.
        group: that they are of.
        distance: of the nearest measurement, a place in `DISTANCES`.
    """

    low_s: float
    high_s: float
    rows: int
    group: str
    distance: int = NEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening(Spec):
    """
    How much further out than in their cells quantiles lie at a distance.

    Attributes:
        path: quantity, alone or loaded and, where there were rows enough, load; joined by `/`.
        distance: place in `DISTANCES`.
        shifts: added to the logarithm at each of `LEVELS`: down below the median, up above it.
    """

    path: str
    distance: int
    shifts: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """
    Cells by path, of every group that had rows.

    Attributes:
        widenings: by path and distance.
        known: per distance, the keys of the rows that were measured (`origin_keys`).
    """

    cells: dict[str, Cell]
    widenings: dict[tuple[str, int], Widening] = field(default_factory=dict)
    known: tuple[frozenset[str], ...] = ()

    def distance(self, keys: Sequence[str]) -> int:
        """Return how far the nearest measurement is: a place in `DISTANCES`."""
        near = (d for d, key in enumerate(keys) if d < len(self.known) and key in self.known[d])
        return next(near, len(DISTANCES) - 1)

    def around(
        self,
        value_s: float,
        quantity: str,
        path: Sequence[str],
        *,
        stand_in: bool = False,
        distance: int = NEAR,
    ) -> PredictionInterval | None:
        """
        Interval around a prediction; `None` where no row of the quantity was ever measured.

        Args:
            value_s: predicted; always inside.
            quantity: `ttft` or `tpot`.
            path: labels from coarse to fine; the finest group with rows is taken.
            stand_in: predicted with the constants of another version of the engine; widens the
                interval by 30 % where the rows behind it had their own.
            distance: of the nearest measurement, as `distance` says.
        """
        cell = self._cell(quantity, path)
        if cell is None:
            return None
        cell = self._widened(cell, (quantity, *path), distance)
        low, high = (_log(cell, level, stand_in=stand_in) for level in (LOW, HIGH))
        return PredictionInterval(
            low_s=value_s * math.exp(min(low, 0.0)),
            high_s=value_s * math.exp(max(high, 0.0)),
            rows=cell.rows,
            group=cell.path,
            distance=distance,
        )

    def bound(
        self, quantity: str, path: Sequence[str], level: float, *, stand_in: bool = False
    ) -> float | None:
        """
        Factor on a prediction that the measurement stays below with a chance of *level*.

        Arguments as of `around`; below 1 where predictions like this were too high.
        """
        cell = self._cell(quantity, path)
        return None if cell is None else math.exp(_log(cell, level, stand_in=stand_in))

    def _widened(self, cell: Cell, labels: tuple[str, ...], distance: int) -> Cell:
        """Move the quantiles of a cell as far out as the distance asks for."""
        names = ("/".join(name) for name in _stretched(labels))
        found = (self.widenings.get((name, distance)) for name in names)
        widening = next((each for each in found if each is not None), None)
        if widening is None:
            return cell
        logs = (log + shift for log, shift in zip(cell.logs, widening.shifts, strict=True))
        return replace(cell, logs=tuple(logs))

    def _cell(self, quantity: str, path: Sequence[str]) -> Cell | None:
        labels = (quantity, *path)
        names = ("/".join(labels[:depth]) for depth in range(len(labels), 0, -1))
        return next((self.cells[name] for name in names if name in self.cells), None)


def _log(cell: Cell, level: float, *, stand_in: bool) -> float:
    """Quantile of a cell, widened for constants of another version."""
    log = cell.log_at(level)
    if not stand_in:
        return log
    away = NormalDist().inv_cdf(level) / NormalDist().inv_cdf(HIGH)
    extra = STAND_IN_LOG * (1 - cell.stand_in_fraction) * away
    return log + math.copysign(math.hypot(log, extra) - abs(log), away)


def fit_intervals(residuals: Iterable[RowResidual]) -> Intervals:
    """
    Make intervals of residuals (docs/model.md, eq. V5).

        q = (n q_own + k q_parent) / (n + k), k = 20 rows; q_parent of the root: q_own

    each quantile moved from the median by the factor with which left-out rows lie below it as
    often as it says: configurations for the cells, and for the widening of each distance rows,
    models, families, engines and GPU generations, by what is nearest to them in the rest.

    Args:
        residuals: of rows that nothing shipped was fitted on.

    Source: cross-conformal prediction (Vovk 2015) of log residuals, one side at a time.

    Ignores that rows of one configuration err alike, beyond leaving them out together.
    """
    known = list(residuals)
    near = _stretches(known)
    return Intervals(
        cells=_cells(known, near), widenings=_widenings(known, near), known=_known(known)
    )


def _known(residuals: Iterable[RowResidual]) -> tuple[frozenset[str], ...]:
    """Return the keys of rows, per distance."""
    keys = [each.keys for each in residuals]
    return tuple(frozenset(each) for each in zip(*keys, strict=True))


def grouped(
    items: Iterable[T], labels_of: Callable[[T], tuple[str, ...]]
) -> dict[tuple[str, ...], list[T]]:
    """Return the items of every group, by its labels and every beginning of them, coarse first."""
    members: dict[tuple[str, ...], list[T]] = {}
    for each in items:
        labels = labels_of(each)
        for depth in range(1, len(labels) + 1):
            members.setdefault(labels[:depth], []).append(each)
    return dict(sorted(members.items(), key=lambda group: (len(group[0]), group[0])))


def together(each: RowResidual) -> str:
    """Key of rows that are left out together: a configuration, near others of its engine."""
    return "/".join((*each.path[:3], each.configuration))


def _stretches(known: Sequence[RowResidual]) -> dict[tuple[str, ...], NDArray[np.float64]]:
    """Factors on the quantiles, by quantity and labels, that left-out configurations ask for."""
    needed: dict[tuple[str, ...], list[NDArray[np.float64]]] = {}
    side = np.sign(DEVIATES)
    for train, test in folds(known, FOLDS, key=together):
        made = Intervals(cells=_cells(train, {}))
        for each in test:
            cell = made._cell(each.quantity, each.path)  # noqa: SLF001  (a line of this file)
            if cell is not None:
                logs = np.array(cell.logs)
                apart = np.maximum(np.abs(logs - logs[MIDDLE]), 1e-3)
                off = side * (each.log_ratio - logs[MIDDLE]) / apart
                for name in _stretched((each.quantity, *each.path)):
                    needed.setdefault(name, []).append(off)
    return {
        name: np.maximum(_reached(np.array(rows)), 0.0)
        for name, rows in needed.items()
        if len(rows) >= LEAST_ROWS or len(name) < LOAD
    }


SCHEMES: tuple[tuple[Callable[[RowResidual], str], int], ...] = (
    (lambda each: f"{each.quantity} {each.configuration} {each.log_ratio!r}", 4),
    (lambda each: each.path[-1], 6),
    (lambda each: each.generation, 99),
    (lambda each: each.family, 99),
    (lambda each: each.engine, 99),
)
"""What is left out in turn to see rows from each distance, and in how many folds at most."""


def _asked(
    known: Sequence[RowResidual], near: dict[tuple[str, ...], NDArray[np.float64]]
) -> dict[tuple[tuple[str, ...], int], list[NDArray[np.float64]]]:
    """Return, by labels and distance, how far beyond each quantile the left-out rows lie."""
    asked: dict[tuple[tuple[str, ...], int], list[NDArray[np.float64]]] = {}
    side = np.sign(DEVIATES)
    for key, most in SCHEMES:
        for train, test in folds(known, min(most, len({key(each) for each in known})), key=key):
            made = Intervals(cells=_cells(train, near), known=_known(train))
            for each in test:
                cell = made._cell(each.quantity, each.path)  # noqa: SLF001  (a line of this file)
                if cell is None:
                    continue
                off = side * (each.log_ratio - np.array(cell.logs))
                for name in _stretched((each.quantity, *each.path)):
                    asked.setdefault((name, made.distance(each.keys)), []).append(off)
    return asked


def _widenings(
    known: Sequence[RowResidual], near: dict[tuple[str, ...], NDArray[np.float64]]
) -> dict[tuple[str, int], Widening]:
    """
    Shifts of the quantiles at every distance: what left-out rows seen from there ask for.

    Rows of the same configuration ask for less than those in the cells, others for more, and
    farther ones never for less.
    """
    asked, found = _asked(known, near), {}
    for name in near:
        least = np.full(len(LEVELS), -np.inf)
        for distance in range(len(DISTANCES)):
            rows = asked.get((name, distance), [])
            if len(name) > LOAD and len(rows) < LEAST_ROWS:
                rows = asked.get((name[:2], distance), [])
            own = _reached(np.array(rows)) if rows else np.zeros(len(LEVELS))
            if distance == NEAR:
                own = np.zeros(len(LEVELS))
            limited = np.minimum(own, 0.0) if distance < NEAR else np.maximum(own, 0.0)
            least = np.maximum(least, limited)
            path, shifts = "/".join(name), np.sign(DEVIATES) * least
            widening = Widening(path=path, distance=distance, shifts=tuple(shifts.tolist()))
            found[path, distance] = widening
    return found


def _stretched(labels: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Names under which a cell's stretches are looked up: its kind of load, alone or loaded."""
    coarse = labels[:2]
    return ((*coarse, "", labels[LOAD]), coarse) if len(labels) > LOAD else (coarse,)


def _reached(off: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quantile of each column that lies as far out as its level says."""
    shares = np.maximum(LEVELS, 1 - np.array(LEVELS))
    found = [np.quantile(column, share) for column, share in zip(off.T, shares, strict=True)]
    return np.array(found)


def _cells(
    residuals: Iterable[RowResidual], stretches: dict[tuple[str, ...], NDArray[np.float64]]
) -> dict[str, Cell]:
    """Quantiles of every group, coarse ones first so that each finds its parent."""
    members = grouped(residuals, lambda each: (each.quantity, *each.path))
    shrunk: dict[tuple[str, ...], NDArray[np.float64]] = {}
    cells = {}
    for labels, rows in members.items():
        logs = _quantiles(rows)
        if labels[:-1] in shrunk:
            # The same rows under a longer name are their parent.
            own = 0 if len(rows) == len(members[labels[:-1]]) else len(rows)
            share = own / (own + PARENT_ROWS)
            logs = share * logs + (1 - share) * shrunk[labels[:-1]]
        shrunk[labels] = logs
        factors = (
            stretches[labels[:d]] for d in range(len(labels), 0, -1) if labels[:d] in stretches
        )
        moved = logs[MIDDLE] + (logs - logs[MIDDLE]) * next(factors, np.ones(len(LEVELS)))
        path = "/".join(labels)
        cells[path] = Cell(
            path=path,
            rows=len(rows),
            configurations=len({each.configuration for each in rows}),
            logs=tuple(np.maximum.accumulate(moved).tolist()),
            stand_in_fraction=sum(each.stand_in for each in rows) / len(rows),
        )
    return cells


def _quantiles(rows: Sequence[RowResidual]) -> NDArray[np.float64]:
    """Quantiles of the logs, each configuration counting for at most a share of them."""
    counts = Counter(each.configuration for each in rows)
    most = max(1.0, LARGEST_SHARE * len(rows))
    weights = np.array([min(1.0, most / counts[each.configuration]) for each in rows])
    logs = np.array([each.log_ratio for each in rows])
    order = np.argsort(logs)
    reached = np.cumsum(weights[order]) - weights[order] / 2
    found: NDArray[np.float64] = np.interp(LEVELS, reached / weights.sum(), logs[order])
    return found
