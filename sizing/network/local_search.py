"""Local search over counts: replicas swap places while pairs get nearer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.network.pair_gains import Counts
from sizing.network.topology_units import TopologyUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIES = 200_000
"""Exchanges that are tried at most; counted, so that the answer is the same on any machine."""


@dataclass(slots=True, kw_only=True)
class LocalSearch:
    """
    Counts of two roles in leaves, and in the units that these are in.

    Attributes:
        gain: of a pair that meets in one unit of a tier.
        widths: GPUs of a replica of each role.
        fits: whether a leaf has room for counts.
        tries: left.
    """

    root: TopologyUnit
    gain: Sequence[float]
    widths: Counts
    fits: Callable[[TopologyUnit, int, int], bool]
    tries: int = TRIES

    def improved(
        self, leaves: Sequence[tuple[TopologyUnit, Counts]]
    ) -> list[tuple[TopologyUnit, Counts]]:
        """Exchange replicas of two leaves, or move one, while sum_j gain_j M_j rises (eq. D2)."""
        domains = {unit.first: unit for unit in self.root.domains()}
        held: dict[int, Counts] = dict.fromkeys(domains, (0, 0))
        held.update({unit.first: counts for unit, counts in leaves})
        units = self._units()
        sums: dict[tuple[int, int], list[int]] = {}
        for leaf, counts in held.items():
            self._add(sums, units[leaf], counts)
        while self.tries > 0:
            change = next(self._better(domains, held, units, sums), None)
            if change is None:
                break
            for leaf, counts in change:
                before = held[leaf]
                held[leaf] = counts
                self._add(sums, units[leaf], (counts[0] - before[0], counts[1] - before[1]))
        return [(domains[leaf], counts) for leaf, counts in held.items() if any(counts)]

    def _units(self) -> dict[int, tuple[int, ...]]:
        """Return the units of the tiers that count, for each leaf."""
        found: dict[int, tuple[int, ...]] = {leaf.first: () for leaf in self.root.domains()}
        for tier in range(len(self.gain)):
            for unit in self.root.at(tier):
                for leaf in unit.domains():
                    found[leaf.first] += (unit.first,)
        return found

    def _add(
        self, sums: dict[tuple[int, int], list[int]], units: Sequence[int], counts: Counts
    ) -> None:
        """Count replicas in all units that a leaf is in."""
        for tier, unit in enumerate(units):
            both = sums.setdefault((tier, unit), [0, 0])
            both[0] += counts[0]
            both[1] += counts[1]

    def _better(
        self,
        domains: dict[int, TopologyUnit],
        held: dict[int, Counts],
        units: dict[int, tuple[int, ...]],
        sums: dict[tuple[int, int], list[int]],
    ) -> Iterator[tuple[tuple[int, Counts], ...]]:
        """Yield exchanges of two leaves that gain; leaves alike are tried once."""
        alike = {(units[leaf], counts, domains[leaf].free): leaf for leaf, counts in held.items()}
        firsts = [leaf for leaf in alike.values() if any(held[leaf])]
        for a in firsts:
            for b in alike.values():
                for given, taken in self._moves():
                    self.tries -= 1
                    if self.tries <= 0:
                        return
                    here = (held[a][0] - given[0] + taken[0], held[a][1] - given[1] + taken[1])
                    there = (held[b][0] + given[0] - taken[0], held[b][1] + given[1] - taken[1])
                    if a == b or min(*here, *there) < 0:
                        continue
                    step = (taken[0] - given[0], taken[1] - given[1])
                    if self._gained(units[a], units[b], step, sums) <= 0:
                        continue
                    if self.fits(domains[a], *here) and self.fits(domains[b], *there):
                        yield (a, here), (b, there)

    def _moves(self) -> tuple[tuple[Counts, Counts], ...]:
        """Return what one leaf gives and what it takes: equal widths, or a replica alone."""
        p, d = self.widths
        wide = max(p, d)
        first, second = (wide // p, 0), (0, wide // d)
        return (first, second), (second, first), ((1, 0), (0, 0)), ((0, 1), (0, 0))

    def _gained(
        self,
        here: Sequence[int],
        there: Sequence[int],
        step: Counts,
        sums: dict[tuple[int, int], list[int]],
    ) -> float:
        """Return what an exchange adds to sum_j gain_j M_j."""
        total = 0.0
        for tier, each in enumerate(self.gain):
            if not each or here[tier] == there[tier]:
                continue
            for unit, sign in ((here[tier], 1), (there[tier], -1)):
                p, d = sums[tier, unit]
                total += each * ((p + sign * step[0]) * (d + sign * step[1]) - p * d)
        return total if total > 1e-12 * sum(self.gain) else 0.0
