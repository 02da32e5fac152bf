"""Intervals around predictions, by how far the nearest measurement is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from minicluster.specs.checks import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
T = TypeVar("T")

QUANTITIES = ("ttft", "tpot")
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
NEAR = 1
"""Farthest distance at which the same model was measured with the same engine and GPUs."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Quantiles that a spread carries."""
HIGH = 0.9
"""Upper end of the 80 % interval."""
OTHERS = 20.0
"""Rows as which other kinds of load count, at most, in the spread of one kind."""
STAND_IN_LOG = math.log(1.1)
"""
Added in squares for constants of another engine version, where rows had their own.

Versions move TPOT by up to 30 %, but rows predicted so are off as far as others (the spreads hold
them already); chosen with the coverage of left-out families in view.
"""
LEAST_LOG = 0.005
"""Errors below 0.5 % are chance: no kind of load is scaled by less."""
FOLDS = 10
ROW_FOLDS = 4


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResidual:
    """
    One latency of one row, `ttft` or `tpot`.

    Attributes:
        log_ratio: ln(measured / predicted).
        stand_in: predicted with the constants of another version of the engine.
        row_class: of the row: what `class_of` names.
    """

    quantity: str
    predicted_s: float
    log_ratio: float
    source: str
    path: Labels
    stand_in: bool = False
    row_class: str = ""


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
        names = _groups(quantity, path)
        known = next((n for n in range(len(names), 0, -1) if names[n - 1] in self.centres), 0)
        kind = path[0] if known else ""
        spread = self.spreads.get((quantity, kind, len(DEPTHS) - known))
        if spread is None:
            return None
        nothing = Centre(path=quantity, rows=0, log=0.0)
        return self.centres[names[known - 1]] if known else nothing, spread


def _groups(quantity: str, path: Sequence[str]) -> list[str]:
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


