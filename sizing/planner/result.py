"""The result of a search: a configuration with its verification, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.units import seconds
from sizing.planner.deployment import spare_replicas

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.configuration import Configuration
    from sizing.planner.error_model import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """
    No configuration holds the SLO within the budget.

    Attributes:
        binds: `capacity` (memory), `SLO floor`, `SLO`, or a budget: `max_gpus`,
            `max_usd_per_hour`, `max_power_w`.
        nearest: the nearest miss as options of `sizing predict`; `None` if the model fits no
            layout.
        nearest_gpus: GPUs of the nearest miss.
        missed_by: what the nearest miss exceeds, and by how much.
        way_out: changes to the scenario that may make it feasible.
    """

    reason: str
    binds: str
    nearest: str | None
    nearest_gpus: int | None
    missed_by: str
    way_out: str

    def __str__(self) -> str:
        """Say why there is no plan, its nearest miss, and what to change, a line each."""
        lines = [f"no plan: {self.reason}"]
        if self.nearest:
            near = f"nearest miss: {self.nearest} ({self.nearest_gpus} GPUs)"
            lines.append(f"{near}, missed by {self.missed_by}")
        return "\n".join([*lines, f"to change: {self.way_out}"])


def fits_nowhere(inputs: Inputs, rules: list[str]) -> Infeasible:
    """Return that no layout leaves room for the KV cache."""
    kinds = " or ".join(inputs.kinds)
    slots = "" if inputs.engine.lora is None else "fewer engine.max_loras, "
    return Infeasible(
        reason=f"{inputs.model.id} fits on no allowed layout of {kinds}: {rules[-1]}",
        binds="capacity",
        nearest=None,
        nearest_gpus=None,
        missed_by=rules[-1],
        way_out=f"{slots}a GPU with more memory, quantised weights (model.weight_dtype),"
        ' a shorter context, a larger HB domain, or search.layouts = "any"',
    )


def _nearest(unloaded: list[tuple[Check, Configuration]]) -> tuple[Check, Configuration]:
    return min(unloaded, key=lambda pair: (pair[0].ratio, pair[1].gpus, pair[1].layout.order))


def below_floor(unloaded: list[tuple[Check, Configuration]], inputs: Inputs) -> Infeasible:
    """Return that a single request on an idle system already misses the SLO."""
    check, nearest = _nearest(unloaded)
    kinds = " or ".join(inputs.kinds)
    return Infeasible(
        reason=f"no number of {kinds} holds the SLO: {check.name} of a request without any"
        f" load is already {seconds(check.seconds)}",
        binds="SLO floor",
        nearest=str(nearest),
        nearest_gpus=nearest.gpus,
        missed_by=f"{check.name} {seconds(check.seconds)}, limit {seconds(check.limit_s)}"
        f" ({check.ratio:.2f} times)",
        way_out=f"a limit well above {seconds(check.seconds)}, a faster GPU, a smaller model,"
        " fewer bytes (model.weight_dtype), or shorter prompts or answers",
    )


def too_many(
    unloaded: list[tuple[Check, Configuration]], inputs: Inputs, *, max_gpus: int
) -> Infeasible:
    """Return that no pools that the search considers hold the SLO under the load."""
    check, nearest = _nearest(unloaded)
    lora = inputs.engine.lora
    few = lora is not None and lora.max_loras < lora.adapters
    slots = "more engine.max_loras (requests wait for adapters to leave), " if few else ""
    return Infeasible(
        reason=f"no pools of up to {max_gpus} GPUs hold the SLO under"
        f" {inputs.scenario.workload.requests_per_s:g} requests/s",
        binds="SLO",
        nearest=str(nearest),
        nearest_gpus=nearest.gpus,
        missed_by=f"nothing on an idle system ({check.name} {seconds(check.seconds)} of"
        f" {seconds(check.limit_s)}), too much under load",
        way_out=f"{slots}a larger cluster.max_gpus, a looser SLO, or a lower"
        f" {inputs.scenario.workload.demand_key}",
    )


def over_budget(best: Configuration, inputs: Inputs, *, needed: int) -> Infeasible:
    """Return that the SLO can be held, but with more GPUs than the budget has."""
    spares = {role: count for role, count in spare_replicas(inputs, best).items() if count}
    each = " and ".join(f"{count} {role}" for role, count in spares.items())
    with_spares = f" with {each} spare replicas" if spares else ""
    return _beyond(
        best,
        inputs,
        needed=needed,
        reason=f"the SLO needs {needed} {' and '.join(best.gpus_by_kind)}{with_spares}",
        way_out=f"cluster.max_gpus = {needed}, a looser SLO, or a lower rate",
    )


def beyond_capacity(lowest: Configuration, inputs: Inputs) -> Infeasible:
    """Return that the load takes more GPUs than the budget has, even without queues."""
    load, share = inputs.scenario.workload, inputs.scenario.search.max_utilisation_fraction
    return _beyond(
        lowest,
        inputs,
        needed=lowest.gpus,
        about="at least ",
        reason=f"{load.requests_per_s:g} requests/s take at least {lowest.gpus}"
        f" {' and '.join(lowest.gpus_by_kind)} at a utilisation of at most {share:.0%}",
        way_out=f"a lower {load.demand_key}, shorter prompts or answers, or more GPUs"
        " (cluster.max_gpus)",
    )


def far_over_budget(sized: Configuration, inputs: Inputs) -> Infeasible:
    """Return that the pools are estimated so far over the budget that none is simulated."""
    return _beyond(
        sized,
        inputs,
        needed=sized.gpus,
        about="about ",
        reason=f"the SLO needs about {sized.gpus} {' and '.join(sized.gpus_by_kind)} (an estimate)",
        way_out=f"cluster.max_gpus = {sized.gpus} or so, a looser SLO, or a lower rate",
    )


def _beyond(
    nearest: Configuration,
    inputs: Inputs,
    *,
    needed: int,
    reason: str,
    way_out: str,
    about: str = "",
) -> Infeasible:
    budget = inputs.cluster.max_gpus
    return Infeasible(
        reason=f"{reason}, cluster.max_gpus is {budget}",
        binds="max_gpus",
        nearest=str(nearest),
        nearest_gpus=needed,
        missed_by=f"{about}{needed - budget} GPUs",
        way_out=way_out,
    )
