"""Predictions of one configuration: by closed forms, by simulation, and of pools by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Headroom, Latency, Pool, Prediction, Validation
from minicluster.specs.slicing import Slicing
from minicluster.units import seconds
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.step import beyond_hb_domain_s
from sizing.planner.bottleneck import bottlenecks
from sizing.planner.candidates import largest_batch, one_replica_each
from sizing.planner.deployment import pools
from sizing.planner.error_model import StepErrors, interval_around, validation
from sizing.planner.layout import (
    Layout,
    LayoutShape,
    check_degree,
    memory_rule,
    pairing_rule,
    profile_rule,
)
from sizing.planner.pool_sizing import mixed_load
from sizing.planner.simulated_check import SloSimulator
from sizing.planner.step_models import StepModels, machine
from sizing.queueing.forecast import capacity_requests_per_s, couple, forecast, utilisations

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from sizing.evidence.interval import PredictionInterval
    from sizing.planner.candidates import Candidate
    from sizing.planner.result import PlanVerdict
    from sizing.queueing.forecast import TandemForecast

SEED = 2
"""Seed of the simulation that a prediction is read from; the search uses others."""

LENGTH_FACTOR = 4
"""Length of that simulation over that of the search's shortest runs."""

SIMULATED_HEADROOM_STEPS = 6
"""Halvings of the load factor: a 64th of the range between the plan and saturation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Replicas of a pool and the slicing of each; without a GPU the cluster's own is taken."""

    replicas: int
    slicing: Slicing
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrediction:
    """
    The prediction for pools that the user names.

    Attributes:
        misses: limits of the SLO that do not hold, one sentence each.
        beyond_hb_domain_s: per role, seconds a step that crossing the HB domain costs; empty
            where nothing crosses.
    """

    pools: tuple[Pool, ...]
    prediction: Prediction
    meets_slo: bool
    misses: tuple[str, ...]
    beyond_hb_domain_s: dict[str, float]
    validated_on: Validation


def predict_pools(
    inputs: Inputs,
    *,
    prefill: PoolSize | None = None,
    decode: PoolSize | None = None,
    mixed: PoolSize | None = None,
) -> PoolPrediction:
    """
    Predict pools of named replicas and slicing: prefill and decode, or one that does both.

    Raises:
        InputError: a TP that the model, the connector, the memory or the calibration rules out;
            pools that make no deployment.
        NegativeAnswer: the load saturates a pool, so that no latency exists.
    """
    if mixed is not None and prefill is None and decode is None:
        return _predict_mixed(inputs, mixed)
    if prefill is None or decode is None or mixed is not None:
        raise InputError(
            "--prefill, --decode, --mixed", None, "--prefill and --decode, or --mixed alone"
        )
    layout = Layout(prefill=_shape(inputs, prefill), decode=_shape(inputs, decode))
    _check_layout(inputs, layout)
    smallest = one_replica_each(inputs, layout, StepModels(inputs))
    chosen = smallest.limited(max(1, largest_batch(smallest, inputs.scenario.slo)))
    chosen = chosen.sized(prefill.replicas, decode.replicas)
    found = forecast(chosen.tandem)
    if found is None:
        raise _saturated(inputs, chosen, capacity_requests_per_s(chosen.tandem))
    predicted = forecast_prediction(inputs, chosen, found)
    return _with_slo(inputs, chosen, predicted, found.mean_batch)


def _predict_mixed(inputs: Inputs, size: PoolSize) -> PoolPrediction:
    if inputs.calibration is not None or inputs.gpu.kind == "cpu":
        raise InputError(
            "--mixed",
            str(size.slicing),
            "--prefill and --decode: a calibration times the steps of split pools",
        )
    layout = Layout(prefill=None, decode=_shape(inputs, size))
    _check_layout(inputs, layout)
    smallest = one_replica_each(inputs, layout, StepModels(inputs))
    if not smallest.max_batch:
        raise InputError("--mixed", str(layout.decode), "a layout that a sequence of the load fits")
    chosen = smallest.sized(0, size.replicas)
    capacity = mixed_capacity_requests_per_s(chosen)
    rate = inputs.scenario.workload.requests_per_s
    if rate >= capacity:
        raise _saturated(inputs, chosen, capacity)
    predicted = simulated_prediction(inputs, chosen)
    stay_s = float(chosen.tandem.output_tokens.mean()) * predicted.tpot.mean_s
    return _with_slo(inputs, chosen, predicted, rate * stay_s / chosen.tandem.decode.replicas)


