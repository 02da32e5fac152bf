"""Which GPUs of its HB domain a group takes, so that KV stays on its rail."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sizing.network.room import Room
    from sizing.network.seats import Gpu, Seat

MOST_SEATS = 32
"""Groups up to which other GPUs are tried; beyond, they stay where they were packed."""
PASSES = 4


def rail_aligned_fraction(roles: Sequence[Sequence[Seat]], domain_of: dict[Gpu, int]) -> float:
    """
    Share of the bytes between two roles that start and end on the same rail.

        mean over pairs of different HB domains, and over ranks i of tp_p and j of tp_d that share
        heads, of [rail = rail]      (docs/model.md, eq. D5)

    Args:
        roles: first stages of the first and of the second role; GPU i of a node is on rail i.
        domain_of: HB domain of every GPU.

    Returns:
        A fraction; at most min(tp_p, tp_d) / max(tp_p, tp_d); 1 where no pair leaves its domain.

    Source:
        NIXL pulls each slice of the keys and values from the rank that has it.

    Ignores:
        Nodes whose rails are in another order.

    """
    aligned = total = 0.0
    for a, b in itertools.product(roles[0], roles[1]):
        if domain_of[a.gpus[0]] == domain_of[b.gpus[0]]:
            continue
        wide = max(len(a.gpus), len(b.gpus))
        first = (a.gpus[r * len(a.gpus) // wide][1] for r in range(wide))
        second = (b.gpus[r * len(b.gpus) // wide][1] for r in range(wide))
        aligned += sum(x == y for x, y in zip(first, second, strict=True)) / wide
        total += 1
    return aligned / total if total else 1.0


def aligned(seats: tuple[Seat, ...], root: Room) -> tuple[Seat, ...]:
    """
    Give groups other GPUs of their HB domain while that brings more bytes onto one rail.

    Costs and counts of a placement stay as they are: no group leaves its domain.

    Args:
        seats: of one or two roles.
        root: all GPUs that were free.

    Returns:
        The same groups in the same order.

    Ignores:
        Better choices that take several exchanges at once.

    """
    roles = list(dict.fromkeys(seat.role for seat in seats))
    if len(roles) != 2 or len(seats) > MOST_SEATS:  # noqa: PLR2004  (prefill and decode)
        return seats
    domains = domain_of(root)
    inside = {domain.first: domain.gpus for domain in root.domains()}
    best, most = list(seats), _aligned(seats, roles, domains)
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


def domain_of(root: Room) -> dict[Gpu, int]:
    """Return the HB domain of every GPU."""
    return {gpu: domain.first for domain in root.domains() for gpu in domain.gpus}


def _aligned(seats: Sequence[Seat], roles: Sequence[str], domains: dict[Gpu, int]) -> float:
    """Return the aligned share of first stages."""
    first = [[s for s in seats if s.role == role and s.stage == 0] for role in roles]
    return rail_aligned_fraction(first, domains)


def _exchanged(seats: list[Seat], index: int, domain: Sequence[Gpu]) -> Iterator[list[Seat]]:
    """Yield the groups with one of them moved or exchanged inside its domain, or all turned."""
    seat, here = seats[index], set(domain)
    if not here.issuperset(seat.gpus):
        return
    near = [n for n, each in enumerate(seats) if here.issuperset(each.gpus)]
    taken = {gpu for n in near for gpu in seats[n].gpus}
    free = [gpu for gpu in domain if gpu not in taken]
    width = len(seat.gpus)
    for start in range(0, len(free) - width + 1, width):
        yield _with(seats, {index: tuple(free[start : start + width])})
    for other in near:
        if other != index and len(seats[other].gpus) == width:
            yield _with(seats, {index: seats[other].gpus, other: seat.gpus})
    half = len(domain) // 2
    turned = {gpu: domain[(n + half) % len(domain)] for n, gpu in enumerate(domain)}
    yield _with(seats, {n: tuple(turned[gpu] for gpu in seats[n].gpus) for n in near})


def _with(seats: list[Seat], moved: dict[int, tuple[Gpu, ...]]) -> list[Seat]:
    """Return the groups, some of them on other GPUs."""
    return [replace(seat, gpus=moved[n]) if n in moved else seat for n, seat in enumerate(seats)]
