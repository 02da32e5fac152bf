"""Local search over counts: replicas swap places while pairs get nearer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sizing.network.pair_gains import Counts
    from sizing.network.topology_units import TopologyUnit

TRIES = 200_000
"""Exchanges that are tried at most; counted, so that the answer is the same on any machine."""


class LocalSearch:
    """
    Counts of two roles in the leaves of a tree, and how many of each are in units of its tiers.

    Leaves are named by their first GPU. *gain* is that of a pair that meets in one unit of a tier,
    *widths* are the GPUs of a replica of each role, *fits* says whether a leaf has room for counts.
    """

    def __init__(
        self,
        root: TopologyUnit,
        gain: Sequence[float],
        widths: Counts,
        fits: Callable[[TopologyUnit, int, int], bool],
    ) -> None:
        self._gain, self._widths, self._fits = gain, widths, fits
        self._domains = {leaf.first: leaf for leaf in root.domains()}
        self._held: dict[int, Counts] = dict.fromkeys(self._domains, (0, 0))
        self._units: dict[int, tuple[int, ...]] = dict.fromkeys(self._domains, ())
        for tier in range(len(gain)):
            for unit in root.at(tier):
                for leaf in unit.domains():
                    self._units[leaf.first] += (unit.first,)
        self._sums: Counter[tuple[int, int, int]] = Counter()  # tier, unit, role
        self._tries = TRIES

    def improved(
        self, leaves: Sequence[tuple[TopologyUnit, Counts]]
    ) -> list[tuple[TopologyUnit, Counts]]:
        """Exchange replicas of two leaves, or move one, while sum_j gain_j M_j rises (eq. D2)."""
        for unit, counts in leaves:
            self._put(unit.first, counts)
        while (change := next(self._better(), None)) is not None:
            for leaf, counts in change:
                self._put(leaf, counts)
        return [(self._domains[leaf], counts) for leaf, counts in self._held.items() if any(counts)]

    def _put(self, leaf: int, counts: Counts) -> None:
        for role in (0, 1):
            for tier, unit in enumerate(self._units[leaf]):
                self._sums[tier, unit, role] += counts[role] - self._held[leaf][role]
        self._held[leaf] = counts

    def _better(self) -> Iterator[tuple[tuple[int, Counts], ...]]:
        """Yield exchanges of two leaves that gain; leaves alike are tried once."""
        alike = {
            (self._units[leaf], counts, self._domains[leaf].free): leaf
            for leaf, counts in self._held.items()
        }
        for a in [leaf for leaf in alike.values() if any(self._held[leaf])]:
            for b in alike.values():
                for step in self._moves():
                    self._tries -= 1
                    if self._tries <= 0:
                        return
                    here, there = (
                        (self._held[leaf][0] + sign * step[0], self._held[leaf][1] + sign * step[1])
                        for leaf, sign in ((a, 1), (b, -1))
                    )
                    if a == b or min(*here, *there) < 0 or not self._gains(a, b, step):
                        continue
                    if self._fits(self._domains[a], *here) and self._fits(self._domains[b], *there):
                        yield (a, here), (b, there)

    def _moves(self) -> tuple[Counts, ...]:
        """Return by what the counts of one leaf may change: equal widths, or a replica less."""
        p, d = self._widths
        first, second = max(p, d) // p, max(p, d) // d
        return (-first, second), (first, -second), (-1, 0), (0, -1)

    def _gains(self, a: int, b: int, step: Counts) -> bool:
        """Say whether a step of leaf *a*, and the opposite one of *b*, add to sum_j gain_j M_j."""
        total = 0.0
        for tier, gain in enumerate(self._gain):
            here, there = self._units[a][tier], self._units[b][tier]
            if gain and here != there:
                for unit, sign in ((here, 1), (there, -1)):
                    p, d = self._sums[tier, unit, 0], self._sums[tier, unit, 1]
                    total += gain * ((p + sign * step[0]) * (d + sign * step[1]) - p * d)
        return total > 1e-12 * sum(self._gain)
