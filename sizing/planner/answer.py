"""What a search answers: a configuration with its proof, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minicluster.units import seconds
from sizing.planner.candidate import Candidate
from sizing.planner.evidence import StepErrors
from sizing.planner.slo import Check
from sizing.planner.spares import spare_replicas
from sizing.queueing.forecast import TandemForecast

if TYPE_CHECKING:
    from minicluster.plan import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """
    What a simulation says of a configuration.

    Attributes:
        holds: whether every limit surely holds.
        blame: role of the pool that a missed limit asks to grow; empty where all hold.
        requests: simulated; none where closed forms say no to long queues.
        exhausted: whether the search had no requests left to simulate.
        check: the limit that is used up most, as simulated.
    """

    holds: bool
    blame: str
    requests: int
    check: Check | None = None
    exhausted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """
    The cheapest configuration that holds the SLO.

    Attributes:
        forecast: by closed forms; `None` where pools are mixed.
        errors: factors on the step times under which it was simulated.
        verdicts: one a seed; empty where it was not simulated.
        gpus_at: GPUs needed at other confidences.
        other: the cheapest of the other kind (split or mixed), and why it is not the plan.
        interrupted: the search was stopped: the best so far.
    """

    candidate: Candidate
    forecast: TandemForecast | None
    errors: StepErrors = field(default_factory=StepErrors)
    verdicts: tuple[PlanVerdict, ...] = ()
    gpus_at: dict[float, int] = field(default_factory=dict)
    other: str = ""
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """
    No configuration holds the SLO within the budget.

    Attributes:
        reason: one sentence.
        binds: `capacity` (memory), `SLO floor`, `SLO` or `max_gpus`.
        nearest: configuration that comes nearest, as `sizing predict` takes it; `None` if the
            model fits nowhere.
        nearest_gpus: how many GPUs it takes.
        missed_by: what it misses, and by how much.
        way_out: what would help.
    """

    reason: str
    binds: str
    nearest: str | None
    nearest_gpus: int | None
    missed_by: str
    way_out: str


def fits_nowhere(inputs: Inputs, rules: list[str]) -> Infeasible:
    """No layout leaves room for the KV cache."""
    kinds = " or ".join(inputs.kinds)
    return Infeasible(
        reason=f"{inputs.model.id} fits on no allowed layout of {kinds}: {rules[-1]}",
        binds="capacity",
        nearest=None,
        nearest_gpus=None,
        missed_by=rules[-1],
        way_out="a GPU with more memory, quantised weights (model.weight_dtype), a shorter context,"
        ' a larger HB domain, or search.layouts = "any"',
    )


def below_floor(alone: list[tuple[Check, Candidate]], inputs: Inputs) -> Infeasible:
    """No number of GPUs holds the SLO: say what a single request takes on an idle system."""
    check, start = min(alone, key=lambda pair: (pair[0].ratio, pair[1].gpus, pair[1].layout.order))
    kinds = " or ".join(inputs.kinds)
    return Infeasible(
        reason=f"no number of {kinds} holds the SLO: {check.name} of requests that meet"
        f" no other is {seconds(check.seconds)} already",
        binds="SLO floor",
        nearest=str(start),
        nearest_gpus=start.gpus,
        missed_by=f"{check.name} {seconds(check.seconds)}, limit {seconds(check.limit_s)}"
        f" ({check.ratio:.2f} times)",
        way_out=f"a limit well above {seconds(check.seconds)}, a faster GPU, a smaller model or"
        " fewer bytes (model.weight_dtype), shorter prompts",
    )


def too_many(alone: list[tuple[Check, Candidate]], inputs: Inputs, *, most_gpus: int) -> Infeasible:
    """A lone request holds the SLO, but no pool that the search looks at does under the load."""
    check, start = min(alone, key=lambda pair: (pair[0].ratio, pair[1].gpus, pair[1].layout.order))
    return Infeasible(
        reason=f"no pools of up to {most_gpus} GPUs hold the SLO under"
        f" {inputs.scenario.workload.requests_per_s:g} requests/s",
        binds="SLO",
        nearest=str(start),
        nearest_gpus=start.gpus,
        missed_by=f"nothing on an idle system ({check.name} {seconds(check.seconds)} of"
        f" {seconds(check.limit_s)}), too much under load",
        way_out="a looser SLO, or a lower workload.requests_per_s",
    )


def over_budget(best: Candidate, inputs: Inputs, *, needed: int) -> Infeasible:
    """The SLO can be held, with more GPUs than there are."""
    budget = inputs.cluster.max_gpus
    spares = {role: count for role, count in spare_replicas(inputs, best).items() if count}
    each = " and ".join(f"{count} {role}" for role, count in spares.items())
    with_spares = f" with {each} spare replicas" if spares else ""
    return Infeasible(
        reason=f"the SLO needs {needed} {' and '.join(best.gpus_by_kind)}{with_spares},"
        f" cluster.max_gpus is {budget}",
        binds="max_gpus",
        nearest=str(best),
        nearest_gpus=needed,
        missed_by=f"{needed - budget} GPUs",
        way_out=f"cluster.max_gpus = {needed}, a looser SLO, or a lower rate",
    )


def beyond_capacity(lowest: Candidate, inputs: Inputs) -> Infeasible:
    """The load takes more GPUs than there are before anybody waits."""
    budget, rate = inputs.cluster.max_gpus, inputs.scenario.workload.requests_per_s
    share = inputs.scenario.search.max_utilisation_fraction
    return Infeasible(
        reason=f"{rate:g} requests/s take at least {lowest.gpus}"
        f" {' and '.join(lowest.gpus_by_kind)} that are never more than {share:.0%} busy,"
        f" cluster.max_gpus is {budget}",
        binds="max_gpus",
        nearest=str(lowest),
        nearest_gpus=lowest.gpus,
        missed_by=f"at least {lowest.gpus - budget} GPUs",
        way_out="a lower workload.requests_per_s, shorter prompts or answers, or more GPUs"
        " (cluster.max_gpus)",
    )


def far_over_budget(sized: Candidate, inputs: Inputs) -> Infeasible:
    """By closed forms the SLO takes so many GPUs more than there are that none is simulated."""
    budget = inputs.cluster.max_gpus
    return Infeasible(
        reason=f"the SLO needs about {sized.gpus} {' and '.join(sized.gpus_by_kind)} (by closed"
        f" forms), cluster.max_gpus is {budget}",
        binds="max_gpus",
        nearest=str(sized),
        nearest_gpus=sized.gpus,
        missed_by=f"about {sized.gpus - budget} GPUs",
        way_out=f"cluster.max_gpus = {sized.gpus} or so, a looser SLO, or a lower rate",
    )
