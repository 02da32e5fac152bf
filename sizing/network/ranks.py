"""Ranks of a training job on nodes: rings cut as few links as there must be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError, NegativeAnswer
from minicluster.specs.checks import positive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sizing.network.topology_units import TopologyUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Rank r = tp + TP (cp + CP (pp + PP dp))."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        """Check the counts."""
        positive(tp=self.tp, cp=self.cp, pp=self.pp, dp=self.dp)

    @property
    def atoms(self) -> int:
        """Groups of tp GPUs in one replica."""
        return self.cp * self.pp

    @property
    def replica(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.atoms

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.replica * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """
    What crosses the units of one tier.

    Attributes:
        tier: its name.
        units: that the job spreads over.
        ring_edges: of a ring over the replicas, out of `ring`, that cross them.
        bound: no order of the replicas, in any units, crosses fewer.
        random_fraction: of the edges that a random order crosses in the same units.
        stage_edges: of all replicas' pipelines and sequence slices that cross them.
        uplink_fraction: of a unit's uplinks that its rings take at full speed.
    """

    tier: str
    units: int
    ring: int
    ring_edges: int
    bound: int
    random_fraction: float
    stage_edges: int
    uplink_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """
    GPUs by rank.

    Attributes:
        degrees: of the job.
        ranks: (node, GPU of the node) by rank.
        cuts: by tier, from the inside out, the outermost unit of all left out.
        optimal: every ring crosses no more than it must.
        warnings: what the layout costs, where it does not follow the rules.
    """

    degrees: Degrees
    ranks: tuple[tuple[str, int], ...]
    cuts: tuple[Cut, ...]
    optimal: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """
    Constraints of a job.

    Attributes:
        straddle: TP may leave the HB domain; it then takes whole domains.
        replica_within: the widest tier that one replica may spread over; `None`: any.
        oversubscription: of each tier, inner to outer, as one GPU sees it.
    """

    straddle: bool = False
    replica_within: int | None = None
    oversubscription: tuple[float, ...] = ()


def place_ranks(
    degrees: Degrees, root: TopologyUnit, tiers: Sequence[str], rules: RankRules | None = None
) -> RankPlan:
    """
    Put the ranks of a job onto free GPUs.

        cut_j ≥ u_j, the fewest units of tier j that hold the replicas (0 if one does); all n edges
        where a replica is wider than a unit      (docs/model.md, eq. D1)

    Replicas fill the fewest units of the outermost tier, in these the fewest of the next, and so
    on; the last unit is the smallest that is large enough. In the order of the tree a ring crosses
    each unit once: u_j edges, its minimum cut.

    Args:
        degrees: TP inside an HB domain (hard), a replica inside the innermost unit that holds it.
        root: free GPUs.
        tiers: names, the HB domain first.
        rules: what is allowed.

    Returns:
        GPUs by rank, and what crosses each tier.

    Raises:
        InputError: TP wider than the HB domain without permission.
        NegativeAnswer: too few free GPUs; says how many and which constraint.

    Source:
        A ring over k units crosses each boundary at least once. Best fit as in Kueue's TAS
        (KEP-2724). MAST (OSDI 2024) and Llama 3's scheduler look for the same minimum cut.

    Ignores:
        Traffic of other jobs.

    """
    rules = rules or RankRules()
    domain = max(unit.free for unit in root.domains())
    atom = degrees.tp
    warnings: tuple[str, ...] = ()
    if degrees.tp > domain:
        atom, warnings = _straddling(degrees, domain, tiers, rules)
    tier = _replica_tier(degrees, root, tiers, rules)
    taken = _select(root, degrees.dp, tier, degrees, min(atom, domain))
    replicas = list(_filled(taken, degrees, min(atom, domain)))
    ranks = tuple(gpu for replica in replicas for gpu in replica.gpus)
    cuts = tuple(
        _cut(index, tiers, root, replicas, degrees, rules) for index in range(len(tiers) - 1)
    )
    return RankPlan(
        degrees=degrees,
        ranks=ranks,
        cuts=cuts,
        optimal=all(cut.ring_edges == cut.bound for cut in cuts),
        warnings=warnings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """GPUs of one replica in rank order, and the unit of every tier that each atom is in."""

    gpus: tuple[tuple[str, int], ...]
    atoms: tuple[tuple[int, ...], ...]


def _straddling(
    degrees: Degrees, domain: int, tiers: Sequence[str], rules: RankRules
) -> tuple[int, tuple[str, ...]]:
    """Refuse TP beyond the HB domain, or take whole domains for it where that is allowed."""
    if not rules.straddle:
        raise InputError(
            "tp", degrees.tp, f"at most the {domain} free GPUs of one {tiers[0]}",
            "--allow-tp-straddle permits it; every layer then waits for the network",
        )  # fmt: skip
    if degrees.tp % domain:
        raise InputError("tp", degrees.tp, f"a multiple of the {domain} GPUs of one {tiers[0]}")
    text = f"TP{degrees.tp} straddles {degrees.tp // domain} {tiers[0]} units: not hidden"
    return domain, (text,)


def _replica_tier(
    degrees: Degrees, root: TopologyUnit, tiers: Sequence[str], rules: RankRules
) -> int:
    """Return the innermost tier of which a unit holds a whole replica."""
    atom = min(degrees.tp, max(unit.free for unit in root.domains()))
    needed = degrees.replica // atom
    for tier in range(root.tier + 1):
        if any(unit.atoms(atom) >= needed for unit in root.at(tier)):
            break
    else:
        _too_small(degrees, root, tiers)
    widest = rules.replica_within
    if widest is not None and tier > widest:
        best = max(unit.atoms(atom) * atom for unit in root.at(widest))
        raise NegativeAnswer(
            f"a replica of {degrees.replica} GPUs does not fit one {tiers[widest]}: the roomiest"
            f" has {best} free in groups of TP{degrees.tp}, {degrees.replica - best} too few"
            f" (constraint: replica within {tiers[widest]})"
        )
    return tier


def _too_small(degrees: Degrees, root: TopologyUnit, tiers: Sequence[str]) -> None:
    """Say by how many GPUs a job does not fit, and what constrains it."""
    raise NegativeAnswer(
        f"the job needs {degrees.gpus} GPUs, {root.free} are free:"
        f" {max(0, degrees.gpus - root.free)} too few"
        f" (constraint: TP{degrees.tp} inside one {tiers[0]})"
    )


def _capacity(unit: TopologyUnit, tier: int, degrees: Degrees, atom: int) -> int:
    """Count the replicas that fit a unit, none of them across units of *tier*."""
    needed = degrees.replica // atom
    return sum(inner.atoms(atom) // needed for inner in unit.at(tier))


def _select(
    root: TopologyUnit, replicas: int, tier: int, degrees: Degrees, atom: int
) -> list[tuple[TopologyUnit, int]]:
    """Choose units of *tier* and how many replicas each takes, in the order of the tree."""
    room_for = _capacity(root, tier, degrees, atom)
    if room_for < replicas:
        missing = (replicas - room_for) * degrees.replica
        raise NegativeAnswer(
            f"{replicas} replicas of {degrees.replica} GPUs need {degrees.gpus}; there is room for"
            f" {room_for} in {root.free} free GPUs, {missing} GPUs too few"
            f" (constraint: TP{degrees.tp} inside one HB domain, a replica inside one unit)"
        )
    if root.tier == tier:
        return [(root, replicas)]
    inner = {index: _capacity(unit, tier, degrees, atom) for index, unit in enumerate(root.inner)}
    chosen: dict[int, int] = {}
    left = replicas
    for index in sorted(inner, key=lambda each: -inner[each]):
        if left and inner[index] >= left:  # the last one: the smallest that is large enough
            rest = [i for i in inner if i not in chosen and inner[i] >= left]
            chosen[min(rest, key=lambda each: inner[each])] = left
            left = 0
        elif left:
            chosen[index] = inner[index]
            left -= inner[index]
    return [
        found
        for index in sorted(chosen)
        if chosen[index]
        for found in _select(root.inner[index], chosen[index], tier, degrees, atom)
    ]


def _filled(
    taken: Sequence[tuple[TopologyUnit, int]], degrees: Degrees, atom: int
) -> Iterator[_Replica]:
    """Fill the chosen units replica by replica, in the order of the tree."""
    needed = degrees.replica // atom
    for unit, replicas in taken:
        atoms = list(_atoms(unit, atom))
        for index in range(replicas):
            own = atoms[index * needed : (index + 1) * needed]
            yield _Replica(
                gpus=tuple(gpu for gpus, _ in own for gpu in gpus),
                atoms=tuple(path for _, path in own),
            )


def _atoms(
    unit: TopologyUnit, atom: int, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[tuple[str, int], ...], tuple[int, ...]]]:
    """Yield groups of neighbouring GPUs with the units that they are in, inner to outer."""
    path = (unit.first, *path)
    if unit.tier == 0:
        for start in range(0, unit.free - atom + 1, atom):
            yield unit.gpus[start : start + atom], path
    for inner in unit.inner:
        yield from _atoms(inner, atom, path)


def _cut(
    tier: int,
    tiers: Sequence[str],
    root: TopologyUnit,
    replicas: Sequence[_Replica],
    degrees: Degrees,
    rules: RankRules,
) -> Cut:
    """Count what crosses the units of one tier (eq. D1)."""
    domains = _unit_of_domain(root, tier)
    where = [[domains[path[0]] for path in replica.atoms] for replica in replicas]
    count = len(replicas)
    edges = max(
        sum(where[i][position] != where[(i + 1) % count][position] for i in range(count))
        for position in range(len(where[0]))
    ) if count > 1 else 0  # fmt: skip
    stages = sum(a != b for own in where for a, b in itertools.pairwise(own))
    units = {unit for own in where for unit in own}
    same = [sum(own[0] == unit for own in where) for unit in units]
    pairs = count * (count - 1)
    rate = rules.oversubscription[tier + 1] if rules.oversubscription else 1.0
    size = max(unit.free for unit in root.at(tier)) or 1
    return Cut(
        tier=tiers[tier],
        units=len(units),
        ring=count,
        ring_edges=edges,
        bound=_bound(tier, root, degrees, count),
        random_fraction=1 - sum(n * (n - 1) for n in same) / pairs if pairs else 0.0,
        stage_edges=stages,
        uplink_fraction=min(degrees.replica, size) * rate / size if edges else 0.0,
    )


def _unit_of_domain(root: TopologyUnit, tier: int) -> dict[int, int]:
    """Return the unit of a tier by the first GPU of each HB domain."""
    return {
        domain.first: unit.first for unit in root.at(tier) for domain in unit.domains()
    }  # fmt: skip


def _bound(tier: int, root: TopologyUnit, degrees: Degrees, replicas: int) -> int:
    """Count the fewest units of a tier that hold the replicas; 0 if one does (eq. D1)."""
    if replicas == 1:
        return 0
    atom = min(degrees.tp, max(unit.free for unit in root.domains()))
    needed = degrees.replica // atom
    holds = sorted((unit.atoms(atom) for unit in root.at(tier)), reverse=True)
    if holds[0] < needed:  # a replica is wider than a unit, and kept together: none next to it
        return replicas
    left, units = replicas, 0
    for atoms in holds:
        if left <= 0:
            break
        left -= atoms // needed
        units += 1
    return units if units > 1 else 0
