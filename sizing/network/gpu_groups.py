"""GPUs of replicas inside one unit: what fits, and which GPUs keep KV on its rail."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.specs.checks import Count, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.specs.slicing import Slicing
    from sizing.network.topology_units import TopologyUnit

MOST_GROUPS = 32
"""Groups up to which other GPUs are tried; beyond, they stay where they were packed."""
PASSES = 4

Gpu = tuple[str, int]
"""A node and a GPU of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest(Spec):
    """
    Replicas of one role.

    Attributes:
        role: `prefill`, `decode` or `mixed`.
        tp: GPUs of one group, inside an HB domain.
        pp: groups of one replica: its pipeline stages, times its copies of attention.
    """

    role: str
    replicas: Count
    tp: Count
    pp: Count = 1

    @classmethod
    def of(cls, role: str, replicas: int, slicing: Slicing) -> PoolRequest:
        """Return the groups of TP that *replicas* need: one a stage and copy of attention."""
        return cls(role=role, replicas=replicas, tp=slicing.tp, pp=slicing.pp * slicing.dp)

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """One group of tp GPUs: whose it is, and its GPUs in rank order."""

    role: str
    replica: int
    stage: int
    gpus: tuple[Gpu, ...]


Replicas = dict[tuple[str, int], dict[str, list[int]]]
"""GPUs of each replica by node; a replica is named by its role and number."""


def replicas_of(groups: Sequence[GpuGroup]) -> Replicas:
    """Gather the GPUs of each replica by node, in rank order."""
    found: Replicas = {}
    for group in groups:
        nodes = found.setdefault((group.role, group.replica), {})
        for node, gpu in group.gpus:
            nodes.setdefault(node, []).append(gpu)
    return found


def first_stages(groups: Sequence[GpuGroup]) -> list[list[GpuGroup]]:
    """Return the groups of every role's first pipeline stages, between which KV caches move."""
    roles = dict.fromkeys(group.role for group in groups)
    return [[g for g in groups if g.role == role and g.stage == 0] for role in roles]


