"""GPUs of replicas inside one unit: what fits, and on which rails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.specs.checks import positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.network.topology_units import TopologyUnit

Gpu = tuple[str, int]
"""A node and a GPU of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """
    Replicas of one role.

    Attributes:
        role: `prefill`, `decode` or `mixed`.
        tp: GPUs of one group, inside an HB domain.
        pp: groups of one replica: its pipeline stages, times its copies of attention.
    """

    role: str
    replicas: int
    tp: int
    pp: int = 1

    def __post_init__(self) -> None:
        positive(replicas=self.replicas, tp=self.tp, pp=self.pp)

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
