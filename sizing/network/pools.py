"""Replicas of a plan on nodes: exact where the search is small, proven by a bound or not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minicluster.errors import NegativeAnswer
from minicluster.plan import Placement
from sizing.network.gpu_groups import (
    GpuGroup,
    PoolRequest,
    aligned,
    first_stages,
    packed,
    rail_aligned_fraction,
    replicas_of,
)
from sizing.network.pair_gains import Counts, GainTables, Objective, bound_gain, shares
from sizing.network.topology_units import TopologyUnit, replica_tier, tp_parts

WORK_LIMIT = 1_500_000_000
"""Additions that the exact search may take, five seconds; beyond, units are filled in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """
    Constraints and prices.

    Attributes:
        seconds_per_byte: between two GPUs that meet at a tier, by tier, never falling outwards.
        pair_bytes_per_s: rate from each prefill replica to each decode replica.
        replica_within: the widest tier that one replica may spread over; `None`: any.
        pairs_within: the widest tier between a prefill and a decode replica; `None`: any.
        spread_tier: failure domain that no more than a share of a role may be in.
        spread_least: least number of them for each role, evenly filled.
    """

    seconds_per_byte: tuple[float, ...]
    pair_bytes_per_s: float = 0.0
    replica_within: int | None = None
    pairs_within: int | None = None
    spread_tier: int | None = None
    spread_least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """
    Where every replica goes.

    Attributes:
        cost: bytes/s of all pairs times the seconds per byte of the tier where they meet: link
            seconds per second.
        bound: no placement under the same rules costs less.
        optimal: cost equals bound.
        method: `exact`, or `greedy` where that takes too much work.
        meeting_fraction: share of the bytes between replicas, by tier.
        spread: role to tier to units used.
        rail_aligned_fraction: share on one rail of the bytes that leave their HB domain.
    """

    groups: tuple[GpuGroup, ...]
    cost: float
    bound: float
    optimal: bool
    method: str
    meeting_fraction: dict[str, float]
    spread: dict[str, dict[str, int]]
    rail_aligned_fraction: float
    warnings: tuple[str, ...] = ()

    def placement(self, role: str) -> tuple[Placement, ...]:
        """Return one entry a node of each replica of *role*, as a plan's pool takes them."""
        return tuple(
            Placement(node=node, gpus=tuple(gpus))
            for (own, _), nodes in replicas_of(self.groups).items()
            if own == role
            for node, gpus in nodes.items()
        )


