"""Intervals made of the residuals of measured rows, and judged by rows left out of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sizing.planner.intervals import (
    HIGH,
    LEVELS,
    PRIOR_FREEDOM,
    ROW_FREEDOM,
    GroupEffects,
    Intervals,
    KindErrors,
    Labels,
    RowGroup,
    Variances,
    at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
T = TypeVar("T")

QUANTITIES = ("ttft", "tpot")
SIZE = 0.68
"""Share of the rows whose errors are below the size of errors: one standard deviation."""
FARTHEST = 3.0
"""Sizes by which an error counts at most: beyond, a row is probably mislabelled."""
SCALE_ROWS = 20
"""Rows as which those of all kinds of load count in the size of one kind's errors."""
SCALE_FAMILIES = 2.0
"""Families as which all kinds of load count in how far apart the groups of one kind are."""
FIRST = 0.1
"""Standard deviation between groups that a level has in sizes of all errors before any row."""
PRIOR_ROWS = 4.0
"""Rows as which the other kinds of load count in the variance of rows around their groups."""
SCHEMES = (("configuration",), ("family",), ("gpu",), ("engine",), ("engine", "version"))
"""Labels of what is left out in turn to see how far off intervals are."""
LEAST = 1e-3
"""Sizes by which rows lie around their groups at least: equal rows would leave nothing."""
ROUNDS = 30
"""Of expectation and maximisation: figures then change by less than 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResidual:
    """
    One latency of one row, `ttft` or `tpot`.

    Attributes:
        log_ratio: ln(measured / predicted).
        row_class: of the row: what `class_of` names.
    """

    quantity: str
    predicted_s: float
    log_ratio: float
    source: str
    labels: Labels
    row_class: str = ""


def fit_intervals(residuals: Iterable[RowResidual]) -> Intervals:
    """
    Make intervals of residuals (docs/model.md, eq. V5).

        error of a row = sum over levels of the effect of its group + its own
        variance of a level = (2 v r^2 + expected squares of its effects) / (2 + groups), v that of
            all kinds of load, r the size of the kind's errors over that of all
        interval = mean + Student's t of the variances of what is left, times a factor with which
            80 % of left-out rows are inside

    Args:
        residuals: of rows that nothing shipped was fitted on.

    Source: variance components by expectation and maximisation (Dempster, Laird, Rubin 1977) with
        an inverse chi-squared prior of 2 degrees of freedom that the kinds of load share; rows with
        Student's t errors by weights (Lange, Little, Taylor 1989).

    Ignores that rows far above and far below their mean are not equally frequent.
    """
    groups: list[RowGroup] = []
    variances: list[Variances] = []
    every = list(residuals)
    for quantity in QUANTITIES:
        # Sums in one order give the same figures for the same rows.
        rows = [each for each in every if each.quantity == quantity]
        rows.sort(key=lambda each: (each.labels, each.log_ratio, each.predicted_s))
        if rows:
            fit = _Fit(rows)
            fit.run()
            own = fit.groups(quantity)
            groups += own
            variances += _calibrated(own, fit.variances(quantity), rows)
    return Intervals(tuple(groups), tuple(variances))


def _calibrated(
    groups: Sequence[RowGroup], variances: Sequence[Variances], rows: Sequence[RowResidual]
) -> list[Variances]:
    """Scale the variances so that 80 % of rows are inside whichever of `SCHEMES` is left out."""
    logs: dict[Labels, list[float]] = {}
    for each in rows:
        logs.setdefault(each.labels, []).append(each.log_ratio)
    needed = {
        kind.kind: [
            _needed([each for each in groups if each.labels.kind == kind.kind], kind, scheme, logs)
            for scheme in SCHEMES
        ]
        for kind in variances
    }
    every = _widest([[*chain(*schemes)] for schemes in zip(*needed.values(), strict=True)]) or 1.0
    found = []
    for kind in variances:
        families = len({each.labels.family for each in groups if each.labels.kind == kind.kind})
        share = families / (families + SCALE_FAMILIES)
        scale = (_widest(needed[kind.kind]) or every) ** share * every ** (1 - share)
        levels = tuple(scale**2 * each for each in kind.levels)
        found.append(replace(kind, levels=levels, rows=scale**2 * kind.rows))
    return found


def _widest(schemes: Sequence[Sequence[float]]) -> float:
    """Return the multiple of intervals that has 80 % inside in the worst scheme; 0 without rows."""
    return max((float(np.quantile(each, 2 * HIGH - 1)) for each in schemes if each), default=0.0)


def _needed(
    groups: Sequence[RowGroup],
    variances: Variances,
    scheme: tuple[str, ...],
    logs: Mapping[Labels, Sequence[float]],
) -> list[float]:
    """Return the multiple of its interval that each row of one kind needs when it is left out."""
    found: list[float] = []
    keys = [at(each.labels, scheme) for each in groups]
    for key in sorted(set(keys)):
        pairs = list(zip(groups, keys, strict=True))
        rest = [each for each, own in pairs if own != key]
        if not rest:
            break
        errors = KindErrors(rest, variances)
        for left_out in [each.labels for each, own in pairs if own == key]:
            error = errors.error(left_out)
            found += [error.needed(log) / error.above(HIGH) for log in logs[left_out]]
    return found


class _Kind:
    """The rows of one kind of load, and what is known of their variances so far."""

    def __init__(self, rows: Sequence[RowResidual], all_size: float) -> None:
        logs = np.array([each.log_ratio for each in rows])
        families = len({each.labels.family for each in rows})
        share = families / (families + SCALE_FAMILIES)
        size = math.sqrt(
            (len(rows) * _size(logs) ** 2 + SCALE_ROWS * all_size**2) / (len(rows) + SCALE_ROWS)
        )
        self.scale = (size / all_size) ** share
        """Size of the kind's errors over that of all, as far as its families show it."""
        self.logs = np.clip(logs, -FARTHEST * size, FARTHEST * size)
        self.labels = list(dict.fromkeys(each.labels for each in rows))
        number = {each: place for place, each in enumerate(self.labels)}
        self.group = np.array([number[each.labels] for each in rows])
        self.effects = GroupEffects(self.labels)
        self.weights = np.ones(len(rows))
        self.levels = np.full(len(LEVELS), 0.3 * size**2)
        self.rows = 0.4 * size**2
        self.squares = np.zeros(len(LEVELS))
        self.row_squares = 0.0

    @property
    def group_weights(self) -> NDArray[np.float64]:
        return np.bincount(self.group, self.weights).astype(np.float64)

    @property
    def means(self) -> NDArray[np.float64]:
        return np.bincount(self.group, self.weights * self.logs) / self.group_weights

    def expect(self) -> None:
        """Find the expected squares of all effects, and how far off each row is."""
        covariance, inverse, solved = self.effects.solve(
            self.levels, self.rows / self.group_weights, self.means
        )
        shared = self.effects.shared
        found = np.einsum("i,lij,j->l", solved, shared, solved)
        unknown = np.tensordot(shared, inverse, 2)
        left = self.levels * self.effects.counts - self.levels**2 * unknown
        self.squares = self.levels**2 * found + np.maximum(left, 0.0)
        spread = np.maximum(np.diag(covariance - covariance @ inverse @ covariance), 0.0)
        squares = (self.logs - (covariance @ solved)[self.group]) ** 2 + spread[self.group]
        self.weights = (ROW_FREEDOM + 1) / (ROW_FREEDOM + squares / self.rows)
        self.row_squares = float((self.weights * squares).sum())


