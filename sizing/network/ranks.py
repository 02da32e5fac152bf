"""Ranks of a training job on nodes: rings cut as few links as there must be."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from minicluster.specs.checks import Count, Spec
from sizing.network.topology_units import TopologyUnit, replica_tier, tp_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees(Spec):
    """Rank r = tp + TP (cp + CP (pp + PP dp))."""

    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    dp: Count = 1

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
class TierCut:
    """
    Traffic that crosses the units of one tier.

    Attributes:
        units: units that the job spreads over.
        ring_edges: edges of a ring over the replicas, out of `ring`, that cross them.
        bound: no order of the replicas, in any units, crosses fewer.
        random_fraction: share of the edges that a random order crosses in the same units.
        stage_edges: edges of all replicas' pipelines and sequence slices that cross them.
        uplink_fraction: share of a unit's uplinks that its rings take at full speed.
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
        ranks: (node, GPU of the node) by rank.
        cuts: cuts by tier, from the inside out, without the outermost unit of all.
        optimal: every ring crosses no more than it must.
        warnings: what the layout costs, where it does not follow the rules.
    """

    degrees: Degrees
    ranks: tuple[tuple[str, int], ...]
    cuts: tuple[TierCut, ...]
    optimal: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """
    Constraints of a job.

    Attributes:
        straddle: TP may leave the HB domain; it then takes equal shares of as few as can be.
        replica_within: the widest tier that one replica may spread over; `None`: any.
        oversubscription: oversubscription of each tier, inner to outer, as one GPU sees it.
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
    parts = tp_parts("tp", degrees.tp, root, tiers[0], straddle=rules.straddle)
    warning = f"TP{degrees.tp} straddles {parts} units of {tiers[0]}: not hidden"
    job = _RankedJob(degrees=degrees, atom=degrees.tp // parts)
    tier = replica_tier(root, tiers, (job.atom, job.atoms), within=rules.replica_within)
    if tier is None:
        raise NegativeAnswer(
            f"the job needs {degrees.gpus} GPUs, {root.free} are free:"
            f" {max(0, degrees.gpus - root.free)} too few"
            f" (constraint: TP{degrees.tp} inside one {tiers[0]})"
        )
    replicas = [
        replica
        for unit, count in _select(root, degrees.dp, tier, job)
        for replica in job.filled(unit, count)
    ]
    cuts = tuple(_cut(index, tiers, root, replicas, job, rules) for index in range(len(tiers) - 1))
    return RankPlan(
        degrees=degrees,
        ranks=tuple(gpu for replica in replicas for gpus, _ in replica for gpu in gpus),
        cuts=cuts,
        optimal=all(cut.ring_edges == cut.bound for cut in cuts),
        warnings=(warning,) if parts > 1 else (),
    )


Atom = tuple[tuple[tuple[str, int], ...], int]
"""GPUs that are never cut, in rank order, and the first GPU of their HB domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankedJob:
    """A job whose replicas take groups of *atom* GPUs that are never cut: TP, or equal parts."""

    degrees: Degrees
    atom: int

    @property
    def atoms(self) -> int:
        """Groups of one replica."""
        return self.degrees.replica // self.atom

    def capacity(self, unit: TopologyUnit, tier: int) -> int:
        """Count the replicas that fit a unit, none of them across units of *tier*."""
        return sum(inner.atoms(self.atom) // self.atoms for inner in unit.at(tier))

    def filled(self, unit: TopologyUnit, replicas: int) -> Iterator[list[Atom]]:
        """Fill a unit replica by replica, in the order of the tree."""
        atoms = [
            (domain.gpus[start : start + self.atom], domain.first)
            for domain in unit.domains()
            for start in range(0, domain.free - self.atom + 1, self.atom)
        ]
        for index in range(replicas):
            yield atoms[index * self.atoms : (index + 1) * self.atoms]


def _select(
    root: TopologyUnit, replicas: int, tier: int, job: _RankedJob
) -> list[tuple[TopologyUnit, int]]:
    """Choose units of *tier* and how many replicas each takes, in the order of the tree."""
    room_for = job.capacity(root, tier)
    if room_for < replicas:
        degrees = job.degrees
        missing = (replicas - room_for) * degrees.replica
        raise NegativeAnswer(
            f"{replicas} replicas of {degrees.replica} GPUs need {degrees.gpus}; there is room for"
            f" {room_for} in {root.free} free GPUs, {missing} GPUs too few"
            f" (constraint: TP{degrees.tp} inside one HB domain, a replica inside one unit)"
        )
    if root.tier == tier:
        return [(root, replicas)]
    room = {index: job.capacity(unit, tier) for index, unit in enumerate(root.inner)}
    chosen: dict[int, int] = {}
    left = replicas
    while left:
        enough = [index for index in room if room[index] >= left]
        # The last unit is the smallest that is large enough; before it, the roomiest are filled.
        index = min(enough, key=room.__getitem__) if enough else max(room, key=room.__getitem__)
        chosen[index] = min(left, room.pop(index))
        left -= chosen[index]
    return [
        share
        for index in sorted(chosen)
        for share in _select(root.inner[index], chosen[index], tier, job)
    ]


def _cut(
    tier: int,
    tiers: Sequence[str],
    root: TopologyUnit,
    replicas: Sequence[list[Atom]],
    job: _RankedJob,
    rules: RankRules,
) -> TierCut:
    """Count what crosses the units of one tier (eq. D1)."""
    unit_of = {domain.first: unit.first for unit in root.at(tier) for domain in unit.domains()}
    where = [[unit_of[domain] for _, domain in replica] for replica in replicas]
    count = len(replicas)
    edges = max(
        sum(where[i][position] != where[i - 1][position] for i in range(count))
        for position in range(job.atoms)
    )
    firsts = Counter(units[0] for units in where)
    pairs = count * (count - 1)
    rate = rules.oversubscription[tier + 1] if rules.oversubscription else 1.0
    size = max(unit.free for unit in root.at(tier)) or 1
    return TierCut(
        tier=tiers[tier],
        units=len({unit for own in where for unit in own}),
        ring=count,
        ring_edges=edges,
        bound=_bound(tier, root, job),
        random_fraction=1 - sum(n * (n - 1) for n in firsts.values()) / pairs if pairs else 0.0,
        stage_edges=sum(a != b for own in where for a, b in itertools.pairwise(own)),
        uplink_fraction=min(job.degrees.replica, size) * rate / size if edges else 0.0,
    )


def _bound(tier: int, root: TopologyUnit, job: _RankedJob) -> int:
    """Count the fewest units of a tier that hold the replicas; 0 if one does (eq. D1)."""
    replicas = job.degrees.dp
    room = sorted((job.capacity(unit, tier) for unit in root.at(tier)), reverse=True)
    if replicas == 1:
        return 0
    if room[0] == 0:  # a replica is wider than a unit: none is next to another
        return replicas
    short = sum(held < replicas for held in itertools.accumulate(room))
    return min(short + 1, len(room)) if short else 0
