"""Plans: what a search found within every budget, with its prediction, cost and provenance."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from math import ceil
from typing import TYPE_CHECKING

from minicluster.errors import InputError, NegativeAnswer
from minicluster.pages.shown import Shown
from minicluster.plan import (
    Confidence,
    Deployable,
    Deployment,
    EndpointLoad,
    Headroom,
    Plan,
    Provenance,
)
from minicluster.plan.document import LATER, leave_out_unset
from minicluster.specs.scenario import EngineChoice
from minicluster.specs.workload import RATE_TOLERANCE, WorkloadSpec
from sizing.catalog.endpoint import endpoint_cost
from sizing.planner.configuration import (
    PRICED,
    cost_of_plan,
    how_to_price,
    with_load,
    with_search,
)
from sizing.planner.deployment import deployment, gpus_with_spares, spare_replicas
from sizing.planner.edge import covering_rates
from sizing.planner.error_model import validation
from sizing.planner.growth import edge
from sizing.planner.layout import profile_rule
from sizing.planner.predict import prediction_of
from sizing.planner.result import Infeasible
from sizing.planner.search import search
from sizing.planner.simulated_check import Simulations
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from minicluster.plan import Inputs, Prediction
    from sizing.planner.search import Told
    from sizing.planner.simulated_check import Found
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


def plan(inputs: Inputs, *, told: Told | None = None, workers: Workers = NO_WORKERS) -> Plan:
    """
    Find the cheapest configuration that holds the SLO: by default the fewest GPUs.

    Latencies of the plan are in seconds, and hold at the SLO's percentile with the scenario's
    `search.confidence_fraction`. After Ctrl-C it is the best so far, and `plan.confidence` says
    so. Users are planned at the rate that they send with the plan's latencies, which its
    workload states.

    Args:
        told: is called with each configuration that holds and is cheaper than those before.
        workers: processes beside this one; they do not change the plan.

    Raises:
        NoPlan: nothing holds the SLO.
        InputError: the scenario cannot be planned at all.
        KeyboardInterrupt: Ctrl-C, and nothing was found so far, or the rate of users was not.
    """
    load = inputs.scenario.workload
    if load.has_users:
        inputs, found = covering_rates(load, partial(_at_rates, inputs, told, workers))
    else:
        found = search_within_budgets(inputs, told=told, workers=workers)
    if isinstance(found, Infeasible):
        raise NoPlan(found)
    return build_plan(inputs, found, workers)


def _at_rates(
    inputs: Inputs, told: Told | None, workers: Workers, load: WorkloadSpec
) -> tuple[tuple[Inputs, Found | Infeasible], Prediction | None]:
    """Search at some rates of the users; return what was found, and its prediction."""
    at = with_load(inputs, load)
    found = search_within_budgets(at, told=told, workers=workers)
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


def build_plan(inputs: Inputs, found: Found, workers: Workers = NO_WORKERS) -> Plan:
    """
    Write a search's configuration as a plan; equal inputs give an equal plan.

    Prediction and headroom are read off simulations, headroom under the errors of the confidence.
    """
    engine, chosen, models = inputs.engine, found.configuration, found.models
    prediction = prediction_of(models, chosen, _predicted(found))
    rate = inputs.scenario.workload.requests_per_s
    growth = found.growth or edge(
        Simulations(models, workers=workers), found.errors, chosen, above=rate
    )
    runs = deployment(inputs, chosen, spares=spare_replicas(inputs, chosen))
    raw = asdict(inputs)
    tables = raw["scenario"]
    leave_out_unset(tables["engine"], EngineChoice)
    for table in (tables["workload"], *tables["workload"]["classes"]):
        leave_out_unset(table, WorkloadSpec, LATER)
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
        headroom=Headroom(load_factor=growth.rate / rate, binds=growth.binds),
        validated_on=validation(inputs, split=chosen.layout.prefill is not None),
        deployable=Deployable(
            profile=engine.label,
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
        other_pools=found.other,
        interrupted=found.interrupted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """
    One budget of a scenario.

    Attributes:
        key: of `[cost]`.
        most: that a plan may take.
        objective: of a search for the plan that takes least of it.
        taken: by GPUs, counts by kind, in the unit of the key.
        written: writes such an amount.
    """

    key: str
    most: float
    objective: str
    taken: Callable[[Mapping[str, int]], float | None]
    written: Callable[[float], str]


def _usd(amount: float) -> str:
    return f"${amount:,.2f}/h"


def _kilowatts(amount: float) -> str:
    return f"{amount / 1e3:,.1f} kW"


def budgets(inputs: Inputs) -> list[Budget]:
    """
    Return the budgets of a scenario.

    Raises:
        InputError: one in dollars or watts of GPUs that have no price or no power.
    """
    asked = inputs.scenario.cost
    found = [
        Budget(key=key, most=most, objective=objective, taken=taken, written=written)
        for key, most, objective, taken, written in (
            ("max_usd_per_hour", asked.max_usd_per_hour, "usd", inputs.usd_per_hour, _usd),
            ("max_power_w", asked.max_power_w, "watts", inputs.power_w, _kilowatts),
        )
        if most is not None
    ]
    for each in found:
        for kind in inputs.kinds:
            if each.taken({kind: 1}) is None:
                expected = f"beside it a {PRICED[each.objective]} of every GPU ({kind})"
                way_out = how_to_price(each.objective, kind)
                raise InputError(f"cost.{each.key}", each.most, expected, way_out)
    return found


def search_within_budgets(
    inputs: Inputs, *, told: Told | None = None, workers: Workers = NO_WORKERS
) -> Found | Infeasible:
    """
    Find the cheapest configuration that holds the SLO within every budget.

    Of one kind of GPU the fewest GPUs take the fewest dollars and watts, so that what exceeds a
    budget says that nothing holds within it. Of several kinds, the plan that takes least of what
    was exceeded is looked for then.

    Raises:
        InputError: as `search`, or GPUs that have no price or no power.
        KeyboardInterrupt: stopped before anything within the budgets was found.
    """
    known = budgets(inputs)
    found = search(inputs, told=told, workers=workers)
    over = _exceeded(inputs, known, found)
    own = inputs.scenario.search.objective
    if over is None or isinstance(found, Infeasible):
        return found
    if not found.interrupted and len(inputs.kinds) > 1 and over.objective != own:
        found = search(with_search(inputs, objective=over.objective), workers=workers)
        over = _exceeded(inputs, known, found)
    if over is None or isinstance(found, Infeasible):
        return found
    gpus = gpus_with_spares(inputs, found.configuration)
    missed = _over_budget(over, gpus, str(found.configuration))
    if found.interrupted:
        raise KeyboardInterrupt(f"nothing within cost.{over.key} so far: {missed.reason}")
    return missed


def beyond_budget(inputs: Inputs, gpus: Mapping[str, int]) -> Infeasible | None:
    """Return that GPUs, counts by kind, which hold the SLO take too much; `None`: they do not."""
    over = _first_exceeded(budgets(inputs), gpus)
    return None if over is None else _over_budget(over, gpus, None)


def _exceeded(inputs: Inputs, known: list[Budget], found: Found | Infeasible) -> Budget | None:
    """Return the first budget that a configuration exceeds; `None`: it exceeds none."""
    if isinstance(found, Infeasible):
        return None
    return _first_exceeded(known, gpus_with_spares(inputs, found.configuration))


def _first_exceeded(known: list[Budget], gpus: Mapping[str, int]) -> Budget | None:
    return next((each for each in known if (each.taken(gpus) or 0.0) > each.most), None)


def _over_budget(budget: Budget, gpus: Mapping[str, int], nearest: str | None) -> Infeasible:
    needed, taken = sum(gpus.values()), budget.taken(gpus) or 0.0
    enough = ceil(round(taken * 100, 6)) / 100  # with at most two decimals
    return Infeasible(
        reason=f"the SLO holds with {needed} {' and '.join(gpus)} at {budget.written(taken)};"
        f" cost.{budget.key} is {budget.written(budget.most)}",
        binds=budget.key,
        nearest=nearest,
        nearest_gpus=needed,
        missed_by=budget.written(taken - budget.most),
        way_out=f"cost.{budget.key} = {enough:g}, a looser SLO, a lower rate, or another GPU",
    )


Planned = Plan | Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPlans(Shown):
    """
    Plans of a scenario, with classes of requests or without.

    Attributes:
        shared: of all requests on the same pools; `None`: not asked for.
        own: of each class on pools of its own, by its name; up to the first that has none; empty:
            not asked for.
        beyond: why pools of their own take too much together, though each alone does not.
        interrupted: whether a search was stopped: the best plan so far, and no pools of their own.
    """

    shared: Planned | None
    own: dict[str, Planned] = field(default_factory=dict)
    beyond: Infeasible | None = None
    interrupted: bool = False

    @property
    def own_plans(self) -> dict[str, Plan]:
        """The plans of pools of their own; empty where a class has none, or all are too many."""
        found = {name: each for name, each in self.own.items() if isinstance(each, Plan)}
        return found if len(found) == len(self.own) and self.beyond is None else {}

    @property
    def chosen(self) -> dict[str, Plan]:
        """The cheaper plans by class; that of shared pools, which wins a tie, by an empty name."""
        own, shared = self.own_plans, self.shared
        if not isinstance(shared, Plan):
            return own
        own_cost = sum(map(cost_of_plan, own.values()))
        return own if own and own_cost < cost_of_plan(shared) else {"": shared}


def plan_classes(
    inputs: Inputs, *, told: Told | None = None, workers: Workers = NO_WORKERS
) -> ClassPlans:
    """
    Plan the classes of a scenario on shared pools, and each on pools of its own.

    `search.class_pools` leaves one of both out. Without classes, or with one, there are only shared
    pools. Each plan of own pools is that of an ordinary scenario: the class's requests and limits.

    Args:
        told: is called with each configuration of shared pools that holds and is cheaper than
            those before.
        workers: processes beside this one; they do not change the plans.

    Raises:
        NoPlan: neither holds the SLO of every class.
        InputError: the scenario cannot be planned at all.
        KeyboardInterrupt: Ctrl-C, and nothing was found so far.
    """
    scenario = inputs.scenario
    classes, wanted = scenario.workload.classes, scenario.search.class_pools
    found = ClassPlans(shared=None)
    if wanted != "own" or len(classes) <= 1:
        shared = _planned(inputs, workers, told)
        found = replace(found, shared=shared, interrupted=_stopped(shared))
    if wanted != "shared" and len(classes) > 1 and not found.interrupted:
        found = _with_own(inputs, found, workers)
    if not found.chosen:
        raise NoPlan(_neither(found))
    return found


def _with_own(inputs: Inputs, found: ClassPlans, workers: Workers) -> ClassPlans:
    """Add the plans of own pools; none of them where Ctrl-C leaves a class without a plan."""
    own: dict[str, Planned] = {}
    try:
        for name, each in own_inputs(inputs).items():
            own[name] = _searched_to_the_end(each, workers)
            if isinstance(own[name], Infeasible):
                break
    except KeyboardInterrupt:
        if not isinstance(found.shared, Plan):
            raise
        return replace(found, interrupted=True)
    found = replace(found, own=own)
    return replace(found, beyond=_beyond(inputs, found.own_plans))


def _beyond(inputs: Inputs, own: dict[str, Plan]) -> Infeasible | None:
    """Return why plans take too much together; `None`: they do not."""
    gpus = sum((each.gpus_by_kind for each in own.values()), Counter())
    needed, most = gpus.total(), inputs.cluster.max_gpus
    if needed <= most:
        over = beyond_budget(inputs, gpus)
        return None if over is None else replace(over, reason=f"own pools together: {over.reason}")
    return Infeasible(
        reason=f"own pools need {needed} GPUs together, cluster.max_gpus is {most}",
        binds="max_gpus",
        nearest=None,
        nearest_gpus=needed,
        missed_by=f"{needed - most} GPUs",
        way_out=f"cluster.max_gpus = {needed}, looser limits, or a lower rate",
    )


def _searched_to_the_end(inputs: Inputs, workers: Workers) -> Planned:
    found = _planned(inputs, workers)
    if _stopped(found):
        raise KeyboardInterrupt("not every class was planned on pools of its own")
    return found


def _stopped(found: Planned) -> bool:
    sure = found.confidence if isinstance(found, Plan) else None
    return sure is not None and sure.interrupted


def own_inputs(inputs: Inputs) -> dict[str, Inputs]:
    """Return the scenario of each class alone, by its name."""
    scenario = inputs.scenario
    search = replace(scenario.search, class_pools="any")
    parts = zip(scenario.promises.items(), scenario.workload.apart, strict=True)
    return {
        name: replace(inputs, scenario=replace(scenario, workload=load, slo=slo, search=search))
        for (name, slo), load in parts
    }


def sharing_classes(inputs: Inputs, study: str) -> int:
    """
    Return how many classes of requests share the pools of a study that knows no own ones.

    Raises:
        InputError: a scenario that asks for own pools.
    """
    search, classes = inputs.scenario.search, len(inputs.scenario.workload.classes)
    if classes > 1 and search.class_pools == "own":
        raise InputError(
            "search.class_pools",
            search.class_pools,
            f'"any" or "shared": {study} looks at shared pools only',
            "a scenario for each class",
        )
    return classes if classes > 1 else 0


def _planned(inputs: Inputs, workers: Workers, told: Told | None = None) -> Planned:
    try:
        return plan(inputs, told=told, workers=workers)
    except NoPlan as none:
        return none.infeasible


def _neither(found: ClassPlans) -> Infeasible:
    """Return why there is no plan: of shared pools, and of the class that has none of its own."""
    if isinstance(found.shared, Infeasible) and not found.own:
        return found.shared
    reasons = {"shared pools": found.shared} if found.shared else {}
    reasons |= {f"own pools of {name}": each for name, each in found.own.items()}
    none = {of: each for of, each in reasons.items() if isinstance(each, Infeasible)}
    said = [f"{of}: {each.reason}" for of, each in none.items()]
    if found.beyond is not None:
        none["own pools together"] = found.beyond
        said.append(found.beyond.reason)
    return replace(next(iter(none.values())), reason="; ".join(said))
