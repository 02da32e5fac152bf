"""Counts of two roles in the units of a tree: the best of them by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sizing.network.topology_units import TopologyUnit

Counts = tuple[int, int]
"""Replicas of the first and of the second role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTable:
    """
    What a unit can hold, and what it is worth.

    Attributes:
        value: best gain by replicas of the first and the second role; -inf: no room.
        steps: for each unit inside, its table and which of its `options` is taken.
    """

    value: NDArray[np.float64]
    steps: tuple[tuple[GainTable, NDArray[np.int64]], ...] = ()

    @property
    def options(self) -> list[Counts]:
        """Counts that there is room for, the most valuable use of each."""
        return [(int(p), int(d)) for p, d in np.argwhere(np.isfinite(self.value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """
    What counts are worth.

    Attributes:
        leaf: tier of the units that replicas are packed into.
        fits: test whether a leaf has room for counts.
        gain: gain of a pair that meets in one unit of a tier, by tier: c_(j+1) - c_j.
        opening: price of a leaf that is used at all.
        evenness: price of the squared counts of a unit.
        caps: most replicas of each role in one unit, by tier.
    """

    total: Counts
    leaf: int
    fits: Callable[[TopologyUnit, int, int], bool]
    gain: tuple[float, ...]
    opening: float
    evenness: float
    caps: dict[int, Counts] = field(default_factory=dict)


class GainTables:
    """Makes tables, one for each kind of unit."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._tables: dict[tuple[object, ...], GainTable] = {}
        self._keys: dict[tuple[object, ...], int] = {}

    def table(self, unit: TopologyUnit) -> GainTable:
        """
        Return the table of a unit.

            f_u(P, D) = max over shares of the units inside of sum f + (c_(j+1) - c_j) P D
            (docs/model.md, eq. D3)
        """
        key = self._key(unit)
        if key not in self._tables:
            leaf = unit.tier == self.objective.leaf
            self._tables[key] = self._leaf(unit) if leaf else self._joined(unit)
        return self._tables[key]

    def _key(self, unit: TopologyUnit) -> tuple[object, ...]:
        if unit.tier == 0:
            return (0, unit.free)
        inside = tuple(self._keys.setdefault(self._key(r), len(self._keys)) for r in unit.inner)
        return (unit.tier, inside)

    def _leaf(self, unit: TopologyUnit) -> GainTable:
        first, second = self.objective.total
        value = np.full((first + 1, second + 1), -np.inf)
        for p in range(first + 1):
            for d in range(second + 1):
                if not self.objective.fits(unit, p, d):
                    break
                value[p, d] = -self.objective.opening if p or d else 0.0
        # Whatever meets in a leaf is taken to meet in one HB domain.
        return self._worth(value, range(unit.tier + 1))

    def _joined(self, unit: TopologyUnit) -> GainTable:
        first, second = self.objective.total
        acc = np.full((first + 1, second + 1), -np.inf)
        acc[0, 0] = 0.0
        reach = (0, 0)
        steps = []
        for inner in unit.inner:
            child = self.table(inner)
            new = np.full_like(acc, -np.inf)
            choice = np.zeros(acc.shape, dtype=np.int64)
            for index, (p, d) in enumerate(child.options):
                high, wide = min(reach[0], first - p) + 1, min(reach[1], second - d) + 1
                summed = acc[:high, :wide] + child.value[p, d]
                view = new[p : p + high, d : d + wide]
                better = summed > view
                view[better] = summed[better]
                choice[p : p + high, d : d + wide][better] = index
            filled = np.argwhere(np.isfinite(new))
            reach = (int(filled[:, 0].max()), int(filled[:, 1].max()))
            acc = new
            steps.append((child, choice))
        return self._worth(acc, range(unit.tier, unit.tier + 1), tuple(steps))

    def _worth(
        self,
        value: NDArray[np.float64],
        tiers: range,
        steps: tuple[tuple[GainTable, NDArray[np.int64]], ...] = (),
    ) -> GainTable:
        """Add what pairs gain that meet here, less what crowding costs, and keep to the caps."""
        p, d = np.ogrid[: value.shape[0], : value.shape[1]]
        gain = sum(self.objective.gain[j] for j in tiers if j < len(self.objective.gain))
        crowded = self.objective.evenness * (p * p + d * d)
        worth = value + gain * p * d - crowded
        first, second = self.objective.caps.get(tiers[-1], self.objective.total)
        worth[first + 1 :, :] = -np.inf
        worth[:, second + 1 :] = -np.inf
        return GainTable(value=worth, steps=steps)


def shares(
    unit: TopologyUnit, table: GainTable, counts: Counts
) -> list[tuple[TopologyUnit, Counts]]:
    """Return the leaves that hold replicas in the best placement of *counts*, with theirs."""
    if not table.steps:
        return [(unit, counts)] if any(counts) else []
    leaves: list[tuple[TopologyUnit, Counts]] = []
    p, d = counts
    for inner, (child, choice) in reversed(list(zip(unit.inner, table.steps, strict=True))):
        taken = child.options[int(choice[p, d])]
        leaves = shares(inner, child, taken) + leaves
        p, d = p - taken[0], d - taken[1]
    return leaves


def bound_gain(
    total: Counts, widths: Counts, gain: Sequence[float], roomiest: Sequence[int]
) -> float:
    """
    Bound the gain of any placement without searching.

        M_j <= min(P min(D, (g_j - p)/d), D min(P, (g_j - d)/p), g_j (P p + D d)/(4 p d))
        (docs/model.md, eq. D4): the last since x y <= (x + y)^2/4 and x + y <= g_j in each unit

    P and D replicas take p and d GPUs; g_j is the free GPUs of the roomiest unit of tier j.
    """
    first, second = total
    p, d = widths
    bound = 0.0
    for gain_of_pair, free in zip(gain, roomiest, strict=False):
        beside = min(second, max(0, free - p) // d) if second else 0
        other = min(first, max(0, free - d) // p) if second else 0
        even = free * (first * p + second * d) / (4 * p * d)
        bound += gain_of_pair * min(first * beside, second * other, even)
    return bound