def _saturated(inputs: Inputs, chosen: Candidate, capacity: float) -> NegativeAnswer:
    return NegativeAnswer(
        f"{inputs.scenario.workload.requests_per_s:g} requests/s saturate {chosen}: queues grow"
        f" without end above {capacity:.3g} requests/s; add replicas or lower"
        " workload.requests_per_s"
    )


def _with_slo(
    inputs: Inputs, chosen: Candidate, predicted: Prediction, mean_batch: float
) -> PoolPrediction:
    slo = inputs.scenario.slo
    missed = tuple(
        f"{name.upper()} {slo.percentile} {seconds(found_s)}, limit {seconds(limit_s)}"
        for name, limit_s in slo.limits_s.items()
        if (found_s := getattr(predicted, name).at(slo.percentile)) > limit_s
    )
    return PoolPrediction(
        pools=pools(inputs, chosen),
        prediction=predicted,
        meets_slo=not missed,
        misses=missed,
        beyond_hb_domain_s=_beyond_hb_domain_s(inputs, chosen, mean_batch),
        validated_on=validation(inputs, split=chosen.layout.prefill is not None),
    )


def _shape(inputs: Inputs, size: PoolSize) -> LayoutShape:
    gpu = size.gpu or inputs.gpu.name
    if gpu not in inputs.kinds:
        raise InputError(
            "--prefill, --decode, --mixed", gpu, "one of search.gpus: " + ", ".join(inputs.kinds)
        )
    return LayoutShape(slicing=size.slicing, gpu=gpu)


def _check_layout(inputs: Inputs, layout: Layout) -> None:
    """Refuse what cannot be deployed or was never measured."""
    for role, shape in layout.shapes.items():
        option, tp = f"--{role}", shape.slicing.tp
        if shape.gpus != 1 and (inputs.calibration is not None or inputs.gpu.kind == "cpu"):
            raise InputError(option, str(shape), "TP1: step times come from a calibration at TP 1")
        check_degree(inputs, tp, place=option)
        rule = memory_rule(inputs, shape)
        if rule is not None:
            raise InputError(option, str(shape), f"a layout that the model fits on: {rule}")
    rule = pairing_rule(inputs.model, layout)
    if rule is None and inputs.scenario.search.layouts == "deployable":
        rule = profile_rule(inputs, layout)
    if rule is not None:
        raise InputError("--prefill, --decode", str(layout), rule)


def _beyond_hb_domain_s(inputs: Inputs, chosen: Candidate, batch: float) -> dict[str, float]:
    tokens = float(chosen.tandem.computed_tokens.mean())
    steps = {
        "prefill": prefill_load(tokens),
        "decode": decode_load(batch, chosen.tandem.context[0]),
    }
    steps["mixed"] = steps["decode"]
    return {
        role: float(
            beyond_hb_domain_s(machine(inputs, shape.gpu), steps[role], slicing=shape.slicing)
        )
        for role, shape in chosen.layout.shapes.items()
        if shape.slicing.tp * shape.slicing.dp > inputs.cluster.gpus_per_hb_domain
    }


def forecast_prediction(inputs: Inputs, chosen: Candidate, found: TandemForecast) -> Prediction:
    """Return the prediction of split pools by closed forms."""
    coupling = found.coupling
    load = inputs.scenario.workload
    return Prediction(
        ttft=_latency(found.ttft.mean, found.ttft.quantile, interval_around("ttft", inputs)),
        tpot=_latency(found.tpot.mean, found.tpot.quantile, interval_around("tpot", inputs)),
        itl=_latency(found.itl.mean, found.itl.quantile),
        e2e=_latency(found.e2e.mean, found.e2e.quantile),
        output_tokens_per_s=load.requests_per_s * float(chosen.tandem.output_tokens.mean()),
        capacity_requests_per_s=capacity_requests_per_s(chosen.tandem),
        utilisation_fraction=utilisations(
            chosen.tandem, coupling.prefill_slowdown, coupling.decode_slowdown
        ),
        bottleneck=bottlenecks(inputs, chosen, found),
        ttft_parts_s=found.parts_s,
    )


