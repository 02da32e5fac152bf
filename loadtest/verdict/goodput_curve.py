"""Goodput against load, simulated: a run's own requests, closer together and further apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.verdict.resimulation import replay

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.run.folder import Run
    from loadtest.verdict.resimulation import PredictedRequest, Resimulation
    from minicluster.specs.slo import SloSpec

LOADS = (0.5, 0.8, 0.95, 1.1, 1.3)
"""Simulated, times the load up to which the plan has the SLO hold."""

MOST_REQUESTS = 1_000
"""Of each simulation, which so takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """
    What the plan has become of this run at other loads.

    Attributes:
        points: offered and good requests/s, by load; the run's own is among them.
        limit_requests_per_s: up to which the plan has the SLO hold (its headroom).
    """

    points: tuple[tuple[float, float], ...]
    limit_requests_per_s: float


def foresee(
    plan_file: Path,
    run: Run,
    own: Resimulation,
    *,
    offered_requests_per_s: float,
    limit_requests_per_s: float,
) -> Foreseen:
    """
    Simulate the run's first requests at the loads around the plan's limit.

    Args:
        plan_file: what was deployed.
        run: of an open loop.
        own: the same at the run's own load.
        offered_requests_per_s: that load.
        limit_requests_per_s: up to which the plan has the SLO hold.

    Ignores:
        What a front door sheds: beyond the limit those it lets in fare better; at the run's own
        load they alone count. That turns wait for answers: at a higher pace they may come before,
        and find less cached. A load beyond capacity has no goodput of its own: the longer it
        lasts, the less; this is that of so many requests.

    Raises:
        MiniclusterError: the simulator refuses.
    """
    sent = sorted(run.samples, key=lambda s: (s.due_s, s.index))[:MOST_REQUESTS]
    counted = {s.index for s in sent if s.in_window} or {s.index for s in sent}
    points = {offered_requests_per_s: _good_fraction(own, run.job.slo, counted)}
    for factor in LOADS:
        load = factor * limit_requests_per_s
        pace = load / offered_requests_per_s
        found = replay(plan_file, sent, pace=pace, schedule=run.schedule)
        points[load] = _good_fraction(found, run.job.slo, counted)
    return Foreseen(
        points=tuple((load, load * share) for load, share in sorted(points.items())),
        limit_requests_per_s=limit_requests_per_s,
    )


def _good_fraction(found: Resimulation, slo: SloSpec, counted: set[int]) -> float:
    """Share of the requests that met every limit, of those simulated."""
    simulated = counted & found.requests.keys()
    return sum(_is_good(found.requests[k], slo) for k in simulated) / max(1, len(simulated))


def _is_good(one: PredictedRequest, slo: SloSpec) -> bool:
    return (
        one.ttft_s <= slo.ttft_s
        and (slo.tpot_s is None or (one.tpot_s or 0.0) <= slo.tpot_s)
        and (slo.itl_s is None or one.longest_stall_s <= slo.itl_s)
    )
