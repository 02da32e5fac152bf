"""Intervals made of the residuals of measured rows, and judged by rows left out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from sizing.planner.intervals import (
    DEPTHS,
    DISTANCES,
    HIGH,
    LEVELS,
    Centre,
    Intervals,
    Labels,
    Spread,
    groups_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
T = TypeVar("T")

QUANTITIES = ("ttft", "tpot")
NEAR = 1
"""Farthest distance at which the same model was measured with the same engine and GPUs."""
OTHERS = 20.0
"""Rows as which other kinds of load count, at most, in the spread of one kind."""
LEAST_LOG = 0.005
"""Errors below 0.5 % are chance: no kind of load is scaled by less."""
FOLDS = 10
ROW_FOLDS = 4


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
        groups = [groups_of(each.quantity, each.path) for each in rows]
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
    for distance, group in enumerate(reversed(groups.tolist())):
        if group in found:
            return distance, found[group]
    return len(DEPTHS), 0.0


def _spreads(rows: Sequence[RowResidual], misses: _Misses) -> dict[tuple[str, str, int], Spread]:
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