def fit_intervals(residuals: Iterable[RowResidual]) -> Intervals:
    """
    Make intervals of residuals (docs/model.md, eq. V5).

        centre of a group = z mean of its subgroups + (1 - z) centre of the larger group
        spread at a distance = quantiles of |row - centre that it gets when it is left out|

    Args:
        residuals: of rows that nothing shipped was fitted on.

    Source: hierarchical credibility (Jewell 1975) for the centres; cross-conformal prediction
        (Vovk 2015), leaving out groups, for the spreads, which isotonic regression (Barlow et al.
        1972) keeps from getting narrower with the distance.

    Ignores that rows far above and far below their centre are not equally frequent.
    """
    centres: dict[str, Centre] = {}
    spreads: dict[tuple[str, str, int], Spread] = {}
    every = list(residuals)
    for quantity in QUANTITIES:
        # Sums in one order give the same figures for the same rows.
        rows = [each for each in every if each.quantity == quantity]
        rows.sort(key=lambda each: (each.path, each.log_ratio, each.predicted_s))
        if rows:
            table = _Table(rows)
            centres |= table.centres()
            spreads |= _spreads(rows, table.misses())
    return Intervals(centres=centres, spreads=spreads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Misses:
    """Left-out rows: kind of load, distance of the nearest other row, distance from its centre."""

    kinds: NDArray[np.str_]
    distances: NDArray[np.int64]
    logs: NDArray[np.float64]


class _Table:
    """Rows of one quantity, with the number of each group that a row is in."""

    def __init__(self, rows: Sequence[RowResidual]) -> None:
        self.rows = rows
        self.names: dict[str, int] = {}
        groups = [_groups(each.quantity, each.path) for each in rows]
        self.ids = np.array(
            [[self.names.setdefault(n, len(self.names)) for n in names] for names in groups]
        )
        self.logs = np.array([each.log_ratio for each in rows])

    def centres(self) -> dict[str, Centre]:
        """Return the centre of every group."""
        logs = _centre_logs(self.ids, self.logs)
        counts = np.bincount(self.ids.ravel())
        return {
            name: Centre(path=name, rows=int(counts[number]), log=logs[number])
            for name, number in self.names.items()
        }

    def misses(self) -> _Misses:
        """Leave out groups of each of `SCHEMES` in turn, and see how far off their centres are."""
        found: list[tuple[str, int, float]] = []
        for scheme in SCHEMES:
            keys = np.array([scheme(place, each) for place, each in enumerate(self.rows)])
            for key in np.unique(keys):
                rest = keys != key
                centres = _centre_logs(self.ids[rest], self.logs[rest])
                for place in np.flatnonzero(~rest).tolist():
                    distance, log = _nearest_log(centres, self.ids[place])
                    found.append(
                        (self.rows[place].path.kind, distance, abs(self.logs[place] - log))
                    )
        kinds, distances, logs = zip(*found, strict=True)
        return _Misses(kinds=np.array(kinds), distances=np.array(distances), logs=np.array(logs))


SCHEMES: tuple[Callable[[int, RowResidual], str], ...] = (
    lambda place, _: str(place % ROW_FOLDS),
    lambda _, each: each.path.configuration,
    lambda _, each: f"{each.path.engine}/{each.path.shape}",
    lambda _, each: each.path.generation,
    lambda _, each: each.path.family,
    lambda _, each: each.path.engine,
)
"""What is left out in turn to see rows from each distance."""


def _centre_logs(ids: NDArray[np.int64], logs: NDArray[np.float64]) -> dict[int, float]:
    """
    Return the centre of every group by its number, that of no group zero.

    Groups are as different from each other as their members are, so that a mean of n members
    weighs n / (n + 1): means from fine to coarse, then centres from coarse to fine.
    """
    means, weights, levels = logs, np.full(len(logs), 0.5), []
    for depth in reversed(range(len(DEPTHS))):
        _, first, place = np.unique(ids[:, depth], return_index=True, return_inverse=True)
        total = np.bincount(place, weights)
        means = np.bincount(place, weights * means) / total
        weights, ids = total / (total + 1), ids[first]
        levels.append((ids, means, weights))
    found: dict[int, float] = {}
    for depth, (groups, mean, share) in enumerate(reversed(levels)):
        parents = [found[group[depth - 1]] if depth else 0.0 for group in groups.tolist()]
        shrunk = share * mean + (1 - share) * np.array(parents)
        found |= dict(zip(groups[:, depth].tolist(), shrunk.tolist(), strict=True))
    return found


def _nearest_log(found: dict[int, float], groups: NDArray[np.int64]) -> tuple[int, float]:
    """Return distance and centre of the finest group of a row that others are in, too."""
    for distance, group in enumerate(reversed(groups.tolist())):
        if group in found:
            return distance, found[group]
    return len(DEPTHS), 0.0


def _spreads(rows: Sequence[RowResidual], misses: _Misses) -> dict[tuple[str, str, int], Spread]:
    """Spreads of every kind of load at every distance, of its own rows and the others' scaled."""
    # The size of errors of each kind of load: the 80 % quantile of all distances.
    scales = {
        kind: max(float(np.quantile(misses.logs[misses.kinds == kind], 2 * HIGH - 1)), LEAST_LOG)
        for kind in np.unique(misses.kinds).tolist()
    }
    relative = misses.logs / np.array([scales[kind] for kind in misses.kinds.tolist()])
    found = {}
    for kind in ("", *scales):
        own = misses.kinds == kind
        scale = scales.get(kind, max(scales.values()))
        members = [each.stand_in for each in rows if kind in ("", each.path.kind)]
        logs = np.full((len(DISTANCES), len(LEVELS)), np.nan)
        masses = np.zeros(len(DISTANCES))
        for distance in range(len(DISTANCES)):
            there = misses.distances == distance
            # A row that was left out several times counts once.
            most = np.where(own, len(members), OTHERS)
            times = np.where(own, (there & own).sum(), (there & ~own).sum())
            weights = there * np.minimum(1.0, most / np.maximum(times, 1))
            masses[distance] = weights.sum()
            if there.any():
                logs[distance] = _quantiles(scale * relative, weights, 2 * np.array(LEVELS) - 1)
        for distance in reversed(range(len(DISTANCES) - 1)):
            unseen = np.isnan(logs[distance])
            logs[distance, unseen] = logs[distance + 1, unseen]
        logs = np.column_stack([_never_falling(each, masses) for each in logs.T])
        for distance, at in enumerate(logs.tolist()):
            found[rows[0].quantity, kind, distance] = Spread(
                quantity=rows[0].quantity,
                kind=kind,
                distance=distance,
                logs=(0.0, *at[1:]),
                stand_in_fraction=sum(members) / len(members),
            )
    return found


def _never_falling(
    values: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return values of which none falls: neighbours that would share their weighted mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (low, first, many), (high, second, more) = blocks.pop(-2), blocks.pop()
            total = first + second
            mean = (low * first + high * second) / total if total else low
            blocks.append((mean, total, many + more))
    return np.repeat([each[0] for each in blocks], [each[2] for each in blocks])


def _quantiles(
    values: NDArray[np.float64], weights: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) - weights[order] / 2
    return np.asarray(np.interp(shares, reached / weights.sum(), values[order]))


def folds(
    items: Sequence[T], count: int, key: Callable[[T], str]
) -> Iterator[tuple[list[T], list[T]]]:
    """
    Yield, per fold, the items outside and inside it.

    Items of one key stay together; keys are dealt out in their order, so that those that begin
    alike are spread over all folds.
    """
    number = {name: n % count for n, name in enumerate(sorted({key(each) for each in items}))}
    for fold in range(count):
        inside = [each for each in items if number[key(each)] == fold]
        if inside:
            yield [each for each in items if number[key(each)] != fold], inside
