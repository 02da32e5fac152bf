"""How many requests a load test needs, and how many of them may be late."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from minicluster.stats.shares import LEVELS, samples_needed, share_interval

if TYPE_CHECKING:
    from minicluster.specs.slo import SloSpec
    from minicluster.specs.workload import WorkloadSpec

MARGIN = 1.2  # factor above the fewest requests that can prove the SLO met: some requests will miss


def default_requests(percentile: str) -> int:
    """Return the number of requests that proves a limit at *percentile* met, if few miss it."""
    return round(MARGIN * samples_needed(LEVELS[percentile]))


def enough_requests(percentile: str) -> int:
    """Return five times the fewest requests that can prove a percentile, the default maximum."""
    return 5 * samples_needed(LEVELS[percentile])


def requests_to_judge(workload: WorkloadSpec, slo: SloSpec) -> int:
    """Return the number of requests of which each class has enough to be judged."""
    needed = max(default_requests(own.percentile) for own in workload.promises(slo).values())
    return math.ceil(needed / workload.rarest_fraction)


def most_late(requests: int, level: float) -> int:
    """
    Return how many of so many requests may miss a limit that is still proven met.

    As many as independent requests may; where late ones come in bursts, fewer. -1: not even none.
    """

    def unproven(late: int) -> bool:
        return share_interval(1 - late / requests, requests, 1.0).low < level

    return bisect_right(range(requests + 1), False, key=unproven) - 1  # noqa: FBT003
