"""GPUs of replicas inside one unit: what fits, and on which rails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.specs.checks import positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.fabric.room import Room

Gpu = tuple[str, int]
"""A node and a GPU of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """
    Replicas of one role.

    Attributes:
        role: `prefill`, `decode` or `mixed`.
        replicas: how many.
        tp: GPUs of one group, inside an HB domain.
        pp: groups of one replica.
    """

    role: str
    replicas: int
    tp: int
    pp: int = 1

    def __post_init__(self) -> None:
        """Check the counts."""
        positive(replicas=self.replicas, tp=self.tp, pp=self.pp)

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One group of tp GPUs: whose it is, and its GPUs in rank order."""

    role: str
    replica: int
    stage: int
    gpus: tuple[Gpu, ...]


def packed(room: Room, wants: Sequence[Want], counts: tuple[int, int]) -> tuple[Seat, ...] | None:
    """
    Put replicas into a unit, the widest groups first; `None` if they do not fit.

    Narrow groups take every k-th GPU of a block that a wide one would take, so that rank i of a
    narrow group is on a rail of one of the k ranks that share its keys and values.

    Args:
        room: free GPUs.
        wants: of up to two roles.
        counts: replicas of each.

    Returns:
        Seats, replicas numbered from 0 inside the unit.

    Ignores:
        Widths that do not divide each other may be refused although they fit.

    """
    if sum(n * want.tp * want.pp for n, want in zip(counts, wants, strict=False)) > room.free:
        return None
    left = [(want, n * want.pp) for n, want in zip(counts, wants, strict=False)]
    left.sort(key=lambda each: -each[0].tp)
    widest = max(want.tp for want in wants)
    seats: list[Seat] = []
    done = dict.fromkeys((want.role for want in wants), 0)
    for domain in room.domains():
        free = list(domain.gpus)
        for index, (want, needed) in enumerate(left):
            groups = min(needed, len(free) // want.tp)
            if not groups:
                continue
            taken, free = _groups(free, want.tp, groups, widest)
            for gpus in taken:
                number = done[want.role]
                done[want.role] += 1
                seats.append(
                    Seat(role=want.role, replica=number // want.pp, stage=number % want.pp,
                         gpus=gpus)
                )  # fmt: skip
            left[index] = (want, needed - groups)
    return None if any(needed for _, needed in left) else tuple(seats)


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


def rail_aligned_fraction(roles: Sequence[Sequence[Seat]]) -> float:
    """
    Share of the bytes between two roles that start and end on the same rail.

        mean over pairs, and over ranks i of tp_p and j of tp_d that share heads, of [rail = rail]
        (docs/model.md, eq. D5)

    Args:
        roles: seats of the first and of the second role; GPU i of a node is on rail i.

    Returns:
        A fraction; at most min(tp_p, tp_d) / max(tp_p, tp_d).

    Source:
        NIXL pulls each slice of the keys and values from the rank that has it.

    Ignores:
        Nodes whose rails are in another order.

    """
    first = [tuple(gpu for _, gpu in seat.gpus) for seat in roles[0]]
    second = [tuple(gpu for _, gpu in seat.gpus) for seat in roles[1]]
    kinds = {(a, b): first.count(a) * second.count(b) for a in set(first) for b in set(second)}
    aligned = total = 0.0
    for (a, b), times in kinds.items():
        wide = max(len(a), len(b))
        same = sum(a[r * len(a) // wide] == b[r * len(b) // wide] for r in range(wide))
        aligned += times * same / wide
        total += times
    return aligned / total
