"""One scenario answered: its plan, or why there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan import Plan
from sizing.planner.proposal import propose
from sizing.planner.search import Infeasible, search
from sizing.planner.studies.cost import Running, running

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.plan import Inputs

OBJECTIVES = ("gpus", "usd", "watts")
"""What answers may be ranked by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyAnswer:
    """
    One row of a comparison: a scenario under a name, and its plan or the reason for none.

    Attributes:
        refused: what is wrong with the scenario, where it cannot be planned at all.
    """

    label: str
    plan: Plan | None = None
    infeasible: Infeasible | None = None
    refused: str | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the search was stopped: the plan is the best so far."""
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
    What planners compare.

    Attributes:
        layout: pools as `sizing predict` takes them.
        ttft_s: at the SLO's percentile.
        tpot_s: likewise.
        headroom_factor: times the load that the plan holds.
        binds: what breaks first beyond that.
        bound_by: what each pool spends its time on.
        confidence_fraction: chance that the SLO holds; `None`: it was not simulated.
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


def answered(inputs: Inputs, label: str, *, keep_refusals: bool = False) -> StudyAnswer:
    """
    Search a scenario.

    Args:
        inputs: of the scenario.
        label: of the answer.
        keep_refusals: whether a scenario that cannot be planned is an answer too.

    Raises:
        InputError: a scenario that cannot be planned.
        KeyboardInterrupt: stopped before anything was proven.
    """
    try:
        found = search(inputs)
        if not isinstance(found, Infeasible) and found.interrupted and not found.verdicts:
            raise KeyboardInterrupt("nothing proven so far")
        if isinstance(found, Infeasible):
            return StudyAnswer(label=label, infeasible=found)
        return StudyAnswer(label=label, plan=propose(inputs, found))
    except InputError as error:
        if not keep_refusals:
            raise
        return StudyAnswer(label=label, refused=str(error))


def figures(plan: Plan) -> Figures:
    """Read what planners compare off a plan."""
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
    """Write the pools as people do: 8xTP4 + 2xTP8."""
    return " + ".join(
        f"{pool.replicas}xTP{pool.tp}"
        + "".join(
            f"x{name}{degree}"
            for name, degree in (("PP", pool.pp), ("EP", pool.ep), ("DP", pool.dp))
            if degree > 1
        )
        + (" mixed" if pool.role == "mixed" else "")
        for pool in plan.pools
    )


def data(answer: StudyAnswer) -> dict[str, Any]:
    """Return one answer as `--json` prints it."""
    if answer.plan is not None:
        return {"label": answer.label, "feasible": True, **asdict(figures(answer.plan))}
    found: dict[str, Any] = {"label": answer.label, "feasible": False, "reason": answer.reason}
    if answer.infeasible is not None:
        found["infeasible"] = asdict(answer.infeasible)
    return found


def cheapest(answers: Iterable[StudyAnswer], by: str) -> StudyAnswer | None:
    """Return the feasible answer with the least of *by*, of `OBJECTIVES`; the first of equals."""
    best: tuple[float, StudyAnswer] | None = None
    for answer in answers:
        if answer.plan is None:
            continue
        found = figures(answer.plan)
        value = {
            "gpus": float(found.gpus),
            "usd": found.running.usd_per_hour,
            "watts": found.running.power_w,
        }[by]
        if value is not None and (best is None or value < best[0]):
            best = value, answer
    return best[1] if best else None
