"""One given configuration, predicted as it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import Pool, Prediction, Validation
from minicluster.specs.slicing import Slicing
from minicluster.units import seconds
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.step import beyond_hb_domain_s
from sizing.planner.aggregated import mixed_capacity_requests_per_s, simulated_prediction
from sizing.planner.candidate import smallest
from sizing.planner.deployment import pools
from sizing.planner.evidence import validation
from sizing.planner.layout import (
    Layout,
    LayoutShape,
    check_degree,
    memory_rule,
    pairing_rule,
    profile_rule,
)
from sizing.planner.proposal import prediction
from sizing.planner.starts import largest_batch
from sizing.planner.step_models import StepModels, machine
from sizing.queueing.forecast import capacity_requests_per_s, forecast

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """
    The prediction for pools that were named.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Replicas of a pool and what one of them is; without a GPU the cluster's own."""

    replicas: int
    slicing: Slicing
    gpu: str | None = None


def given(
    inputs: Inputs,
    *,
    prefill: Size | None = None,
    decode: Size | None = None,
    mixed: Size | None = None,
) -> Given:
    """
    Predict pools of given replicas and slicing: prefill and decode, or one that does both.

    Raises:
        InputError: a TP that the model, the connector, the memory or the calibration rules out;
            pools that make no deployment.
        NegativeAnswer: the load saturates a pool, so that no latency exists.
    """
    if mixed is not None and prefill is None and decode is None:
        return _given_mixed(inputs, mixed)
    if prefill is None or decode is None or mixed is not None:
        raise InputError(
            "--prefill, --decode, --mixed", None, "--prefill and --decode, or --mixed alone"
        )
    layout = Layout(prefill=_shape(inputs, prefill), decode=_shape(inputs, decode))
    _check(inputs, layout)
    start = smallest(inputs, layout, StepModels(inputs))
    chosen = start.limited(max(1, largest_batch(start, inputs.scenario.slo)))
    chosen = chosen.sized(prefill.replicas, decode.replicas)
    found = forecast(chosen.tandem)
    if found is None:
        raise _saturated(inputs, chosen, capacity_requests_per_s(chosen.tandem))
    answer = prediction(inputs, chosen, found)
    return _answered(inputs, chosen, answer, found.mean_batch)


def _given_mixed(inputs: Inputs, size: Size) -> Given:
    """Simulate a pool that does both."""
    if inputs.calibration is not None or inputs.gpu.kind == "cpu":
        raise InputError(
            "--mixed",
            str(size.slicing),
            "--prefill and --decode: a calibration times the steps of split pools",
        )
    layout = Layout(prefill=None, decode=_shape(inputs, size))
    _check(inputs, layout)
    start = smallest(inputs, layout, StepModels(inputs))
    if not start.slots:
        raise InputError("--mixed", str(layout.decode), "a layout that a sequence of the load fits")
    chosen = start.sized(0, size.replicas)
    capacity = mixed_capacity_requests_per_s(chosen)
    load = inputs.scenario.workload
    if load.requests_per_s >= capacity:
        raise _saturated(inputs, chosen, capacity)
    answer = simulated_prediction(inputs, chosen)
    stay_s = float(chosen.tandem.output_tokens.mean()) * answer.tpot.mean_s
    batch = load.requests_per_s * stay_s / chosen.tandem.decode.replicas
    return _answered(inputs, chosen, answer, batch)


def _saturated(inputs: Inputs, chosen: Candidate, capacity: float) -> NegativeAnswer:
    """Say that queues grow without end."""
    return NegativeAnswer(
        f"{inputs.scenario.workload.requests_per_s:g} requests/s saturate {chosen}: queues grow"
        f" without end above {capacity:.3g} requests/s; add replicas or lower"
        " workload.requests_per_s"
    )


def _answered(inputs: Inputs, chosen: Candidate, answer: Prediction, batch: float) -> Given:
    """Compare with the SLO."""
    slo = inputs.scenario.slo
    missed = tuple(
        f"{name.upper()} {slo.percentile} {seconds(found_s)}, limit {seconds(limit_s)}"
        for name, limit_s in slo.limits_s.items()
        if (found_s := getattr(answer, name).at(slo.percentile)) > limit_s
    )
    return Given(
        pools=pools(inputs, chosen),
        prediction=answer,
        meets_slo=not missed,
        misses=missed,
        beyond_hb_domain_s=_beyond(inputs, chosen, batch),
        validated_on=validation(inputs, split=chosen.layout.prefill is not None),
    )


def _shape(inputs: Inputs, size: Size) -> LayoutShape:
    """Return what a replica is; its GPU must be one that the scenario allows."""
    gpu = size.gpu or inputs.gpu.name
    if gpu not in inputs.kinds:
        raise InputError(
            "--prefill, --decode, --mixed", gpu, "one of search.gpus: " + ", ".join(inputs.kinds)
        )
    return LayoutShape(slicing=size.slicing, gpu=gpu)


def _check(inputs: Inputs, layout: Layout) -> None:
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


def _beyond(inputs: Inputs, chosen: Candidate, batch: float) -> dict[str, float]:
    """What crossing the HB domain costs a step of each pool, where one crosses it."""
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
