"""Classes of requests on the same pools, or each on pools of its own: whichever is cheaper."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.plan import Plan
from sizing.planner.budget import beyond_budget
from sizing.planner.build_plan import NoPlan, plan
from sizing.planner.configuration import cost_of_plan
from sizing.planner.result import Infeasible

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.search import Told

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


def plan_classes(inputs: Inputs, *, told: Told | None = None) -> ClassPlans:
    """
    Plan the classes of a scenario on shared pools, and each on pools of its own.

    `search.class_pools` leaves one of both out. Without classes, or with one, there are only shared
    pools. Each plan of own pools is that of an ordinary scenario: the class's requests and limits.

    Args:
        told: is called with each configuration of shared pools that holds and is cheaper than
            those before.

    Raises:
        NoPlan: neither holds the SLO of every class.
        InputError: the scenario cannot be planned at all.
        KeyboardInterrupt: Ctrl-C, and nothing was found so far.
    """
    scenario = inputs.scenario
    classes, wanted = scenario.workload.classes, scenario.search.class_pools
    found = ClassPlans(shared=None)
    if wanted != "own" or len(classes) <= 1:
        shared = _planned(inputs, told)
        found = replace(found, shared=shared, interrupted=_stopped(shared))
    if wanted != "shared" and len(classes) > 1 and not found.interrupted:
        found = _with_own(inputs, found)
    if not found.chosen:
        raise NoPlan(_neither(found))
    return found


def _with_own(inputs: Inputs, found: ClassPlans) -> ClassPlans:
    """Add the plans of own pools; none of them where Ctrl-C leaves a class without a plan."""
    own: dict[str, Planned] = {}
    try:
        for name, each in own_inputs(inputs).items():
            own[name] = _searched_to_the_end(each)
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


def _searched_to_the_end(inputs: Inputs) -> Planned:
    found = _planned(inputs)
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


def _planned(inputs: Inputs, told: Told | None = None) -> Planned:
    try:
        return plan(inputs, told=told)
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
