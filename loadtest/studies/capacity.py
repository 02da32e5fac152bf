"""The highest request rate that meets the SLO: the bracket so far, and the next rate to probe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH = 1.25
"""Ratio of consecutive rates while all probes hold or all miss: three steps double the rate."""

MAX_RATIO = 16.0
"""Largest ratio to the first rate, in either direction; beyond it the plan is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """
    One run of the search at one request rate.

    Attributes:
        holds: whether the SLO held; `None`: no run of the allowed length decides.
        attained_fraction: the lowest attained fraction of all limits.
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
    The bracket of the highest request rate that meets the SLO.

    Attributes:
        low: highest rate that held, below every rate that missed; `None`: none held.
        high: lowest rate that missed; `None`: none missed.
        unclear: rates between both, ascending, at which no run of the allowed length decides.
    """

    low: float | None
    high: float | None
    unclear: tuple[float, ...]

    @property
    def middle(self) -> float | None:
        """The geometric mean of both ends, in requests/s; `None` if one is unknown."""
        if self.low is None or self.high is None:
            return None
        return math.sqrt(self.low * self.high)

    def within(self, resolution_fraction: float) -> bool:
        """Whether both ends are known and at most the resolution apart."""
        if self.low is None or self.high is None:
            return False
        return self.high <= self.low * (1 + resolution_fraction)


def next_rate(probes: Sequence[Probe], *, first: float, resolution_fraction: float) -> float | None:
    """
    Return the next rate to probe; `None`: the bracket is narrow enough, or cannot get narrower.

    Steps of 25 % until one rate holds and one misses, then bisection in the geometric mean until
    both are at most the resolution apart. Undecided probes between them are near the limit: the
    gaps below and above are then halved, the wider one first, until each is half the resolution.
    """
    if not probes:
        return first
    found = capacity(probes)
    rates = [rate for rate in (found.low, *found.unclear, found.high) if rate is not None]
    if found.low is None:
        lower = rates[0] / GROWTH
        return lower if lower > first / MAX_RATIO else None
    if found.high is None:
        higher = rates[-1] * GROWTH
        return higher if higher < first * MAX_RATIO else None
    if found.within(resolution_fraction):
        return None
    start, end = max((rates[:2], rates[-2:]), key=lambda gap: gap[1] / gap[0])
    return math.sqrt(start * end) if end > start * math.sqrt(1 + resolution_fraction) else None


def capacity(probes: Sequence[Probe]) -> Capacity:
    """
    Return the bracket that *probes* support.

    A rate that held above a rate that missed does not count: the lower miss does.
    """
    high = min((p.requests_per_s for p in probes if p.holds is False), default=None)
    below = [p for p in probes if high is None or p.requests_per_s < high]
    low = max((p.requests_per_s for p in below if p.holds), default=None)
    unclear = {p.requests_per_s for p in below if p.holds is None}
    between = (rate for rate in unclear if low is None or rate > low)
    return Capacity(low=low, high=high, unclear=tuple(sorted(between)))
