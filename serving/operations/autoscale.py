"""`serving scale --auto`: the plan's policy, interval after interval."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.plan.scaling import wanted_replicas
from minicluster.specs.scaling import MARGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from minicluster.plan.scaling import ScaledPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The rate of an interval, and the replicas by role after the decision on it."""

    requests_per_s: float
    replicas: dict[str, int]


def follow(
    pools: Sequence[ScaledPool],
    replicas: Mapping[str, int],
    rate: Callable[[], float],
    change: Callable[[dict[str, int]], None],
    *,
    held: int,
    margin: float = MARGIN,
) -> Iterator[Decision]:
    """
    Decide and change without end, from the replicas that the first intervals allow.

    Until a whole hold time has been measured the planned rate is taken for what is not known, so
    that nothing is taken away too early.

    Args:
        pools: of the plan.
        replicas: by role, as they run.
        rate: waits for the end of an interval and returns its requests/s.
        change: gives the pools so many replicas.
        held: intervals that decide together, see `held_intervals`.
        margin: of the policy.
    """
    now = dict(replicas)
    rates = deque([pools[0].planned_requests_per_s] * held, maxlen=held)
    while True:
        rates.append(rate())
        wanted = wanted_replicas(pools, rates, margin=margin)
        if wanted != now:
            change(wanted)
            now = wanted
        yield Decision(requests_per_s=rates[-1], replicas=now)
