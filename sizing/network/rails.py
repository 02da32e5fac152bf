"""Which GPUs of its HB domain a group takes, so that KV stays on its rail."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sizing.network.gpu_groups import Gpu, GpuGroup
    from sizing.network.topology_units import TopologyUnit

MOST_GROUPS = 32
"""Groups up to which other GPUs are tried; beyond, they stay where they were packed."""
PASSES = 4


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
    roles = list(dict.fromkeys(group.role for group in groups))
    if len(roles) != 2 or len(groups) > MOST_GROUPS:  # noqa: PLR2004  (prefill and decode)
        return groups
    domains = root.units_of_gpus(0)
    inside = {domain.first: domain.gpus for domain in root.domains()}
    best, most = list(groups), _aligned(groups, roles, domains)
    for _ in range(PASSES):
        before = most
        for index in range(len(best)):
            for trial in _exchanged(best, index, inside[domains[best[index].gpus[0]]]):
                found = _aligned(trial, roles, domains)
                if found > most:
                    best, most = trial, found
        if most == before:
            break
    return tuple(best)


def _aligned(groups: Sequence[GpuGroup], roles: Sequence[str], domains: dict[Gpu, int]) -> float:
    first = [[s for s in groups if s.role == role and s.stage == 0] for role in roles]
    return rail_aligned_fraction(first, domains)


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
    """Return the groups, some of them on other GPUs."""
    return [
        replace(group, gpus=moved[n]) if n in moved else group for n, group in enumerate(groups)
    ]
