"""Intervals from residuals: quantiles by group, backing off to what more rows say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.specs.checks import STRICT
from sizing.validation.fold import folds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sizing.validation.residual import Residual

LEVELS = (0.1, 0.9)
COVERAGE = LEVELS[1] - LEVELS[0]
PARENT_ROWS = 20.0
"""Rows of its own at which a group's quantiles weigh as much as its parent's."""
LARGEST_SHARE = 0.25
"""A configuration measured at many loads counts for at most this share of its group."""
FOLDS = 10
STAND_IN_LOG = math.log(1.3)
"""Versions of an engine differ by 30 % in TPOT: added in squares where rows had own constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """
    Residuals of one group of rows.

    Attributes:
        path: labels from coarse to fine, joined by `/`, the quantity first.
        rows: measurements behind it.
        configurations: different ones among them.
        low_log: 10 % quantile of ln(measured / predicted), shrunk to the parent's.
        high_log: 90 % quantile likewise.
        stand_in_fraction: share of the rows that were predicted with the constants of another
            version of the engine.
    """

    __pydantic_config__ = STRICT

    path: str
    rows: int
    configurations: int
    low_log: float
    high_log: float
    stand_in_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """80 % interval around a prediction; `rows` measurements of `group` stand behind it."""

    low_s: float
    high_s: float
    rows: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """
    Cells by path.

    Attributes:
        cells: of every group that had rows.
    """

    cells: dict[str, Cell]

    def around(
        self, value_s: float, quantity: str, path: Sequence[str], *, stand_in: bool = False
    ) -> Interval | None:
        """
        Interval around a prediction; `None` where no row of the quantity was ever measured.

        Args:
            value_s: predicted.
            quantity: `ttft` or `tpot`.
            path: labels from coarse to fine; the finest group with rows is taken.
            stand_in: predicted with the constants of another version of the engine; widens the
                interval by 30 % where the rows behind it had their own.

        """
        for depth in range(len(path), -1, -1):
            cell = self.cells.get("/".join((quantity, *path[:depth])))
            if cell is not None:
                extra = STAND_IN_LOG * (1 - cell.stand_in_fraction) if stand_in else 0.0
                return Interval(
                    low_s=value_s * math.exp(-math.hypot(min(cell.low_log, 0.0), extra)),
                    high_s=value_s * math.exp(math.hypot(max(cell.high_log, 0.0), extra)),
                    rows=cell.rows,
                    group=cell.path,
                )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """
    Intervals tried on rows that they were not made from.

    Attributes:
        rows: latencies tried.
        covered_fraction: of them inside their interval.
        median_width: (high - low) / predicted.
    """

    rows: int
    covered_fraction: float
    median_width: float


def fit_intervals(residuals: Iterable[Residual]) -> Intervals:
    """
    Make intervals of residuals (docs/model.md, eq. V5).

        q = (n q_own + k q_parent) / (n + k), k = 20 rows; q_parent of the root: q_own

    widened about their middle until leave-configurations-out folds are covered to 80 %.

    Args:
        residuals: of rows that nothing shipped was fitted on.

    Source:
        Cross-conformal prediction (Vovk 2015) of log residuals.

    Ignores:
        That rows of one configuration err alike, beyond leaving them out together.

    """
    known = list(residuals)
    return Intervals(cells=_cells(known, _stretches(known)))


def coverage(residuals: Sequence[Residual]) -> dict[tuple[str, str], Coverage]:
    """
    Cross-fit: every configuration is judged by intervals made from the others.

    Returns:
        By source and quantity; the source `all` is all of them.

    """
    tried: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    for train, test in folds(residuals, FOLDS, key=_together):
        made = fit_intervals(train)
        for each in test:
            found = made.around(1.0, each.quantity, each.path, stand_in=each.stand_in)
            if found is not None:
                inside = found.low_s <= math.exp(each.log_ratio) <= found.high_s
                for source in ("all", each.source):
                    hits = tried.setdefault((source, each.quantity), [])
                    hits.append((inside, found.high_s - found.low_s))
    return {
        key: Coverage(
            rows=len(tried[key]),
            covered_fraction=float(np.mean([inside for inside, _ in tried[key]])),
            median_width=float(np.median([width for _, width in tried[key]])),
        )
        for key in sorted(tried)
    }


def _together(each: Residual) -> str:
    """What is left out together: a configuration, near others of its load and engine."""
    return "/".join((*each.path[:2], each.configuration))


def _stretches(known: Sequence[Residual]) -> dict[tuple[str, str], float]:
    """Factor on the widths of each kind of load that covers left-out folds to 80 %."""
    needed: dict[tuple[str, str], list[float]] = {}
    for train, test in folds(known, FOLDS, key=_together):
        made = Intervals(cells=_cells(train, {}))
        for each in test:
            found = made.around(1.0, each.quantity, each.path, stand_in=each.stand_in)
            if found is not None:
                low, high = math.log(found.low_s), math.log(found.high_s)
                off = abs(each.log_ratio - (low + high) / 2) / max((high - low) / 2, 1e-3)
                needed.setdefault((each.quantity, each.path[0]), []).append(off)
    return {kind: float(np.quantile(off, COVERAGE)) for kind, off in needed.items()}


def _cells(residuals: Iterable[Residual], stretch: dict[tuple[str, str], float]) -> dict[str, Cell]:
    """Quantiles of every group, coarse ones first so that each finds its parent."""
    members: dict[tuple[str, ...], list[Residual]] = {}
    for each in residuals:
        labels = (each.quantity, *each.path)
        for depth in range(1, len(labels) + 1):
            members.setdefault(labels[:depth], []).append(each)
    shrunk: dict[tuple[str, ...], tuple[float, float]] = {}
    cells = {}
    for labels in sorted(members, key=lambda path: (len(path), path)):
        rows = members[labels]
        low, high = _shrunk(_quantiles(rows), shrunk.get(labels[:-1]), len(rows))
        if len(rows) == len(members.get(labels[:-1], ())):
            low, high = shrunk[labels[:-1]]  # the same rows under a longer name
        shrunk[labels] = (low, high)
        factor = stretch.get((labels[0], labels[1]), 1.0) if len(labels) > 1 else 1.0
        middle, half = (low + high) / 2, (high - low) / 2 * factor
        path = "/".join(labels)
        cells[path] = Cell(
            path=path,
            rows=len(rows),
            configurations=len({each.configuration for each in rows}),
            low_log=middle - half,
            high_log=middle + half,
            stand_in_fraction=sum(each.stand_in for each in rows) / len(rows),
        )
    return cells


def _shrunk(
    own: tuple[float, float], parent: tuple[float, float] | None, rows: int
) -> tuple[float, float]:
    """Move a group's quantiles towards its parent's, the fewer rows the further."""
    if parent is None:
        return own
    weight = rows / (rows + PARENT_ROWS)
    low, high = (weight * x + (1 - weight) * up for x, up in zip(own, parent, strict=True))
    return low, high


def _quantiles(rows: Sequence[Residual]) -> tuple[float, float]:
    """Quantiles of the logs, each configuration counting for at most a share of them."""
    counts: dict[str, int] = {}
    for each in rows:
        counts[each.configuration] = counts.get(each.configuration, 0) + 1
    most = max(1.0, LARGEST_SHARE * len(rows))
    weights = np.array([min(1.0, most / counts[each.configuration]) for each in rows])
    logs = np.array([each.log_ratio for each in rows])
    order = np.argsort(logs)
    reached = np.cumsum(weights[order]) - weights[order] / 2
    low, high = np.interp(LEVELS, reached / weights.sum(), logs[order])
    return float(low), float(high)
