"""Plans of the page's cases: each is searched once, and shown with list prices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from sizing.catalog.gpu import list_price
from sizing.planner.plan import ClassPlans, NoPlan, plan_classes

if TYPE_CHECKING:
    from minicluster.plan import Plan
    from sizing.planner.search import Told
    from sizing.ui.form import Case

QUICK_S = 2.0


@dataclass(slots=True)
class _Answered:
    """The plans of a case once they are known, and the seconds that the search took."""

    plans: ClassPlans | NoPlan | None = None
    took_s: float = float("inf")
    lock: Lock = field(default_factory=Lock)


@lru_cache(maxsize=256)
def _made(case: Case) -> _Answered:  # noqa: ARG001  (the key)
    return _Answered()


LOOKUP = Lock()
"""Held while `_made` is asked: two sessions that both miss would get one each, and two searches."""


def _answered(case: Case) -> _Answered:
    with LOOKUP:
        return _made(case)


def planned(case: Case, told: Told | None = None) -> ClassPlans | NoPlan:
    """
    Return the plans of a case, or why there are none; a case is planned once, whoever asks.

    Args:
        told: is called with each configuration of shared pools that holds so far.

    Raises:
        InputError: a scenario that cannot be planned at all.
    """
    known = _answered(case)
    with known.lock:
        if known.plans is None:
            begun_s = time.monotonic()
            try:
                known.plans = plan_classes(case.scenario(), told=told)
            except NoPlan as none:
                known.plans = none
            known.took_s = time.monotonic() - begun_s
        return known.plans


def is_quick(case: Case) -> bool:
    """Say whether a change of a case is planned at once: the search for it took no longer."""
    return _answered(case).took_s < QUICK_S


def priced(plan: Plan) -> Plan:
    """Return a plan with the catalog's list prices where it has no price of its own."""
    inputs, kinds = plan.inputs, [*plan.gpus_by_kind]
    if inputs.usd_per_hour(plan.gpus_by_kind) is not None:
        return plan
    listed = [price for kind in kinds if (price := list_price(kind)) is not None]
    if len(listed) < len(kinds):
        return plan
    return replace(plan, inputs=replace(inputs, list_prices=tuple(listed)))
