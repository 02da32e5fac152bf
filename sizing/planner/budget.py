"""Budgets in dollars and watts: what a plan may take beside `cluster.max_gpus`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from sizing.planner.configuration import PRICED, how_to_price, with_search
from sizing.planner.deployment import gpus_with_spares
from sizing.planner.result import Infeasible
from sizing.planner.search import search

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.result import Found
    from sizing.planner.search import Told


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


def search_within_budgets(inputs: Inputs, *, told: Told | None = None) -> Found | Infeasible:
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
    found = search(inputs, told=told)
    over = _exceeded(inputs, known, found)
    own = inputs.scenario.search.objective
    if over is None or isinstance(found, Infeasible):
        return found
    if not found.interrupted and len(inputs.kinds) > 1 and over.objective != own:
        found = search(with_search(inputs, objective=over.objective))
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