class _Fit:
    """The variances of one quantity, those of each kind of load near those of all."""

    def __init__(self, rows: Sequence[RowResidual]) -> None:
        self.size = _size(np.array([each.log_ratio for each in rows]))
        by_kind: dict[str, list[RowResidual]] = {}
        for each in rows:
            by_kind.setdefault(each.labels.kind, []).append(each)
        self.kinds = {name: _Kind(own, self.size) for name, own in by_kind.items()}
        self.levels, self.rows = np.zeros(len(LEVELS)), 0.0

    def run(self) -> None:
        for _ in range(ROUNDS):
            for kind in self.kinds.values():
                kind.expect()
            self._maximise()

    def _maximise(self) -> None:
        kinds = self.kinds.values()
        squares = sum(kind.squares / kind.scale**2 for kind in kinds)
        counts = sum(kind.effects.counts for kind in kinds)
        first = PRIOR_FREEDOM * (FIRST * self.size) ** 2
        self.levels = (squares + first) / (counts + PRIOR_FREEDOM)
        total = sum(len(kind.logs) for kind in kinds)
        found = sum(kind.row_squares / kind.scale**2 for kind in kinds) / total
        self.rows = max(found, (LEAST * self.size) ** 2)
        for kind in kinds:
            prior = PRIOR_FREEDOM * kind.scale**2 * self.levels
            kind.levels = (prior + kind.squares) / (PRIOR_FREEDOM + kind.effects.counts)
            prior_rows = PRIOR_ROWS * kind.scale**2 * self.rows
            own_rows = (prior_rows + kind.row_squares) / (PRIOR_ROWS + len(kind.logs))
            kind.rows = max(own_rows, (LEAST * self.size) ** 2)

    def groups(self, quantity: str) -> list[RowGroup]:
        return [
            RowGroup(quantity=quantity, labels=labels, rows=int(rows), weight=weight, log=log)
            for kind in self.kinds.values()
            for labels, rows, weight, log in zip(
                kind.labels,
                np.bincount(kind.group).tolist(),
                kind.group_weights.tolist(),
                kind.means.tolist(),
                strict=True,
            )
        ]

    def variances(self, quantity: str) -> list[Variances]:
        every = [("", self.levels, self.rows)]
        every += [(name, kind.levels, kind.rows) for name, kind in self.kinds.items()]
        return [
            Variances(quantity=quantity, kind=name, levels=tuple(levels.tolist()), rows=rows)
            for name, levels, rows in every
        ]


def _size(logs: NDArray[np.float64]) -> float:
    return max(float(np.quantile(np.abs(logs), SIZE)), 1e-3)


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
