"""The highest load that holds the SLO: which rate to try next, and what the tries say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH = 1.25
"""From one try to the next, while all hold or all miss."""

FARTHEST = 16.0
"""No rate this many times above or below the first one is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """
    One try.

    Attributes:
        holds: whether the SLO held; `None`: no run of the length allowed tells.
        attained_fraction: share of the requests within the limit that was kept least.
    """

    requests_per_s: float
    num_requests: int
    verdict: str
    holds: bool | None
    attained_fraction: float
    good_requests_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """
    Where the highest load that holds the SLO lies, as far as the tries tell.

    Attributes:
        low: highest rate that held, below every one that missed; `None`: none did.
        high: lowest rate that missed; `None`: none did.
        unclear: rates between both, ascending, at which no run of the length allowed tells.
    """

    low: float | None
    high: float | None
    unclear: tuple[float, ...]

    @property
    def middle(self) -> float | None:
        """The geometric middle of both ends, in requests/s; `None` where one is open."""
        if self.low is None or self.high is None:
            return None
        return math.sqrt(self.low * self.high)

    def within(self, resolution_fraction: float) -> bool:
        """Whether both ends are known, and no further apart than the resolution."""
        if self.low is None or self.high is None:
            return False
        return self.high <= self.low * (1 + resolution_fraction)


def next_rate(probes: Sequence[Probe], *, first: float, resolution_fraction: float) -> float | None:
    """
    Return the next rate to try; `None`: the limit is known well enough, or nothing more tells.

    First by steps of 25 % until one rate holds and one misses, then in the geometric middle,
    until both are no further apart than the resolution. Where tries between them tell nothing,
    the limit is near: the gaps below and above are halved, the wider one first, until each is
    half the resolution wide.
    """
    if not probes:
        return first
    found = capacity(probes)
    rates = [rate for rate in (found.low, *found.unclear, found.high) if rate is not None]
    if found.low is None:
        lower = rates[0] / GROWTH
        return lower if lower > first / FARTHEST else None
    if found.high is None:
        higher = rates[-1] * GROWTH
        return higher if higher < first * FARTHEST else None
    if found.within(resolution_fraction):
        return None
    start, end = max((rates[:2], rates[-2:]), key=lambda gap: gap[1] / gap[0])
    return math.sqrt(start * end) if end > start * math.sqrt(1 + resolution_fraction) else None


def capacity(probes: Sequence[Probe]) -> Capacity:
    """
    Return where the limit is, as far as *probes* tell.

    A rate that held above one that missed is not believed: the lower miss counts.
    """
    high = min((p.requests_per_s for p in probes if p.holds is False), default=None)
    below = [p for p in probes if high is None or p.requests_per_s < high]
    low = max((p.requests_per_s for p in below if p.holds), default=None)
    unclear = {p.requests_per_s for p in below if p.holds is None}
    between = (rate for rate in unclear if low is None or rate > low)
    return Capacity(low=low, high=high, unclear=tuple(sorted(between)))
