"""A plan: the configuration that a search found, with its prediction, cost and provenance."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from minicluster.plan import (
    Confidence,
    Deployable,
    Deployment,
    EndpointLoad,
    Plan,
    Provenance,
)
from minicluster.plan.document import leave_out_unset
from minicluster.specs.workload import RATE_TOLERANCE
from sizing.catalog.endpoint import endpoint_cost
from sizing.planner.budget import search_within_budgets
from sizing.planner.configuration import with_load
from sizing.planner.deployment import deployment, spare_replicas
from sizing.planner.error_model import validation
from sizing.planner.layout import profile_rule
from sizing.planner.predict import headroom, prediction_of
from sizing.planner.result import Infeasible
from sizing.planner.simulated_check import Simulations
from sizing.planner.users import covering_rates

if TYPE_CHECKING:
    from minicluster.plan import Inputs, Prediction
    from minicluster.specs.workload import WorkloadSpec
    from sizing.planner.result import Found
    from sizing.planner.search import Told
    from sizing.simulation.outcome import Outcome


class NoPlan(NegativeAnswer):
    """
    No configuration holds the SLO within the budget.

    Attributes:
        infeasible: why, the nearest miss, and what to change.
    """

    def __init__(self, infeasible: Infeasible) -> None:
        super().__init__(str(infeasible))
        self.infeasible = infeasible


def plan(inputs: Inputs, *, told: Told | None = None) -> Plan:
    """
    Find the cheapest configuration that holds the SLO: by default the fewest GPUs.

    Latencies of the plan are in seconds, and hold at the SLO's percentile with the scenario's
    `search.confidence_fraction`. After Ctrl-C it is the best so far, and `plan.confidence` says
    so. Users are planned at the rate that they send with the plan's latencies, which its
    workload states.

    Args:
        told: is called with each configuration that holds and is cheaper than those before.

    Raises:
        NoPlan: nothing holds the SLO.
        InputError: the scenario cannot be planned at all.
        KeyboardInterrupt: Ctrl-C, and nothing was found so far, or the rate of users was not.
    """
    load = inputs.scenario.workload
    if load.has_users:
        inputs, found = covering_rates(load, partial(_at_rates, inputs, told))
    else:
        found = search_within_budgets(inputs, told=told)
    if isinstance(found, Infeasible):
        raise NoPlan(found)
    return build_plan(inputs, found)


def _at_rates(
    inputs: Inputs, told: Told | None, load: WorkloadSpec
) -> tuple[tuple[Inputs, Found | Infeasible], Prediction | None]:
    """Search at some rates of the users; return what was found, and its prediction."""
    at = with_load(inputs, load)
    found = search_within_budgets(at, told=told)
    if isinstance(found, Infeasible):
        least = inputs.scenario.workload.requests_per_s
        if load.requests_per_s <= least * (1 + RATE_TOLERANCE):
            raise NoPlan(found)
        return (at, found), None
    if found.interrupted:
        raise KeyboardInterrupt("the rate that the users send was not found")
    return (at, found), prediction_of(found.models, found.configuration, _predicted(found))


def _predicted(found: Found) -> Outcome:
    return found.predicted or Simulations(found.models).predicted(found.configuration)


def at_planned_rate(inputs: Inputs) -> Inputs:
    """
    Return a scenario of users as one of the rate that a plan finds for them, others as they are.

    Raises:
        NoPlan, InputError, KeyboardInterrupt: as `plan`.
    """
    if not inputs.scenario.workload.has_users:
        return inputs
    load = plan(inputs).workload
    return with_load(inputs, load.at_rate(load.requests_per_s))


def build_plan(inputs: Inputs, found: Found) -> Plan:
    """
    Write a search's configuration as a plan; equal inputs give an equal plan.

    Prediction and headroom are read off simulations.
    """
    engine, chosen, models = inputs.engine, found.configuration, found.models
    prediction = prediction_of(models, chosen, _predicted(found))
    room = headroom(models, chosen, prediction.capacity_requests_per_s)
    runs = deployment(inputs, chosen, spares=spare_replicas(inputs, chosen))
    raw = asdict(inputs)
    tables = raw["scenario"]
    for table in (tables["engine"], tables["workload"], *tables["workload"]["classes"]):
        leave_out_unset(table)
    del raw["engine"]["lora"]  # it follows from these
    text = json.dumps(raw, sort_keys=True, allow_nan=False)
    inputs_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Plan(
        engine=runs.engine,
        step_model=models.load(chosen).step_model,
        inputs=inputs,
        pools=runs.pools,
        routing=runs.routing,
        prediction=prediction,
        headroom=room,
        validated_on=validation(inputs, split=chosen.layout.prefill is not None),
        deployable=Deployable(
            profile=f"{engine.name}-{engine.version}-{engine.connector}",
            rule_broken=profile_rule(inputs, chosen.layout),
        ),
        provenance=Provenance(version=version("minicluster"), inputs_hash=inputs_hash),
        confidence=_confidence(inputs, found),
        endpoint=_endpoint(inputs, prediction, runs),
    )


def _endpoint(inputs: Inputs, prediction: Prediction, runs: Deployment) -> EndpointLoad:
    """Return what stands in front of the engines; pools with spares have a spare process, too."""
    rate = inputs.scenario.workload.requests_per_s
    return endpoint_cost().load(
        requests_per_s=rate,
        output_tokens_per_s=prediction.output_tokens_per_s,
        streams=rate * prediction.e2e.mean_s,
        spare=any(pool.spare_replicas for pool in runs.pools),
    )


def _confidence(inputs: Inputs, found: Found) -> Confidence | None:
    """Return the factors it was simulated under; `None` for a calibration, which has no rows."""
    if inputs.calibration is not None and not found.interrupted:
        return None
    tightest: dict[str, float] = {}
    for check in (each.check for each in found.verdicts):
        if check is not None:
            tightest[check.name] = max(check.seconds, tightest.get(check.name, 0.0))
    return Confidence(
        fraction=inputs.scenario.search.confidence_fraction if found.verdicts else 0.0,
        prefill_factor=found.errors.prefill,
        decode_factor=found.errors.decode,
        ttft_factor=found.errors.ttft,
        tpot_factor=found.errors.tpot,
        requests=sum(each.requests for each in found.verdicts),
        # The run that the prediction is read from has a seed of its own.
        seeds=len(found.verdicts) + 1 if found.verdicts else 0,
        tightest=tightest,
        gpus_at={f"{share:g}": gpus for share, gpus in found.gpus_by_confidence.items()},
        other_pools=found.other,
        interrupted=found.interrupted,
    )
