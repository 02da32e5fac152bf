"""A plan under the very requests of the trace that it was made for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.units import seconds
from sizing.planner.error_model import Check, missed_limits
from sizing.planner.simulated_check import limits_of
from sizing.simulation.planned import simulate_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Plan
    from minicluster.workload.arrivals import Arrivals

MOST_REQUESTS = 20_000
"""Requests that are replayed at most: those of a longer trace that come in the shortest time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """
    A trace on a plan.

    Attributes:
        requests: that were replayed.
        requests_per_s: at which they came on average.
        checks: latency at the SLO's percentile and limit of each limit.
        settled: whether latencies did not grow to the end.
    """

    requests: int
    requests_per_s: float
    checks: tuple[Check, ...]
    settled: bool

    @property
    def misses(self) -> tuple[str, ...]:
        """Limits that are missed, one phrase each."""
        return missed_limits(self.checks)

    def __str__(self) -> str:
        """Say what was replayed, and what came of it."""
        latencies = ", ".join(f"{each.name} {seconds(each.seconds)}" for each in self.checks)
        held = "misses the SLO" if self.misses else "holds the SLO"
        return (
            f"the trace itself, {self.requests:,} requests at {self.requests_per_s:.3g}/s, {held}:"
            f" {latencies}"
        )


def replay(
    plan: Plan, arrivals: Arrivals, *, progress: Callable[[int], None] | None = None
) -> Replay:
    """
    Simulate a plan under the busiest requests of a trace, with their own gaps and lengths.

    A search plans for arrivals that do not depend on each other at the busiest rate; a trace may
    come in bursts, or with long prompts close together.

    Raises:
        InputError: a request that the plan cannot serve.
    """
    busiest = busiest_requests(arrivals, MOST_REQUESTS)
    outcome = simulate_plan(plan, busiest, seed=0, progress=progress)
    span_s = float(busiest.due_s[-1] - busiest.due_s[0])
    return Replay(
        requests=len(busiest),
        requests_per_s=(len(busiest) - 1) / span_s if span_s else 0.0,
        checks=tuple(check for check, _ in limits_of(outcome, plan.promises)),
        settled=outcome.settled,
    )


def busiest_requests(arrivals: Arrivals, most: int) -> Arrivals:
    """Return the *most* consecutive requests that come in the shortest time; all, of no more."""
    due_s = arrivals.due_s
    if len(due_s) <= most:
        return arrivals
    first = int(np.argmin(due_s[most - 1 :] - due_s[: len(due_s) - most + 1]))
    own = {name: values[first : first + most] for name, values in arrivals.columns().items()}
    own["due_s"] = own["due_s"] - due_s[first]
    return replace(arrivals, **own)
