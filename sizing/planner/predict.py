"""Predictions, read off simulations: of a configuration, and of pools that the user names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError, NegativeAnswer
from minicluster.pages.shown import Shown
from minicluster.phases import DECODE_QUEUE, PREFILL, PREFILL_QUEUE
from minicluster.plan import ClassPrediction, Latency, Pool, Prediction, Validation
from minicluster.specs.slicing import Slicing
from minicluster.specs.step import StepCoefficients
from minicluster.specs.workload import WorkloadSpec
from minicluster.stats.quantiles import weighted_quantile
from minicluster.stats.shares import LEVELS
from sizing.latency.op import decode_load, prefill_load
from sizing.latency.step import step_terms
from sizing.latency.term import BOUNDS, Machine
from sizing.network.network_cost import Spanning, spanning
from sizing.planner import bounds
from sizing.planner.candidates import largest_batch, most_sequences, one_replica_each
from sizing.planner.configuration import Configuration, with_load
from sizing.planner.deployment import deployment
from sizing.planner.edge import covering_rates
from sizing.planner.error_model import (
    AS_PREDICTED,
    Check,
    StepErrors,
    interval_around,
    missed_limits,
    validation,
)
from sizing.planner.layout import (
    Layout,
    LayoutShape,
    check_slicing,
    memory_rule,
    pairing_rule,
    profile_rule,
)
from sizing.planner.simulated_check import Simulations
from sizing.planner.step_models import StepModels, utilisations
from sizing.simulation.event_loop import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from minicluster.plan import Inputs, Plan
    from sizing.latency.op import StepLoad
    from sizing.latency.term import Term
    from sizing.planner.bounds import OfferedLoad
    from sizing.planner.error_model import Promises
    from sizing.planner.intervals import PredictionInterval
    from sizing.simulation.outcome import Outcome

POOL_SIZE = re.compile(
    r"(?P<replicas>[1-9]\d*)xTP(?P<tp>[1-9]\d*)(?:xPP(?P<pp>[1-9]\d*))?(?:xDP(?P<dp>[1-9]\d*))?"
    r"(?:xEP(?P<ep>[1-9]\d*))?(?:@(?P<gpu>\S+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Replicas of a pool and the slicing of each; without a GPU the cluster's own is taken."""

    replicas: int
    slicing: Slicing
    gpu: str | None = None

    @classmethod
    def parse(cls, text: str, place: str) -> PoolSize:
        """
        Read the replicas, slicing and GPU of a pool, such as `2xTP4xPP2@h200-sxm`.

        Raises:
            InputError: the text is no pool size; *place* is the option that holds it.
        """
        match = POOL_SIZE.fullmatch(text)
        if match is None:
            raise InputError(place, text, "replicas x TP, for example 2xTP4 or 2xTP4xPP2@h200-sxm")
        found = match.groupdict()
        try:
            slicing = Slicing(**{name: int(found[name] or 1) for name in ("tp", "pp", "dp", "ep")})
        except InputError as error:
            raise error.inside(place) from None
        return cls(replicas=int(found["replicas"]), slicing=slicing, gpu=found["gpu"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrediction(Shown):
    """
    The prediction for pools that the user names.

    Attributes:
        workload: the load; with users at the rate that they send.
        misses: limits of the SLO that do not hold, one phrase each.
        spanning: pools whose groups span several HB domains, and what that costs a step.
    """

    workload: WorkloadSpec
    pools: tuple[Pool, ...]
    prediction: Prediction
    meets_slo: bool
    misses: tuple[str, ...]
    spanning: tuple[Spanning, ...]
    validated_on: Validation


def predict(
    inputs: Inputs,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    mixed: str | None = None,
) -> PoolPrediction:
    """
    Predict pools of named replicas and slicing under the scenario's load; no search.

    Args:
        inputs: a scenario, for its model, GPUs, load and SLO.
        prefill: pool that computes prompts, such as `9xTP4`: replicas, and the slicing of each
            (`2xTP4xPP2@h200-sxm`; `DP` and `EP` for models with experts).
        decode: pool that generates, beside *prefill*.
        mixed: one pool that does both, in place of the two.

    Returns:
        Latencies in seconds, utilisation as fractions, and the limits that are missed.

    Raises:
        InputError: a TP that the model, the connector, the memory or the calibration rules out;
            pools that make no deployment.
        NegativeAnswer: the load saturates a pool, so that no latency exists.
    """
    sizes = _sizes(inputs, {"prefill": prefill, "decode": decode, "mixed": mixed})
    split = "mixed" not in sizes
    last = sizes["decode" if split else "mixed"]
    first = _shape(inputs, sizes["prefill"]) if split else None
    layout = Layout(prefill=first, decode=_shape(inputs, last))
    _check_layout(inputs, layout)
    replicas = {role: size.replicas for role, size in sizes.items()}
    load = inputs.scenario.workload
    if load.has_users:
        found = covering_rates(load, partial(_at_rates, inputs, layout, replicas))
        if isinstance(found, NegativeAnswer):
            raise found
        return found
    return _predicted(inputs, layout, replicas)


def _at_rates(
    inputs: Inputs, layout: Layout, replicas: Mapping[str, int], load: WorkloadSpec
) -> tuple[PoolPrediction | NegativeAnswer, Prediction | None]:
    """Predict at some rates of the users."""
    try:
        found = _predicted(with_load(inputs, load), layout, replicas)
    except NegativeAnswer as saturated:
        return saturated, None
    return found, found.prediction


def _predicted(inputs: Inputs, layout: Layout, replicas: Mapping[str, int]) -> PoolPrediction:
    """Predict pools of so many replicas."""
    models = StepModels(inputs)
    chosen = one_replica_each(models, layout).sized(replicas)
    if layout.prefill is not None:
        chosen = chosen.limited(max(1, largest_batch(models, chosen, AS_PREDICTED)))
    predicted = _simulated(models, chosen)
    missed = slo_misses(predicted, inputs.scenario.promises)
    named = deployment(inputs, chosen).pools
    return PoolPrediction(
        workload=inputs.scenario.workload,
        pools=named,
        prediction=predicted,
        meets_slo=not missed,
        misses=missed,
        spanning=spanning(inputs, named, models.load(chosen).step_model.path),
        validated_on=validation(inputs, split=layout.prefill is not None),
    )


def _sizes(inputs: Inputs, texts: Mapping[str, str | None]) -> dict[str, PoolSize]:
    sizes = {
        role: PoolSize.parse(text, f"--{role}") for role, text in texts.items() if text is not None
    }
    if sizes.keys() not in ({"prefill", "decode"}, {"mixed"}):
        raise InputError(
            "--prefill, --decode, --mixed", None, "--prefill and --decode, or --mixed alone"
        )
    if "mixed" in sizes and (inputs.calibration is not None or inputs.gpu.kind == "cpu"):
        raise InputError(
            "--mixed",
            str(sizes["mixed"].slicing),
            "--prefill and --decode: a calibration times the steps of split pools",
        )
    return sizes


def _simulated(models: StepModels, chosen: Configuration) -> Prediction:
    """Simulate the pools, unless their queues grow without end."""
    load = models.inputs.scenario.workload
    rate = load.requests_per_s
    capacity = rate / max(utilisations(models, chosen).values())
    if capacity > rate:
        outcome = Simulations(models).predicted(chosen)
        predicted = prediction_of(models, chosen, outcome)
        capacity = predicted.capacity_requests_per_s
        if capacity > rate:
            return predicted
    raise NegativeAnswer(
        f"{rate:g} requests/s saturate {chosen}: queues grow without end above {capacity:.3g}"
        f" requests/s; add replicas or lower {load.demand_key}"
    )


def slo_misses(predicted: Prediction, slos: Promises) -> tuple[str, ...]:
    """Return the limits that a prediction misses, one phrase each."""
    return missed_limits(
        Check(
            metric=name,
            percentile=slo.percentile,
            seconds=predicted.latency(name, of).at(slo.percentile),
            limit_s=limit_s,
            of=of,
        )
        for of, slo in slos.items()
        for name, limit_s in slo.limits_s.items()
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
    library = inputs.engine.all_to_all
    if layout.prefill is None and library is not None:
        expected = f"--prefill and --decode: {library.name} has other kernels for each phase"
        raise InputError("--mixed", str(layout.decode), expected, "leave out engine.all_to_all")
    for role, shape in layout.shapes.items():
        option = f"--{role}"
        if shape.gpus != 1 and (inputs.calibration is not None or inputs.gpu.kind == "cpu"):
            raise InputError(option, str(shape), "TP1: step times come from a calibration at TP 1")
        check_slicing(inputs, shape.slicing, place=option)
        rule = memory_rule(inputs, shape)
        if rule is not None:
            raise InputError(option, str(shape), f"a layout that the model fits on: {rule}")
    rule = pairing_rule(inputs.model, layout)
    if rule is None and inputs.scenario.search.layouts == "deployable":
        rule = profile_rule(inputs, layout)
    if rule is not None:
        options = ", ".join(f"--{role}" for role in layout.shapes)
        raise InputError(options, str(layout), rule)


def planned_models(plan: Plan) -> tuple[StepModels, Configuration]:
    """Return the configuration of a plan, and its steps as the plan has them."""
    chosen = Configuration.of_plan(plan)
    known = chosen.layout, chosen.local_threshold_tokens, AS_PREDICTED
    return StepModels(plan.inputs, {known: plan.step_model}), chosen


def prediction_runs(plan: Plan) -> tuple[Outcome, Outcome | None]:
    """
    Simulate once more what a plan's prediction was read from, pools over time included.

    Returns:
        That run, whose latencies are those of `plan.prediction`, and the same requests with steps
        as slow as the plan's confidence allows for; `None`: it has none.
    """
    models, chosen = planned_models(plan)
    simulations, sure = Simulations(models), plan.confidence
    predicted = simulations.predicted(chosen, samples=SAMPLES)
    if sure is None:
        return predicted, None
    errors = StepErrors(prefill=sure.prefill_factor, decode=sure.decode_factor)
    return predicted, simulations.predicted(chosen, errors, samples=SAMPLES)


def prediction_of(models: StepModels, chosen: Configuration, outcome: Outcome) -> Prediction:
    """Read the prediction off a simulation with step times as predicted."""
    inputs, offered = models.inputs, models.load(chosen)
    load = inputs.scenario.workload
    parts = {name: float(part[outcome.counts].mean()) for name, part in outcome.parts_s.items()}
    around = {name: interval_around(name, inputs) for name in ("ttft", "tpot")}
    ttft, tpot, itl, e2e = (
        _latency(*outcome.series(name), around.get(name)) for name in ("ttft", "tpot", "itl", "e2e")
    )
    by_class = {
        each.name: ClassPrediction(
            **{
                name: _latency(*outcome.series(name, at), around.get(name))
                for name in ("ttft", "tpot", "e2e")
            }
        )
        for at, each in enumerate(load.classes)
    }
    used = utilisations(models, chosen)
    if offered.split:
        slower = bounds.interference(
            offered,
            chosen.lanes("decode"),
            prefill_busy=outcome.busy_fraction["prefill"],
            mean_batch=mean_batch(offered, chosen, tpot.mean_s),
        )
        used = {role: share * (1 + slower[role]) for role, share in used.items()}
    return Prediction(
        ttft=ttft,
        tpot=tpot,
        itl=itl,
        e2e=e2e,
        output_tokens_per_s=load.requests_per_s * float(offered.output_tokens.mean()),
        capacity_requests_per_s=load.requests_per_s / max(used.values()),
        utilisation_fraction=used,
        bottleneck=bottlenecks(models, chosen, parts, tpot.mean_s),
        ttft_parts_s=parts,
        by_class=by_class,
    )


def _latency(
    values: NDArray[np.float64],
    weights: NDArray[np.float64] | None,
    around: PredictionInterval | None = None,
) -> Latency:
    """Read the statistics off; zero where no answer has a second token."""
    mass = np.ones(len(values)) if weights is None else weights
    if not mass.sum():
        values, mass = np.zeros(1), np.ones(1)
    order = np.argsort(values, kind="stable")
    quantiles = {
        f"{name}_s": weighted_quantile(values[order], level, mass[order])
        for name, level in LEVELS.items()
    }
    return Latency(
        mean_s=float(np.average(values, weights=mass)),
        low_factor=None if around is None else around.low_s,
        high_factor=None if around is None else around.high_s,
        **quantiles,
    )


def mean_batch(load: OfferedLoad, chosen: Configuration, tpot_s: float) -> float:
    """Return the sequences of a decode step, by Little's law: those that come while one decodes."""
    stay_s = float(load.output_tokens.mean()) * tpot_s
    return load.workload.requests_per_s * stay_s / chosen.lanes(chosen.last)


def bottlenecks(
    models: StepModels, chosen: Configuration, parts_s: Mapping[str, float], tpot_s: float
) -> dict[str, str]:
    """
    Return the bottleneck of each phase by role.

    `queue`: requests wait longer for the phase than they spend in it. `capacity`: the KV cache
    limits the decode batch, and it is nearly full. Otherwise the bottleneck is what a step spends
    most of its time on.
    """
    waits = parts_s[PREFILL_QUEUE] > parts_s[PREFILL]
    if chosen.last == "mixed":
        return {"mixed": "queue" if waits else "compute"}
    inputs, load, limit = models.inputs, models.load(chosen), chosen.batch_limit
    batch = mean_batch(load, chosen, tpot_s)
    words = {role: _step_bound(models, chosen, role, batch) for role in chosen.replicas}
    most = inputs.engine_on(chosen.layout.decode.gpu).max_num_seqs
    full = limit == most_sequences(models, chosen) < most and inputs.calibration is None
    if full and batch > limit / 2:
        words["decode"] = "capacity"
    if waits:
        words["prefill"] = "queue"
    if parts_s[DECODE_QUEUE] > float(load.output_tokens.mean()) * tpot_s:
        words["decode"] = "queue"
    return words


def representative_terms(
    models: StepModels, chosen: Configuration, role: str, batch: float
) -> tuple[Term, ...]:
    """Split a step of *role* at the load's mean lengths into the terms of eq. S5."""
    shape, load = representative_load(models, chosen, role, batch)
    return step_terms(Machine.of(models.inputs, shape.gpu), load, slicing=shape.slicing)


def representative_load(
    models: StepModels, chosen: Configuration, role: str, batch: float
) -> tuple[LayoutShape, StepLoad]:
    """Return the replica of *role*, and its step at the load's mean lengths."""
    load, decode = models.load(chosen), chosen.layout.decode
    if role == "prefill":
        tokens, cached = (float(x.mean()) for x in (load.computed_tokens, load.cached_tokens))
        return chosen.layout.prefill or decode, prefill_load(tokens, cached)
    return decode, decode_load(max(1.0, batch), load.context[0])


def _step_bound(models: StepModels, chosen: Configuration, role: str, batch: float) -> str:
    """Return what takes most of a step, kernel launches left out."""
    load = models.load(chosen)
    step = load.step_model.of(role)
    if isinstance(step, StepCoefficients):
        return _fitted_bound(step, load, role, batch)
    seconds = dict.fromkeys(BOUNDS, 0.0)
    for term in representative_terms(models, chosen, role, batch):
        seconds[term.bound] += float(np.sum(term.seconds))
    del seconds["launch"]
    return max(seconds, key=lambda bound: seconds[bound])


def _fitted_bound(step: StepCoefficients, load: OfferedLoad, role: str, batch: float) -> str:
    """Compare what a fitted step reads, weights and cache, with what grows with tokens."""
    if role == "prefill":
        n = float(load.computed_tokens.mean())
        compute = replace(step, base_s=0.0, stream_s=0.0).step_s(n, n * n / 2, 0, 0)
        return "compute" if compute > step.stream_s else "memory bandwidth"
    read = max(step.stream_s, step.per_context_token_s * batch * load.context[0])
    return "compute" if step.per_sequence_s * batch > read else "memory bandwidth"