def simulated_prediction(inputs: Inputs, chosen: Candidate) -> Prediction:
    """
    Return the prediction of one simulation with step times as predicted.

    Aggregated pools, and split pools with a local prefill threshold, have no closed form. Of the
    latter, closed forms still give each pool's bottleneck.
    """
    simulator = SloSimulator(inputs, StepErrors())
    outcome = simulator.outcome(
        chosen, requests=LENGTH_FACTOR * simulator.length(chosen), seed=SEED
    )
    load = inputs.scenario.workload
    parts = {
        name: float(part[outcome.counts].mean())
        for name, part in outcome.parts_s.items()
        if part.any()
    }

    def latency(name: str, around: PredictionInterval | None = None) -> Latency:
        return _latency(*_statistics(*outcome.series(name)), around)

    return Prediction(
        ttft=latency("ttft", interval_around("ttft", inputs)),
        tpot=latency("tpot", interval_around("tpot", inputs)),
        itl=latency("itl"),
        e2e=latency("e2e"),
        output_tokens_per_s=load.requests_per_s * float(chosen.tandem.output_tokens.mean()),
        capacity_requests_per_s=_capacity_requests_per_s(chosen),
        utilisation_fraction=_utilisations(chosen),
        bottleneck=_simulated_bottlenecks(inputs, chosen, parts),
        ttft_parts_s=parts,
    )


def _utilisations(chosen: Candidate) -> dict[str, float]:
    if chosen.layout.prefill is None:
        rate = chosen.tandem.workload.requests_per_s
        return {"mixed": rate / mixed_capacity_requests_per_s(chosen)}
    coupled = couple(chosen.tandem)
    slowed = coupled.decode_slowdown if coupled else 1.0
    return utilisations(chosen.tandem, 1.0, slowed)


def _simulated_bottlenecks(
    inputs: Inputs, chosen: Candidate, parts: dict[str, float]
) -> dict[str, str]:
    if chosen.layout.prefill is None:
        return {"mixed": "queue" if parts.get("queue", 0.0) > parts["prefill"] else "compute"}
    predicted = forecast(chosen.tandem)
    return {} if predicted is None else bottlenecks(inputs, chosen, predicted)


def _capacity_requests_per_s(chosen: Candidate) -> float:
    if chosen.layout.prefill is None:
        return mixed_capacity_requests_per_s(chosen)
    return capacity_requests_per_s(chosen.tandem)


def mixed_capacity_requests_per_s(chosen: Candidate) -> float:
    """Return the rate that keeps every aggregated replica busy all the time."""
    rate = chosen.tandem.workload.requests_per_s
    return rate * chosen.replicas["mixed"] / mixed_load(chosen)


def simulated_headroom(inputs: Inputs, chosen: Candidate) -> Headroom:
    """Bisect the largest load factor, up to capacity, at which quick simulations hold the SLO."""
    rate = inputs.scenario.workload.requests_per_s
    low, high = 1.0, max(1.0, _capacity_requests_per_s(chosen) / rate)
    shares = _utilisations(chosen)
    full = f"{max(shares, key=lambda role: shares[role])} saturates"
    binds = full
    for _ in range(SIMULATED_HEADROOM_STEPS):
        middle = (low + high) / 2
        verdict = _quick_verdict(inputs, chosen, middle * rate)
        if verdict.holds:
            low = middle
        else:
            high = middle
            binds = full if verdict.check is None else verdict.check.name
    return Headroom(load_factor=low, binds=binds)


def _quick_verdict(inputs: Inputs, chosen: Candidate, requests_per_s: float) -> PlanVerdict:
    load = replace(inputs.scenario.workload, requests_per_s=requests_per_s)
    at_rate = replace(inputs, scenario=replace(inputs.scenario, workload=load))
    loaded = replace(chosen, tandem=replace(chosen.tandem, workload=load))
    return SloSimulator(at_rate, StepErrors(), precise=False).verdict(loaded)


def _statistics(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None
) -> tuple[float, Callable[[float], float]]:
    """Return mean and quantiles of a series; zero where no answer has a second token."""
    mass = np.ones(len(values)) if weights is None else weights
    if not mass.sum():
        values, mass = np.zeros(1), np.ones(1)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(mass[order]) / mass.sum()

    def quantile(share: float) -> float:
        place = min(len(values) - 1, int(np.searchsorted(reached, share * (1 - 1e-12))))
        return float(values[order[place]])

    return float(np.average(values, weights=mass)), quantile


def _latency(
    mean_s: float, quantile: Callable[[float], float], around: PredictionInterval | None = None
) -> Latency:
    """Read the statistics off; *around* is the interval of a prediction of one second."""
    return Latency(
        mean_s=mean_s,
        p50_s=quantile(0.5),
        p90_s=quantile(0.9),
        p95_s=quantile(0.95),
        p99_s=quantile(0.99),
        low_factor=None if around is None else around.low_s,
        high_factor=None if around is None else around.high_s,
    )
