"""Predicted goodput at other request rates: a run's own requests, simulated faster and slower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.verdict.resimulation import resimulate

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.run.folder import Run
    from loadtest.verdict.resimulation import PredictedRequest, Resimulation
    from minicluster.specs.slo import SloSpec

LOAD_FACTORS = (0.5, 0.8, 0.95, 1.1, 1.3)
"""Simulated request rates, as factors of the highest at which the plan predicts the SLO to hold:
two on the linear part, three around the bend."""

MAX_REQUESTS = 1_000
"""Requests of each simulation, so that all of them take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCurve:
    """
    Predicted goodput over the request rate.

    Attributes:
        points: (offered requests/s, good requests/s), ascending; the run's own rate is one of them.
        limit_requests_per_s: highest rate at which the plan predicts the SLO to hold (headroom).
    """

    points: tuple[tuple[float, float], ...]
    limit_requests_per_s: float


def predict_goodput(
    plan_file: Path,
    run: Run,
    resimulation: Resimulation,
    *,
    offered_requests_per_s: float,
    limit_requests_per_s: float,
) -> GoodputCurve:
    """
    Simulate the run's first requests at rates around the plan's limit.

    Args:
        plan_file: the plan that was deployed.
        run: an open-loop run.
        resimulation: the same requests at the run's own rate.
        offered_requests_per_s: the run's own rate.
        limit_requests_per_s: highest rate at which the plan predicts the SLO to hold.

    Ignores:
        Requests that admission sheds: beyond the limit the admitted ones are faster; at the run's
        own rate only these count. Turns wait for answers: at a higher rate they may come earlier
        and find less in the prefix cache. Beyond capacity goodput falls as long as the load
        lasts; the curve is for this number of requests.

    Raises:
        MiniclusterError: the simulator refuses the plan or the requests.
    """
    sent = sorted(run.samples, key=lambda s: (s.due_s, s.index))[:MAX_REQUESTS]
    counted = {s.index for s in sent if s.in_window} or {s.index for s in sent}
    points = {offered_requests_per_s: _good_fraction(resimulation, run.job.slo, counted)}
    for factor in LOAD_FACTORS:
        requests_per_s = factor * limit_requests_per_s
        speedup = requests_per_s / offered_requests_per_s
        at_rate = resimulate(plan_file, sent, speedup=speedup, schedule=run.schedule)
        points[requests_per_s] = _good_fraction(at_rate, run.job.slo, counted)
    return GoodputCurve(
        points=tuple((rate, rate * fraction) for rate, fraction in sorted(points.items())),
        limit_requests_per_s=limit_requests_per_s,
    )


def _good_fraction(resimulation: Resimulation, slo: SloSpec, counted: set[int]) -> float:
    simulated = counted & resimulation.requests.keys()
    good = sum(_is_good(resimulation.requests[index], slo) for index in simulated)
    return good / max(1, len(simulated))


def _is_good(request: PredictedRequest, slo: SloSpec) -> bool:
    return (
        request.ttft_s <= slo.ttft_s
        and (slo.tpot_s is None or (request.tpot_s or 0.0) <= slo.tpot_s)
        and (slo.itl_s is None or request.longest_stall_s <= slo.itl_s)
    )
