"""The result of one scenario: its plan, or why there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan import Plan
from sizing.planner.build_plan import NoPlan, plan
from sizing.planner.result import Infeasible
from sizing.planner.studies.cost import Running, running

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.plan import Inputs

OBJECTIVES = ("gpus", "usd", "watts")
"""Quantities that results may be ranked by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """
    One row of a comparison: a scenario with its plan, or the reason why there is none.

    Attributes:
        refused: the error in the scenario, where it cannot be planned at all.
    """

    label: str
    plan: Plan | None = None
    infeasible: Infeasible | None = None
    refused: str | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the search was stopped, so that the plan is the best so far."""
        sure = None if self.plan is None else self.plan.confidence
        return sure is not None and sure.interrupted

    @property
    def reason(self) -> str:
        """Why there is no plan; empty where there is one."""
        if self.infeasible is not None:
            return f"{self.infeasible.reason}; missed by {self.infeasible.missed_by}"
        return self.refused or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """
    The figures of a plan that comparisons show.

    Attributes:
        layout: pools as `sizing predict` takes them.
        ttft_s: at the SLO's percentile.
        tpot_s: at the SLO's percentile.
        headroom_factor: the largest multiple of the load at which the SLO holds.
        binds: the limit that is missed first above that load.
        bound_by: the bottleneck of each pool.
        confidence_fraction: chance that the SLO holds; `None` where it was not simulated.
    """

    gpus: int
    nodes: int
    layout: str
    ttft_s: float
    tpot_s: float
    headroom_factor: float
    binds: str
    bound_by: dict[str, str]
    confidence_fraction: float | None
    running: Running


def plan_scenario(inputs: Inputs, label: str, *, keep_refusals: bool = False) -> StudyResult:
    """
    Plan a scenario.

    Args:
        keep_refusals: whether a scenario that cannot be planned is a result too.

    Raises:
        InputError: a scenario that cannot be planned.
        KeyboardInterrupt: stopped before anything was proven.
    """
    try:
        result = StudyResult(label=label, plan=plan(inputs))
    except NoPlan as none:
        return StudyResult(label=label, infeasible=none.infeasible)
    except InputError as error:
        if not keep_refusals:
            raise
        return StudyResult(label=label, refused=str(error))
    if result.plan and result.plan.confidence and result.plan.confidence.unverified:
        raise KeyboardInterrupt("no verified plan so far")
    return result


def figures(plan: Plan) -> Figures:
    """Return the figures of a plan."""
    statistic = plan.slo.percentile
    prediction = plan.prediction
    return Figures(
        gpus=plan.cost.gpus,
        nodes=plan.cost.nodes,
        layout=layout_of(plan),
        ttft_s=prediction.ttft.at(statistic),
        tpot_s=prediction.tpot.at(statistic),
        headroom_factor=plan.headroom.load_factor,
        binds=plan.headroom.binds,
        bound_by=prediction.bottleneck,
        confidence_fraction=None if plan.confidence is None else plan.confidence.fraction,
        running=running(plan),
    )


def layout_of(plan: Plan) -> str:
    """Write the pools in short: `8xTP4 + 2xTP8`."""
    return " + ".join(
        f"{pool.replicas}x{pool.slicing}" + (" mixed" if pool.role == "mixed" else "")
        for pool in plan.pools
    )


def result_json(result: StudyResult) -> dict[str, Any]:
    """Return one result as `--json` prints it."""
    if result.plan is not None:
        return {"label": result.label, "feasible": True, **asdict(figures(result.plan))}
    found: dict[str, Any] = {"label": result.label, "feasible": False, "reason": result.reason}
    if result.infeasible is not None:
        found["infeasible"] = asdict(result.infeasible)
    return found


def cheapest(results: Iterable[StudyResult], by: str) -> StudyResult | None:
    """Return the feasible result with the least of *by*, of `OBJECTIVES`; the first of equals."""
    known = []
    for result in results:
        if result.plan is not None:
            cost = running(result.plan)
            gpus = float(result.plan.cost.gpus)
            value = {"gpus": gpus, "usd": cost.usd_per_hour, "watts": cost.power_w}[by]
            known += [] if value is None else [(value, result)]
    return min(known, key=lambda each: each[0])[1] if known else None
