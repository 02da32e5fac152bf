"""The smallest tree of equal switches with full bisection over a number of endpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minicluster.errors import InputError

MAX_TIERS = 3
"""Trees in use have three tiers at most: a fourth adds a hop and a third of the switches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """
    One tree.

    Attributes:
        endpoints: NICs at its leaves.
        radix: ports of a switch.
        switches: per tier, leaf to core.
        links: per tier, endpoints to leaf first.
    """

    endpoints: int
    radix: int
    switches: tuple[int, ...]
    links: tuple[int, ...]

    @property
    def tiers(self) -> int:
        """Tiers of switches."""
        return len(self.switches)

    @property
    def ports_used(self) -> tuple[int, ...]:
        """Ports with a link in them, per tier: each link but the lowest has two."""
        above = (*self.links[1:], 0)
        return tuple(down + up for down, up in zip(self.links, above, strict=True))


def tiers_needed(endpoints: int, radix: int, *, place: str = "--radix") -> int:
    """
    Return how many tiers of switches join *endpoints* at full bisection.

        1 if n <= R, 2 if n <= 2 (R/2)^2, 3 if n <= 2 (R/2)^3      (docs/model.md, eq. B1)

    Raises:
        InputError: no tree of three tiers holds them, or a switch of one port.

    Source:
        Fat trees: half of the ports of every switch but the topmost lead up.

    """
    if radix < 2:  # noqa: PLR2004  (a link has two ends)
        raise InputError(place, radix, "2 ports or more: a switch joins at least two")
    half = radix // 2
    for tiers in range(1, MAX_TIERS + 1):
        if endpoints <= (radix if tiers == 1 else 2 * half**tiers):
            return tiers
    raise InputError(
        place,
        radix,
        f"enough ports for a tree of {MAX_TIERS} tiers over {endpoints:,} endpoints:"
        f" {radix} ports reach {2 * half**MAX_TIERS:,}",
        f"{_radix_for(endpoints)} ports would do",
    )


def _radix_for(endpoints: int) -> int:
    """Return the smallest even radix that a tree of three tiers, `MAX_TIERS`, needs."""
    return 2 * math.ceil(math.cbrt(endpoints / 2) - 1e-9)


def tree(endpoints: int, radix: int, *, leaves: int | None = None) -> Tree:
    """
    Return the smallest tree.

        leaves ⌈n/⌊R/2⌋⌉, as many in the middle, ⌈n/R⌉ on top; links n a tier
        (docs/model.md, eq. B2)

    Args:
        endpoints: n.
        radix: R; the odd port of an odd radix stays free.
        leaves: where wiring by rail asks for more of them.

    Raises:
        InputError: no tree of three tiers holds them.

    Source:
        NVIDIA DGX SuperPOD reference architecture (H100, B200): its counts at 512 to 16,384 GPUs.

    """
    tiers = tiers_needed(endpoints, radix)
    if tiers == 1:
        return Tree(endpoints=endpoints, radix=radix, switches=(1,), links=(endpoints,))
    half = radix // 2
    lowest = math.ceil(endpoints / half) if leaves is None else leaves
    top = math.ceil(endpoints / (2 * half))
    middle = (math.ceil(endpoints / half),) * (tiers - 2)
    return Tree(
        endpoints=endpoints,
        radix=radix,
        switches=(lowest, *middle, top),
        links=(endpoints,) * tiers,
    )
