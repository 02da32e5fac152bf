"""Intervals tried on whole families, engines, GPU generations and sources that they never saw."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.checks import Spec
from sizing.evidence.interval import fit_intervals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sizing.evidence.interval import Intervals, RowResidual

SPLITS: dict[str, Callable[[RowResidual], str]] = {
    "family": lambda each: each.family,
    "engine": lambda each: each.engine,
    "gpu": lambda each: each.generation,
    "source": lambda each: each.source,
}
"""What a split leaves out at a time: everything that has one of these names."""
ORDER = ("all", "group", "class")
"""What figures are of, in the order of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutCoverage(Spec):
    """
    Intervals of one quantity around rows of groups that were left out of them.

    Attributes:
        split: of `SPLITS`.
        of: `all` rows, the `group` that was left out, or a `class` of rows over all groups.
        name: of the group or class.
        quantity: `ttft` or `tpot`.
        rows: latencies tried.
        covered_fraction: of them inside their interval.
        median_width: (high - low) / predicted.
        median_error: median of |predicted / measured - 1|; no constant of an interval is in it.
    """

    split: str
    of: str
    name: str
    quantity: str
    rows: int
    covered_fraction: float
    median_width: float
    median_error: float


def leave_out(residuals: Sequence[RowResidual], split: str) -> tuple[HeldOutCoverage, ...]:
    """
    Leave out each group of a split in turn, fit the intervals to the rest, and try them on it.

    Args:
        residuals: of every row that is scored.
        split: of `SPLITS`.

    Returns:
        Over all rows, then by group, then by class of rows. Groups that leave no row of a
        quantity to learn from are not tried.

    Ignores:
        Constants of step models: they are the same in every split (docs/validation.md names those
        that were chosen with rows in view).
    """
    group_of = SPLITS[split]
    tries: dict[tuple[str, str, str], list[tuple[bool, float, float]]] = defaultdict(list)
    for group in sorted({group_of(each) for each in residuals}):
        made = fit_intervals(each for each in residuals if group_of(each) != group)
        for each in residuals:
            one = _try(made, each) if group_of(each) == group else None
            if one is not None:
                for of, name in (("all", "all"), ("group", group), ("class", each.row_class)):
                    tries[of, name, each.quantity].append(one)
    return tuple(
        _summary(split, *key, tries[key])
        for key in sorted(tries, key=lambda key: (ORDER.index(key[0]), *key[1:]))
    )


def _try(made: Intervals, each: RowResidual) -> tuple[bool, float, float] | None:
    """Return whether a row is inside its interval, how wide that is, and the row's error."""
    found = made.around(1.0, each.quantity, each.path, stand_in=each.stand_in)
    if found is None:
        return None
    inside = found.low_s <= math.exp(each.log_ratio) <= found.high_s
    return inside, found.high_s - found.low_s, abs(math.exp(-each.log_ratio) - 1)


def _summary(
    split: str, of: str, name: str, quantity: str, tries: Sequence[tuple[bool, float, float]]
) -> HeldOutCoverage:
    inside, widths, errors = zip(*tries, strict=True)
    return HeldOutCoverage(
        split=split,
        of=of,
        name=name,
        quantity=quantity,
        rows=len(tries),
        covered_fraction=float(np.mean(inside)),
        median_width=float(np.median(widths)),
        median_error=float(np.median(errors)),
    )
