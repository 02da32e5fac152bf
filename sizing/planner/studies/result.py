"""The result of one scenario: its plan, or why there is none."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from minicluster.errors import InputError
from minicluster.plan import Plan
from sizing.planner.plan import NoPlan, plan_classes
from sizing.planner.result import Infeasible
from sizing.planner.studies.cost import Running, running_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from minicluster.plan import Inputs
    from sizing.planner.predict import PoolPrediction
    from sizing.planner.studies.grid import GridCase
    from sizing.planner.workers import Workers

OBJECTIVES = ("gpus", "usd", "watts")
"""Quantities that results may be ranked by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """
    One row of a comparison: a scenario with its plan, or the reason why there is none.

    Attributes:
        plans: as `ClassPlans.chosen`: the plan of all requests by an empty name, or that of each
            class's own pools by the class; empty: there is none.
        refused: the error in the scenario, where it cannot be planned at all.
        interrupted: whether the search was stopped, so that the plan is the best so far.
    """

    label: str
    plans: dict[str, Plan] = field(default_factory=dict)
    infeasible: Infeasible | None = None
    refused: str | None = None
    interrupted: bool = False

    @property
    def reason(self) -> str:
        """Why there is no plan; empty where there is one."""
        if self.infeasible is not None:
            return f"{self.infeasible.reason}; missed by {self.infeasible.missed_by}"
        return self.refused or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """
    The figures of a plan that comparisons show; of classes on own pools, those of all together.

    Attributes:
        layout: pools in short.
        ttft_s: at the SLO's percentile; `None` for own pools, where each class has its own.
        tpot_s: likewise.
        headroom_factor: the largest multiple of the load at which the SLO holds.
        binds: the limit that is missed first above that load.
        bound_by: the bottleneck of each pool.
        confidence_fraction: chance that the SLO holds; `None` where it was not simulated.
    """

    gpus: int
    nodes: int
    layout: str
    ttft_s: float | None
    tpot_s: float | None
    headroom_factor: float
    binds: str
    bound_by: dict[str, str]
    confidence_fraction: float | None
    running: Running


def plan_scenario(inputs: Inputs, label: str, *, keep_refusals: bool = False) -> StudyResult:
    """
    Plan a scenario; classes of requests on shared pools or on own ones, whichever is cheaper.

    Args:
        keep_refusals: whether a scenario that cannot be planned is a result too.

    Raises:
        InputError: a scenario that cannot be planned.
        KeyboardInterrupt: stopped before anything was proven.
    """
    try:
        found = plan_classes(inputs)
    except NoPlan as none:
        return StudyResult(label=label, infeasible=none.infeasible)
    except InputError as error:
        if not keep_refusals:
            raise
        return StudyResult(label=label, refused=str(error))
    if any(each.confidence and each.confidence.unverified for each in found.chosen.values()):
        raise KeyboardInterrupt("no verified plan so far")
    return StudyResult(label=label, plans=found.chosen, interrupted=found.interrupted)


def plan_cases(cases: Sequence[GridCase], workers: Workers) -> Iterator[StudyResult]:
    """Plan every case, in order; one that cannot be planned is a result too."""
    return workers.map(_planned, cases)


def _planned(case: GridCase) -> StudyResult:
    if isinstance(case.scenario, InputError):
        return StudyResult(label=case.label, refused=str(case.scenario))
    return plan_scenario(case.scenario, case.label, keep_refusals=True)


def figures(plans: Mapping[str, Plan]) -> Figures:
    """Return the figures of plans by class: the one of all requests, or those of own pools."""
    (first, *others), all_pools = plans.values(), Counter[str]()
    for each in plans.values():
        all_pools += each.gpus_by_kind
    tokens_per_s = sum(each.prediction.output_tokens_per_s for each in plans.values())
    tightest = min(plans, key=lambda name: plans[name].headroom.load_factor)
    sure = [each.confidence.fraction for each in plans.values() if each.confidence is not None]
    at = first.slo.percentile
    return Figures(
        gpus=all_pools.total(),
        nodes=sum(each.cost.nodes for each in plans.values()),
        layout="; ".join(
            f"{name}: {layout_of(each)}".removeprefix(": ") for name, each in plans.items()
        ),
        ttft_s=None if others else first.prediction.ttft.at(at),
        tpot_s=None if others else first.prediction.tpot.at(at),
        headroom_factor=plans[tightest].headroom.load_factor,
        binds=f"{tightest} {plans[tightest].headroom.binds}".lstrip(),
        bound_by={
            f"{name} {role}".strip(): bound
            for name, each in plans.items()
            for role, bound in each.prediction.bottleneck.items()
        },
        confidence_fraction=min(sure, default=None),
        running=running_of(first.inputs, all_pools, tokens_per_s),
    )


def layout_of(plan: Plan | PoolPrediction) -> str:
    """Write the pools in short: `8xTP4 + 2xTP8`."""
    return " + ".join(
        f"{pool.replicas}x{pool.slicing}" + (" mixed" if pool.role == "mixed" else "")
        for pool in plan.pools
    )


def result_json(result: StudyResult) -> dict[str, Any]:
    """Return one result as `--json` prints it."""
    if result.plans:
        return {"label": result.label, "feasible": True, **asdict(figures(result.plans))}
    found: dict[str, Any] = {"label": result.label, "feasible": False, "reason": result.reason}
    if result.infeasible is not None:
        found["infeasible"] = asdict(result.infeasible)
    return found


def cheapest(results: Iterable[StudyResult], by: str) -> StudyResult | None:
    """Return the feasible result with the least of *by*; of equals that with most headroom."""
    ranked = _ranked(results, by)
    return ranked[0].result if ranked else None


def answer_line(results: Iterable[StudyResult], by: str) -> str:
    """Say which result has the least of *by*; ties are named, and what decides between them."""
    first, *others = _ranked(results, by)
    tied = [first, *(other for other in others if other.value == first.value)]
    gpus = f"{first.value:,.0f} GPU{'s' if first.value > 1 else ''}"
    value = {"gpus": gpus, "usd": f"{first.value:,.2f} $/h"}
    amount = value.get(by, f"{first.value / 1e3:,.1f} kW")
    if len(tied) == 1:
        return f"Least {by}: {first.result.label}, {amount}"
    names = " and ".join(f"{each.result.label} ({each.headroom:.2f})" for each in tied)
    same = len({f"{each.headroom:.2f}" for each in tied}) == 1
    answer = "a tie" if same else f"{first.result.label} by its headroom"
    return f"Least {by}: {answer}: {names} need {amount} each"


class _Ranked(NamedTuple):
    value: float
    headroom: float
    result: StudyResult


def _ranked(results: Iterable[StudyResult], by: str) -> list[_Ranked]:
    """Return the feasible results by *by*, of `OBJECTIVES`, and then by headroom."""
    ranked = []
    for result in results:
        if result.plans:
            found = figures(result.plans)
            cost = found.running
            value = {"gpus": found.gpus, "usd": cost.usd_per_hour, "watts": cost.power_w}[by]
            if value is not None:
                ranked.append(_Ranked(value, found.headroom_factor, result))
    return sorted(ranked, key=lambda each: (each.value, -each.headroom))
