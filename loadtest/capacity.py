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
        holds: whether the SLO held; `None`: no run of the length allowed tells, so that the rate
            is where the limit is.
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
    What the tries say.

    Attributes:
        requests_per_s: the highest load that holds the SLO; `None`: none of those tried does.
        low, high: it lies between; `high` is `None` where nothing tried missed.
    """

    requests_per_s: float | None
    low: float | None
    high: float | None


def next_rate(probes: Sequence[Probe], *, first: float, resolution_fraction: float) -> float | None:
    """
    Return the next rate to try; `None`: the limit is known well enough, or out of reach.

    First by steps of 25 % until one rate holds and one misses, then in the geometric middle,
    until both are no further apart than the resolution.
    """
    if not probes:
        return first
    if any(probe.holds is None for probe in probes):
        return None
    low, high = _bracket(probes)
    if low is None and high is not None:
        lower = high / GROWTH
        return lower if lower > first / FARTHEST else None
    if high is None and low is not None:
        higher = low * GROWTH
        return higher if higher < first * FARTHEST else None
    if low is None or high is None or high <= low * (1 + resolution_fraction):
        return None
    return math.sqrt(low * high)


def capacity(probes: Sequence[Probe]) -> Capacity:
    """Return where the limit is, as far as *probes* tell."""
    low, high = _bracket(probes)
    edges = [probe.requests_per_s for probe in probes if probe.holds is None]
    if edges:
        return Capacity(requests_per_s=edges[-1], low=low, high=high)
    if low is None:
        return Capacity(requests_per_s=None, low=None, high=high)
    if high is None:
        return Capacity(requests_per_s=low, low=low, high=None)
    return Capacity(requests_per_s=math.sqrt(low * high), low=low, high=high)


def _bracket(probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """
    Return the highest rate that holds below the lowest that misses, and that one.

    A rate that held above one that missed is not believed: the lower miss counts.
    """
    high = min((p.requests_per_s for p in probes if p.holds is False), default=None)
    held = [p.requests_per_s for p in probes if p.holds]
    low = max((rate for rate in held if high is None or rate < high), default=None)
    return low, high
