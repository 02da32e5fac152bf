"""Fractions of values: levels of percentiles, Wilson's interval, how many values decide."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

LEVELS = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
"""Fraction of the values that do not exceed each percentile."""

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

MOST_COUNTED = 1 << 40  # number of values that is never needed: fractions so close count as equal

RESERVE = 10.0
"""Design effect that a run must be long enough for: a shorter run may contain no burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareInterval:
    """An interval with `CONFIDENCE`; `high` is infinite if it is unbounded above."""

    low: float
    high: float


def share_interval(share: float, count: int, effect: float) -> ShareInterval:
    """
    Return Wilson's interval of a fraction of *count* values with the design effect *effect*.

    Source: Wilson (1927), JASA 22; effective number as in Korn and Graubard (1998), *Survey
    Methodology* 24.
    """
    n, z2 = count / effect, Z**2
    middle = share + z2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return ShareInterval(
        low=min(share, max(0.0, (middle - half) / (1 + z2 / n))),
        high=max(share, min(1.0, (middle + half) / (1 + z2 / n))),
    )


def count_needed(share: float, target: float, effect: float) -> int | None:
    """Return the number of values whose interval of *share* excludes *target*; `None`: equal."""
    if share == target:
        return None
    counts = range(1, MOST_COUNTED)

    def excludes(count: int) -> bool:
        interval = share_interval(share, count, effect)
        return not interval.low < target <= interval.high

    at = bisect_left(counts, True, key=excludes)  # noqa: FBT003  (what is looked for)
    return counts[at] if at < len(counts) else None


def samples_needed(level: float) -> int:
    """
    Return the fewest values that decide whether a fraction *level* meets its limit.

    If all of them meet it, this is proven even at a design effect of `RESERVE`. A shorter run may
    contain none of its bursts, and its interval is then too short, whichever side it lies on.
    """
    return count_needed(1.0, level, RESERVE) or 0