def place_pools(
    requests: Sequence[PoolRequest], root: TopologyUnit, tiers: Sequence[str], rules: PoolRules
) -> PoolPlan:
    """
    Place the replicas of one or two roles.

        cost = r (P D c_out - sum_j (c_(j+1) - c_j) M_j),  M_j = sum over units u of P_u D_u
        (docs/model.md, eq. D2)

    P_u and D_u are the prefill and decode replicas in a unit of tier j, c_j the seconds per byte
    there. Replicas of a role are alike, so that these counts say everything, and the best counts
    of a unit follow from those of the units inside it (eq. D3). Among placements of least cost
    the one in the fewest leaves is taken, and of these the one whose roles are spread most evenly
    over the units of every tier.

    Raises:
        NegativeAnswer: too few free GPUs, or a constraint that cannot be met; says by how many.

    Source:
        Max-plus convolution over a tree; locality first, then spread, as in Kueue's TAS.

    Ignores:
        Uneven traffic between pairs; traffic inside a replica, which its units carry.
    """
    cut, warnings = _cut(requests, root, tiers)
    task = _PoolTask(requests=cut, root=root, tiers=tiers, rules=rules)
    leaf = _leaf_tier(task)
    taken = _best(task, leaf)
    if taken is None and rules.spread_tier is not None:
        text = f"not spread over {rules.spread_least} units of {tiers[rules.spread_tier]}"
        warnings += (f"{text}: there is no room for that",)
        taken = _best(replace(task, rules=replace(rules, spread_tier=None)), leaf)
    if taken is None:
        raise _no_room(task)
    if taken.method != "exact" and rules.spread_tier is not None:
        warnings += ("so many replicas are not spread on purpose: look at `spread`",)
    return _priced(task, aligned(_numbered(task, taken, requests), root), taken, warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolTask:
    """Replicas to place, TP that straddles already cut into groups, and the GPUs for them."""

    requests: Sequence[PoolRequest]
    root: TopologyUnit
    tiers: Sequence[str]
    rules: PoolRules

    @property
    def total(self) -> Counts:
        """Replicas of the first and of the second role, 0 where there is one only."""
        first, second = [*(request.replicas for request in self.requests), 0][:2]
        return first, second

    @property
    def gain(self) -> tuple[float, ...]:
        """Gain of a pair that meets in one unit of a tier, by tier: r (c_(j+1) - c_j)."""
        pairs = itertools.pairwise(self.rules.seconds_per_byte)
        return tuple(self.rules.pair_bytes_per_s * (b - a) for a, b in pairs)

    def fits(self, unit: TopologyUnit, first: int, second: int) -> bool:
        """Say whether a leaf has room for so many replicas of each role."""
        return packed(unit, self.requests, (first, second)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """Counts by leaf, an upper bound on the gain of any placement, and the method used."""

    leaves: list[tuple[TopologyUnit, Counts]]
    most: float
    method: str


def _cut(
    requests: Sequence[PoolRequest], root: TopologyUnit, tiers: Sequence[str]
) -> tuple[list[PoolRequest], tuple[str, ...]]:
    """Cut TP that leaves the HB domain into equal groups, inside as few as can be."""
    found: list[PoolRequest] = []
    warnings: tuple[str, ...] = ()
    for request in requests:
        role, tp = request.role, request.tp
        parts = tp_parts(f"{role} tp", tp, root, tiers[0], straddle=True)
        if parts > 1:
            warnings += (f"{role}: TP{tp} straddles {parts} units of {tiers[0]}",)
        found.append(replace(request, tp=tp // parts, pp=request.pp * parts))
    return found, warnings


def _leaf_tier(task: _PoolTask) -> int:
    leaf = 0
    for request in task.requests:
        tier = replica_tier(
            task.root,
            task.tiers,
            (request.tp, request.pp),
            within=task.rules.replica_within,
            what=f"{request.role} replica",
        )
        if tier is None:
            raise _no_room(task)
        leaf = max(leaf, tier)
    return leaf


def _best(task: _PoolTask, leaf: int) -> _Taken | None:
    total, gain, rules, root = task.total, task.gain, task.rules, task.root
    ends = [root]
    if rules.pairs_within is not None:
        ends = list(root.at(max(leaf, rules.pairs_within)))
    if _work(task) > WORK_LIMIT:
        return _greedy(task, ends)
    caps: dict[int, Counts] = {}
    if rules.spread_tier is not None:
        first, second = (-(-count // rules.spread_least) for count in total)
        caps[rules.spread_tier] = (first, second)
    if leaf >= root.tier and not caps:  # replicas as wide as all there is: nothing to choose
        most = sum(gain) * total[0] * total[1]
        found = _Taken(leaves=[(root, total)], most=most, method="exact")
        return found if task.fits(root, *total) else None
    # Fewest domains, then evenness, never at the price of a single pair further apart.
    opening = min((each for each in gain if each > 0), default=1.0) / (8.0 * (sum(total) + 1))
    even = opening / (8.0 * len(rules.seconds_per_byte) * (sum(total) + 1) ** 2)
    objective = Objective(
        total=total, leaf=leaf, gain=gain, opening=opening, evenness=even, caps=caps,
        fits=task.fits,
    )  # fmt: skip
    counter = GainTables(objective)
    plain = GainTables(replace(objective, opening=0.0, evenness=0.0))
    values = [counter.table(unit).value[total] for unit in ends]
    best = int(np.argmax(values))
    if not np.isfinite(values[best]):
        return None
    most = max(float(plain.table(unit).value[total]) for unit in ends)
    leaves = shares(ends[best], counter.table(ends[best]), total)
    return _Taken(leaves=leaves, most=most, method="exact")


def _work(task: _PoolTask) -> float:
    """Bound the additions of the exact search from above."""
    states = (task.total[0] + 1) * (task.total[1] + 1)
    work = 0.0
    for tier in range(1, task.root.tier + 1):
        for unit in task.root.at(tier):
            inside = max(inner.free for inner in unit.inner)
            each = 1.0
            for request in task.requests:
                each *= min(request.replicas, inside // (request.tp * request.pp)) + 1
            work += len(unit.inner) * min(each, states) * states
    return work


def _greedy(task: _PoolTask, ends: Sequence[TopologyUnit]) -> _Taken | None:
    """Fill leaves in the order of the tree, roles in proportion."""
    leaves = next(filter(None, (_filled(task, end) for end in ends)), None)
    if leaves is None:
        return None
    widths = tuple(request.tp * request.pp for request in task.requests)
    tiers = range(task.root.tier + 1)
    roomiest = [max(unit.free for unit in task.root.at(tier)) for tier in tiers]
    most = bound_gain(task.total, (widths[0], widths[-1]), task.gain, roomiest)
    return _Taken(leaves=leaves, most=most, method="greedy")


def _filled(task: _PoolTask, end: TopologyUnit) -> list[tuple[TopologyUnit, Counts]] | None:
    """Fill the leaves of a unit with the role of which most is left; `None` if some stay out."""
    left, leaves = list(task.total), []
    for unit in end.domains():
        own = [0, 0]
        while True:
            for role in sorted((0, 1), key=lambda role: -left[role] / max(1, task.total[role])):
                more = [own[0] + (role == 0), own[1] + (role == 1)]
                if left[role] and task.fits(unit, *more):
                    own = more
                    left[role] -= 1
                    break
            else:
                break
        if any(own):
            leaves.append((unit, (own[0], own[1])))
    return None if any(left) else leaves


def _no_room(task: _PoolTask) -> NegativeAnswer:
    needed = sum(request.gpus for request in task.requests)
    where, within = task.root.free, task.rules.pairs_within
    rule = f"TP inside one {task.tiers[0]}"
    if within is not None:
        where = max(unit.free for unit in task.root.at(within))
        rule += f", pairs within one {task.tiers[within]}"
    short = needed - where
    tail = f"{short} too few" if short > 0 else "enough, but in pieces that are too small"
    named = " and ".join(
        f"{request.replicas} x TP{request.tp} PP{request.pp} {request.role}"
        for request in task.requests
    )
    return NegativeAnswer(
        f"{named} need {needed} GPUs, {where} are free: {tail} (constraint: {rule})"
    )


def _numbered(
    task: _PoolTask, taken: _Taken, requests: Sequence[PoolRequest]
) -> tuple[GpuGroup, ...]:
    packs = [packed(unit, task.requests, counts) or {} for unit, counts in taken.leaves]
    found: list[GpuGroup] = []
    for request, cut in zip(requests, task.requests, strict=True):
        own = [gpus for pack in packs for gpus in pack.get(request.role, ())]
        parts = cut.pp // request.pp
        found += (
            GpuGroup(
                role=request.role,
                replica=number // request.pp,
                stage=number % request.pp,
                gpus=tuple(gpu for part in own[number * parts :][:parts] for gpu in part),
            )
            for number in range(request.replicas * request.pp)
        )
    return tuple(found)


def _priced(
    task: _PoolTask, groups: tuple[GpuGroup, ...], taken: _Taken, warnings: tuple[str, ...]
) -> PoolPlan:
    """Price the placement as it stands (eq. D2)."""
    root, tiers = task.root, task.tiers
    rate, prices = task.rules.pair_bytes_per_s, task.rules.seconds_per_byte
    unit_of = [root.units_of_gpus(tier) for tier in range(root.tier + 1)]
    first = first_stages(groups)
    meets = [0] * (root.tier + 1)
    if len(first) > 1:
        inside = 0  # pairs that meet in one unit of the tier below
        for tier, units in enumerate(unit_of):
            here, there = (Counter(units[group.gpus[0]] for group in each) for each in first)
            within = sum(count * there[unit] for unit, count in here.items())
            meets[tier], inside = within - inside, within
    pairs = sum(meets)
    cost = sum(rate * count * price for count, price in zip(meets, prices, strict=False))
    bound = max(0.0, rate * pairs * prices[-1] - taken.most)
    return PoolPlan(
        groups=groups,
        cost=cost,
        bound=min(cost, bound),
        optimal=cost <= bound * (1 + 1e-9) + 1e-15,
        method=taken.method,
        meeting_fraction={tiers[t]: n / pairs for t, n in enumerate(meets)} if pairs else {},
        spread={
            role: {
                tiers[tier]: len({units[gpu] for s in groups if s.role == role for gpu in s.gpus})
                for tier, units in enumerate(unit_of)
            }
            for role in dict.fromkeys(group.role for group in groups)
        },
        rail_aligned_fraction=rail_aligned_fraction(first, unit_of[0]) if pairs else 1.0,
        warnings=warnings,
    )
