"""Pools that compute prompts and decode have no closed form: a simulation says what they do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import Headroom, Latency, Prediction
from sizing.planner.bottleneck import bottlenecks
from sizing.planner.evidence import StepErrors, interval_around
from sizing.planner.settle import mixed_load
from sizing.planner.trial import Trials
from sizing.queueing.forecast import capacity_requests_per_s, couple, forecast, utilisations

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from sizing.evidence.interval import PredictionInterval
    from sizing.planner.answer import PlanVerdict
    from sizing.planner.candidate import Candidate

SEED = 2
"""Of the run whose latencies are promised; the search has seen others."""

LONGER = 4
"""Times as long as the runs that the search starts with."""

STEPS = 6
"""Halvings of the load factor: a 64th of the range between the plan and saturation."""


def simulated_prediction(inputs: Inputs, chosen: Candidate) -> Prediction:
    """
    Simulate with step times as predicted, and read the statistics off.

    Of split pools with a local threshold closed forms say what each pool is busy with.
    """
    trials = Trials(inputs, StepErrors())
    outcome = trials.outcome(chosen, requests=LONGER * trials.length(chosen), seed=SEED)
    load = inputs.scenario.workload
    parts = {
        name: float(part[outcome.counts].mean())
        for name, part in outcome.parts_s.items()
        if part.any()
    }
    series = {name: outcome.series(name) for name in ("ttft", "tpot", "itl", "e2e")}
    return Prediction(
        ttft=_latency(*series["ttft"], interval_around("ttft", inputs)),
        tpot=_latency(*series["tpot"], interval_around("tpot", inputs)),
        itl=_latency(*series["itl"], None),
        e2e=_latency(*series["e2e"], None),
        output_tokens_per_s=load.requests_per_s * float(chosen.tandem.output_tokens.mean()),
        capacity_requests_per_s=_capacity_requests_per_s(chosen),
        utilisation_fraction=_utilisations(chosen),
        bottleneck=_bottlenecks(inputs, chosen, parts),
        ttft_parts_s=parts,
    )


def _utilisations(chosen: Candidate) -> dict[str, float]:
    """Share of each pool's capacity in use."""
    if chosen.layout.prefill is None:
        rate = chosen.tandem.workload.requests_per_s
        return {"mixed": rate / mixed_capacity_requests_per_s(chosen)}
    coupled = couple(chosen.tandem)
    slowed = coupled.decode_slowdown if coupled else 1.0
    return utilisations(chosen.tandem, 1.0, slowed)


def _bottlenecks(inputs: Inputs, chosen: Candidate, parts: dict[str, float]) -> dict[str, str]:
    """Name what binds each pool."""
    if chosen.layout.prefill is None:
        return {"mixed": "queue" if parts.get("queue", 0.0) > parts["prefill"] else "compute"}
    predicted = forecast(chosen.tandem)
    return {} if predicted is None else bottlenecks(inputs, chosen, predicted)


def _capacity_requests_per_s(chosen: Candidate) -> float:
    """Rate above which no scheduling keeps up."""
    if chosen.layout.prefill is None:
        return mixed_capacity_requests_per_s(chosen)
    return capacity_requests_per_s(chosen.tandem)


def mixed_capacity_requests_per_s(chosen: Candidate) -> float:
    """Rate above which no scheduling keeps up: replicas over those that are busy all the time."""
    rate = chosen.tandem.workload.requests_per_s
    return rate * chosen.replicas["mixed"] / mixed_load(chosen)


def simulated_headroom(inputs: Inputs, chosen: Candidate) -> Headroom:
    """Bisect the largest load factor at which a look still finds the SLO kept, up to capacity."""
    rate = inputs.scenario.workload.requests_per_s
    low, high = 1.0, max(1.0, _capacity_requests_per_s(chosen) / rate)
    shares = _utilisations(chosen)
    full = f"{max(shares, key=lambda role: shares[role])} saturates"
    binds = full
    for _ in range(STEPS):
        middle = (low + high) / 2
        verdict = _looked(inputs, chosen, middle * rate)
        if verdict.holds:
            low = middle
        else:
            high = middle
            binds = full if verdict.check is None else verdict.check.name
    return Headroom(load_factor=low, binds=binds)


def _looked(inputs: Inputs, chosen: Candidate, requests_per_s: float) -> PlanVerdict:
    """Look once at another rate, with step times as predicted."""
    load = replace(inputs.scenario.workload, requests_per_s=requests_per_s)
    given = replace(inputs, scenario=replace(inputs.scenario, workload=load))
    loaded = replace(chosen, tandem=replace(chosen.tandem, workload=load))
    return Trials(given, StepErrors(), patient=False).verdict(loaded)


def _latency(
    values: NDArray[np.float64],
    weights: NDArray[np.float64] | None,
    around: PredictionInterval | None,
) -> Latency:
    """Statistics of what was simulated; all zero of gaps between tokens where answers have one."""
    mass = np.ones(len(values)) if weights is None else weights
    if not mass.sum():
        values, mass = np.zeros(1), np.ones(1)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(mass[order]) / mass.sum()

    def at(share: float) -> float:
        place = min(len(values) - 1, int(np.searchsorted(reached, share * (1 - 1e-12))))
        return float(values[order[place]])

    return Latency(
        mean_s=float(np.average(values, weights=mass)),
        p50_s=at(0.5),
        p90_s=at(0.9),
        p95_s=at(0.95),
        p99_s=at(0.99),
        low_factor=None if around is None else around.low_s,
        high_factor=None if around is None else around.high_s,
    )
