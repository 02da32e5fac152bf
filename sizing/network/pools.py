"""Replicas of a plan on nodes: exact where the search is small, proven by a bound or not."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Placement
from sizing.network.gpu_groups import GpuGroup, PoolRequest, packed
from sizing.network.local_search import LocalSearch
from sizing.network.pair_gains import Counts, GainTables, Objective, bound_gain, shares
from sizing.network.rails import aligned, domain_of, rail_aligned_fraction
from sizing.network.topology_units import TopologyUnit

if TYPE_CHECKING:
    from collections.abc import Sequence

WORK_LIMIT = 400_000_000
"""Additions that the exact search may take; beyond, units are filled in order and
replicas exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """
    Constraints and prices.

    Attributes:
        seconds_per_byte: between two GPUs that meet at a tier, by tier, never falling outwards.
        pair_bytes_per_s: that every prefill replica sends every decode replica.
        straddle: TP may leave the HB domain; it then takes equal shares of as few as can be.
        replica_within: the widest tier that one replica may spread over; `None`: any.
        pairs_within: the widest tier between a prefill and a decode replica; `None`: any.
        spread_tier: failure domain that no more than a share of a role may be in.
        spread_least: into how many of them each role goes at least, as even as that takes.
    """

    seconds_per_byte: tuple[float, ...]
    pair_bytes_per_s: float = 0.0
    straddle: bool = False
    replica_within: int | None = None
    pairs_within: int | None = None
    spread_tier: int | None = None
    spread_least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """
    Where every replica goes.

    Attributes:
        groups: by role, replica and stage.
        cost: bytes/s of all pairs times the seconds per byte of the tier where they meet: link
            seconds per second.
        bound: no placement under the same rules costs less.
        optimal: cost equals bound.
        method: `exact`, or `search` where that takes too much work.
        meeting_fraction: of the bytes between replicas, by tier.
        spread: role to tier to units used.
        rail_aligned_fraction: of the bytes that leave their HB domain, on one rail.
        warnings: what could not be had.
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
        replicas: dict[int, dict[str, list[int]]] = {}
        for group in self.groups:
            if group.role == role:
                for node, gpu in group.gpus:
                    replicas.setdefault(group.replica, {}).setdefault(node, []).append(gpu)
        return tuple(
            Placement(node=node, gpus=tuple(gpus))
            for nodes in replicas.values()
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

    Args:
        requests: prefill and decode, or one role alone.
        root: free GPUs.
        tiers: names, the HB domain first.
        rules: constraints and prices.

    Returns:
        Seats, cost and lower bound.

    Raises:
        InputError: TP wider than the HB domain without permission, or more than two roles.
        NegativeAnswer: too few free GPUs, or a constraint that cannot be met; says by how many.

    Source:
        Max-plus convolution over a tree; locality first, then spread, as in Kueue's TAS.

    Ignores:
        Uneven traffic between pairs; traffic inside a replica, which its units carry.

    """
    if not 1 <= len(requests) <= 2:  # noqa: PLR2004
        raise InputError(
            "pools", [request.role for request in requests], "prefill and decode, or one pool"
        )
    cut, warnings = _cut(requests, root, tiers, rules)
    leaf = _leaf_tier(cut, root, tiers, rules)
    taken = _best(cut, root, leaf, rules)
    if taken is None and rules.spread_tier is not None:
        text = f"not spread over {rules.spread_least} units of {tiers[rules.spread_tier]}"
        warnings = (*warnings, f"{text}: there is no room for that")
        taken = _best(cut, root, leaf, replace(rules, spread_tier=None))
    if taken is None:
        raise _no_room(cut, root, tiers, rules)
    if taken.method != "exact" and rules.spread_tier is not None:
        warnings = (*warnings, "so many replicas are not spread on purpose: look at `spread`")
    groups = tuple(group for unit, own in taken.leaves for group in packed(unit, cut, own) or ())
    return _priced(
        aligned(_numbered(groups, requests), root), root, tiers, rules, (taken, warnings)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """Counts by leaf, what no placement gains more than, and how they were found."""

    leaves: list[tuple[TopologyUnit, Counts]]
    most: float
    method: str


def _cut(
    requests: Sequence[PoolRequest], root: TopologyUnit, tiers: Sequence[str], rules: PoolRules
) -> tuple[list[PoolRequest], tuple[str, ...]]:
    """Cut TP that straddles HB domains into equal groups, where that is allowed."""
    domain = max(unit.free for unit in root.domains())
    found, warnings = [], []
    for request in requests:
        if request.tp <= domain:
            found.append(request)
            continue
        if not rules.straddle:
            raise InputError(
                f"{request.role} tp", request.tp,
                f"at most the {domain} free GPUs of one {tiers[0]}",
                "--allow-tp-straddle permits it; every layer then waits for the network",
            )  # fmt: skip
        # As few domains as can share it evenly.
        parts = next(
            n for n in range(-(-request.tp // domain), request.tp + 1) if request.tp % n == 0
        )
        found.append(replace(request, tp=request.tp // parts, pp=request.pp * parts))
        warnings.append(f"{request.role}: TP{request.tp} straddles {parts} units of {tiers[0]}")
    return found, tuple(warnings)


def _leaf_tier(
    requests: Sequence[PoolRequest], root: TopologyUnit, tiers: Sequence[str], rules: PoolRules
) -> int:
    """Return the innermost tier of which a unit holds the widest replica."""
    leaf = 0
    for request in requests:
        tier = next(
            (
                t
                for t in range(root.tier + 1)
                if any(r.atoms(request.tp) >= request.pp for r in root.at(t))
            ),
            None,
        )
        if tier is None:
            raise _no_room(requests, root, tiers, rules)
        if rules.replica_within is not None and tier > rules.replica_within:
            best = max(r.atoms(request.tp) * request.tp for r in root.at(rules.replica_within))
            raise NegativeAnswer(
                f"a {request.role} replica of {request.tp * request.pp} GPUs does not fit one"
                f" {tiers[rules.replica_within]}: {request.tp * request.pp - best} GPUs too few"
                f" (constraint: replica within {tiers[rules.replica_within]})"
            )
        leaf = max(leaf, tier)
    return leaf


def _best(
    requests: Sequence[PoolRequest], root: TopologyUnit, leaf: int, rules: PoolRules
) -> _Taken | None:
    """Find the counts of least cost; `None` if there is no room."""
    total = (requests[0].replicas, requests[1].replicas if len(requests) > 1 else 0)
    prices = rules.seconds_per_byte
    gain = tuple(rules.pair_bytes_per_s * (b - a) for a, b in itertools.pairwise(prices))
    rises = [each for each in gain if each > 0]
    # Fewest domains, then evenness, never at the price of a single pair further apart.
    opening = (min(rises) if rises else 1.0) / (8.0 * (sum(total) + 1))
    even = opening / (8.0 * len(prices) * (sum(total) + 1) ** 2)
    caps = None
    if rules.spread_tier is not None:
        caps = {rules.spread_tier: (-(-total[0] // rules.spread_least),
                                    -(-total[1] // rules.spread_least))}  # fmt: skip
    objective = Objective(
        total=total, leaf=leaf, gain=gain, opening=opening, evenness=even, caps=caps,
        fits=lambda unit, p, d: packed(unit, requests, (p, d)) is not None,
    )  # fmt: skip
    ends = (
        list(root.at(max(leaf, rules.pairs_within))) if rules.pairs_within is not None else [root]
    )
    counter = GainTables(objective)
    plain = GainTables(replace(objective, opening=0.0, evenness=0.0))
    if _work(root, requests, total) > WORK_LIMIT:
        return _greedy(ends, requests, gain, root)
    if (
        leaf >= root.tier and caps is None
    ):  # replicas are as wide as all there is: nothing to choose
        fits = packed(root, requests, total) is not None
        most = sum(gain) * total[0] * total[1]
        return _Taken(leaves=[(root, total)], most=most, method="exact") if fits else None
    values = [counter.table(unit).value[total] for unit in ends]
    best = int(np.argmax(values))
    if not np.isfinite(values[best]):
        return None
    most = max(float(plain.table(unit).value[total]) for unit in ends)
    leaves = shares(ends[best], counter.table(ends[best]), total)
    return _Taken(leaves=leaves, most=most, method="exact")


def _work(root: TopologyUnit, requests: Sequence[PoolRequest], total: Counts) -> float:
    """Bound the additions of the exact search from above."""
    states = (total[0] + 1) * (total[1] + 1)
    work = 0.0
    for tier in range(1, root.tier + 1):
        for unit in root.at(tier):
            inside = max(inner.free for inner in unit.inner)
            each = 1.0
            for count, request in zip(total, requests, strict=False):
                each *= min(count, inside // (request.tp * request.pp)) + 1
            work += len(unit.inner) * min(each, states) * states
    return work


def _greedy(
    ends: Sequence[TopologyUnit],
    requests: Sequence[PoolRequest],
    gain: Sequence[float],
    root: TopologyUnit,
) -> _Taken | None:
    """Fill leaves in the order of the tree, roles in proportion; then exchange replicas."""
    total = [request.replicas for request in requests]
    for end in ends:
        left, leaves = list(total), []
        for unit in end.domains():
            own = [0] * len(total)
            while any(left):
                order = sorted(range(len(total)), key=lambda i: -left[i] / total[i])
                index = next((i for i in order if left[i] and _holds(unit, requests, own, i)), None)
                if index is None:
                    break
                own[index] += 1
                left[index] -= 1
            if any(own):
                leaves.append((unit, (own[0], own[1] if len(own) > 1 else 0)))
        if not any(left):
            widths = (requests[0].tp * requests[0].pp, requests[-1].tp * requests[-1].pp)
            roomiest = [max(r.free for r in root.at(t)) for t in range(root.tier + 1)]
            pair = (total[0], total[1] if len(total) > 1 else 0)
            most = bound_gain(pair, widths, gain, roomiest)
            climb = LocalSearch(
                root=end, gain=gain, widths=widths,
                fits=lambda unit, p, d: packed(unit, requests, (p, d)) is not None,
            )  # fmt: skip
            better = leaves if len(requests) == 1 else climb.improved(leaves)
            return _Taken(leaves=better, most=most, method="search")
    return None


def _holds(
    unit: TopologyUnit, requests: Sequence[PoolRequest], own: Sequence[int], index: int
) -> bool:
    """Say whether one more replica fits a leaf."""
    more = [count + (i == index) for i, count in enumerate(own)]
    return packed(unit, requests, (more[0], more[1] if len(more) > 1 else 0)) is not None


def _no_room(
    requests: Sequence[PoolRequest], root: TopologyUnit, tiers: Sequence[str], rules: PoolRules
) -> NegativeAnswer:
    """Say by how many GPUs the pools do not fit, and which constraint keeps them out."""
    needed = sum(request.gpus for request in requests)
    where = root.free
    rule = f"TP inside one {tiers[0]}"
    if rules.pairs_within is not None:
        where = max(unit.free for unit in root.at(rules.pairs_within))
        rule += f", pairs within one {tiers[rules.pairs_within]}"
    short = needed - where
    tail = f"{short} too few" if short > 0 else "enough, but in pieces that are too small"
    named = " and ".join(
        f"{request.replicas} x TP{request.tp} PP{request.pp} {request.role}" for request in requests
    )
    return NegativeAnswer(
        f"{named} need {needed} GPUs, {where} are free: {tail} (constraint: {rule})"
    )


def _numbered(groups: Sequence[GpuGroup], requests: Sequence[PoolRequest]) -> tuple[GpuGroup, ...]:
    """Number replicas and stages, and join the parts of TP that straddles."""
    found: list[GpuGroup] = []
    for request in requests:
        own = [group.gpus for group in groups if group.role == request.role]
        stages = request.replicas * request.pp
        parts = len(own) // stages
        found += (
            GpuGroup(
                role=request.role,
                replica=number // request.pp,
                stage=number % request.pp,
                gpus=tuple(gpu for part in own[number * parts :][:parts] for gpu in part),
            )
            for number in range(stages)
        )
    return tuple(found)


def _priced(
    groups: tuple[GpuGroup, ...],
    root: TopologyUnit,
    tiers: Sequence[str],
    rules: PoolRules,
    found: tuple[_Taken, tuple[str, ...]],
) -> PoolPlan:
    """Price the placement as it stands (eq. D2)."""
    taken, warnings = found
    unit_of = {
        (tier, gpu): unit.first
        for tier in range(root.tier + 1)
        for unit in root.at(tier)
        for domain in unit.domains()
        for gpu in domain.gpus
    }
    roles = list(dict.fromkeys(group.role for group in groups))
    first = [
        [group for group in groups if group.role == role and group.stage == 0] for role in roles
    ]
    meets = dict.fromkeys(range(root.tier + 1), 0)
    if len(first) > 1:
        inside = 0  # pairs that meet in one unit of the tier below
        for tier in meets:
            here, there = (Counter(unit_of[tier, g.gpus[0]] for g in each) for each in first)
            within = sum(count * there[unit] for unit, count in here.items())
            meets[tier], inside = within - inside, within
    pairs = sum(meets.values())
    rate, prices = rules.pair_bytes_per_s, rules.seconds_per_byte
    cost = sum(rate * count * prices[tier] for tier, count in meets.items())
    bound = max(0.0, rate * pairs * prices[-1] - taken.most)
    return PoolPlan(
        groups=groups,
        cost=cost,
        bound=min(cost, bound),
        optimal=cost <= bound * (1 + 1e-9) + 1e-15,
        method=taken.method,
        meeting_fraction={tiers[t]: n / pairs for t, n in meets.items()} if pairs else {},
        spread={
            role: {
                tiers[t]: len({unit_of[t, gpu] for s in groups if s.role == role for gpu in s.gpus})
                for t in range(root.tier + 1)
            }
            for role in roles
        },
        rail_aligned_fraction=rail_aligned_fraction(first, domain_of(root)) if pairs else 1.0,
        warnings=warnings,
    )
