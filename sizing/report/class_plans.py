"""Shared pools beside pools of each class's own, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minicluster.plan import Plan, to_json
from sizing.planner.studies.result import layout_of
from sizing.report.tables import columns_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.table import Table

    from sizing.planner.class_pools import ClassPlans, Planned


def class_plans_table(found: ClassPlans) -> Table:
    """Return one row per plan, and one of own pools together."""
    return columns_table("Pools for the classes of requests", class_plans_columns(found))


def class_plans_columns(found: ClassPlans) -> dict[str, list[Any]]:
    """Return a row per plan, and one of own pools together, which says what is cheaper."""
    rows = list(_rows(found))
    heads = ("pools", "GPUs", "$/hour", "layout")
    return {head: [str(row[at]) for row in rows] for at, head in enumerate(heads)}


def _rows(found: ClassPlans) -> Iterator[tuple[str, int | str, str, str]]:
    each = {"shared by all classes": found.shared} if found.shared else {}
    each |= {f"own of {name}": one for name, one in found.own.items()}
    for pools, one in each.items():
        if isinstance(one, Plan):
            yield pools, one.cost.gpus, _price([one]), layout_of(one)
        else:
            yield pools, "none", "", one.reason
    own = found.own_plans.values()
    if own:
        yield "own together", sum(one.cost.gpus for one in own), _price(own), ""


def _price(plans: Iterable[Plan]) -> str:
    prices = [each.cost.price_usd_per_hour for each in plans]
    known = [each for each in prices if each is not None]
    return f"{sum(known):,.2f}" if len(known) == len(prices) else ""


def class_plans_json(found: ClassPlans) -> str:
    """Write all plans, each as its file has it, and which are the result."""

    def written(one: Planned | None) -> object:
        return json.loads(to_json(one)) if isinstance(one, Plan) else one and asdict(one)

    data = {
        "chosen": "shared" if "" in found.chosen else "own",
        "shared": written(found.shared),
        "own": {name: written(one) for name, one in found.own.items()},
    }
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def choice_line(found: ClassPlans) -> str:
    """Say which pools are the result, and why."""
    shared = "" in found.chosen
    what = "shared pools" if shared else "pools of their own"
    if found.shared is None or not found.own:
        return f"Result: {what}"
    if not (found.own_plans if shared else isinstance(found.shared, Plan)):
        other = "pools of their own" if shared else "shared pools"
        return f"Result: {what}; {other} do not hold every class's limits within the budget"
    return f"Result: {what}, {'not dearer' if shared else 'cheaper'}"