def packed(
    unit: TopologyUnit, requests: Sequence[PoolRequest], counts: tuple[int, int]
) -> dict[str, list[tuple[Gpu, ...]]] | None:
    """
    Put replicas into a unit, the widest groups first: groups by role; `None` if they do not fit.

    Narrow groups take every k-th GPU of a block that a wide one would take, so that rank i of a
    narrow group is on a rail of one of the k ranks that share its keys and values.

    Ignores:
        Widths that do not divide each other may be refused although they fit.
    """
    left = [(request, n * request.pp) for n, request in zip(counts, requests, strict=False)]
    if sum(request.tp * needed for request, needed in left) > unit.free:
        return None
    left.sort(key=lambda each: -each[0].tp)
    widest = max(request.tp for request in requests)
    groups: dict[str, list[tuple[Gpu, ...]]] = {request.role: [] for request in requests}
    for domain in unit.domains():
        free = list(domain.gpus)
        for index, (request, needed) in enumerate(left):
            count = min(needed, len(free) // request.tp)
            if count:
                taken, free = _groups(free, request.tp, count, widest)
                groups[request.role] += taken
                left[index] = (request, needed - count)
    return None if any(needed for _, needed in left) else groups


def _groups(
    free: list[Gpu], width: int, groups: int, widest: int
) -> tuple[list[tuple[Gpu, ...]], list[Gpu]]:
    """Take groups of GPUs, striding through blocks as wide as the widest group."""
    stride = widest // width if widest % width == 0 else 1
    taken: list[tuple[Gpu, ...]] = []
    while len(taken) < groups:
        block = free[: width * stride]
        whole = len(block) == width * stride
        here = min(groups - len(taken), stride) if whole else 1
        if not whole or here < stride:  # a part of a block: neighbours, what is left stays whole
            found = [tuple(free[i * width : (i + 1) * width]) for i in range(here)]
        else:
            found = [tuple(block[start::stride]) for start in range(stride)]
        taken += found
        used = {gpu for group in found for gpu in group}
        free = [gpu for gpu in free if gpu not in used]
    return taken, free


def rail_aligned_fraction(roles: Sequence[Sequence[GpuGroup]], domain_of: dict[Gpu, int]) -> float:
    """
    Share of the bytes between two roles that start and end on the same rail.

        mean over pairs of different HB domains, and over ranks i of tp_p and j of tp_d that share
        heads, of [rail = rail]      (docs/model.md, eq. D5)

    *roles* are the first stages of both, *domain_of* says the HB domain of every GPU; GPU i of a
    node is on rail i. It is at most min(tp_p, tp_d) / max(tp_p, tp_d), and 1 where no pair leaves
    its domain.

    Source:
        NIXL pulls each slice of the keys and values from the rank that has it.

    Ignores:
        Nodes whose rails are in another order.
    """
    # Groups with the same GPUs of their nodes are alike: pairs are counted, not listed.
    kinds = [Counter(_rails(group) for group in groups) for groups in roles]
    inside = [Counter((domain_of[g.gpus[0]], _rails(g)) for g in groups) for groups in roles]
    domains = {domain for domain, _ in inside[0]}
    aligned, total = 0.0, 0
    for (a, first), (b, second) in itertools.product(kinds[0].items(), kinds[1].items()):
        same = sum(inside[0][domain, a] * inside[1][domain, b] for domain in domains)
        wide = max(len(a), len(b))
        shared = sum(a[r * len(a) // wide] == b[r * len(b) // wide] for r in range(wide))
        aligned += (first * second - same) * shared / wide
        total += first * second - same
    return aligned / total if total else 1.0


def _rails(group: GpuGroup) -> tuple[int, ...]:
    return tuple(gpu for _, gpu in group.gpus)


def aligned(groups: tuple[GpuGroup, ...], root: TopologyUnit) -> tuple[GpuGroup, ...]:
    """
    Give groups other GPUs of their HB domain while that brings more bytes onto one rail.

    Costs and counts of a placement stay as they are: no group leaves its domain.

    Ignores:
        Better choices that take several exchanges at once.
    """
    if len(first_stages(groups)) == 1 or len(groups) > MOST_GROUPS:
        return groups
    domains = root.units_of_gpus(0)
    inside = {domain.first: domain.gpus for domain in root.domains()}
    best, most = list(groups), rail_aligned_fraction(first_stages(groups), domains)
    for _ in range(PASSES):
        before = most
        for index in range(len(best)):
            for trial in _exchanged(best, index, inside[domains[best[index].gpus[0]]]):
                found = rail_aligned_fraction(first_stages(trial), domains)
                if found > most:
                    best, most = trial, found
        if most == before:
            break
    return tuple(best)


def _exchanged(
    groups: list[GpuGroup], index: int, domain: Sequence[Gpu]
) -> Iterator[list[GpuGroup]]:
    """Yield the groups with one of them moved or exchanged inside its domain, or all turned."""
    group, here = groups[index], set(domain)
    if not here.issuperset(group.gpus):
        return
    near = [n for n, each in enumerate(groups) if here.issuperset(each.gpus)]
    taken = {gpu for n in near for gpu in groups[n].gpus}
    free = [gpu for gpu in domain if gpu not in taken]
    width = len(group.gpus)
    for start in range(0, len(free) - width + 1, width):
        yield _with(groups, {index: tuple(free[start : start + width])})
    for other in near:
        if other != index and len(groups[other].gpus) == width:
            yield _with(groups, {index: groups[other].gpus, other: group.gpus})
    half = len(domain) // 2
    turned = {gpu: domain[(n + half) % len(domain)] for n, gpu in enumerate(domain)}
    yield _with(groups, {n: tuple(turned[gpu] for gpu in groups[n].gpus) for n in near})


def _with(groups: list[GpuGroup], moved: dict[int, tuple[Gpu, ...]]) -> list[GpuGroup]:
    return [
        replace(group, gpus=moved[n]) if n in moved else group for n, group in enumerate(groups)
    ]
