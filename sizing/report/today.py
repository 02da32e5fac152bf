"""Pools that run today beside a plan, figure by figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.plan.deployment import gpus_by_kind
from minicluster.units import seconds
from sizing.planner.studies.cost import Running, running_of
from sizing.planner.studies.result import figures, layout_of
from sizing.report.tables import table, verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.pages.page import Cell, Section
    from minicluster.plan import Inputs, Plan, Prediction
    from minicluster.specs.slo import SloSpec
    from minicluster.specs.workload import WorkloadSpec
    from sizing.planner.predict import PoolPrediction

    Rows = Iterator[tuple[str, str | Cell]]


def today_table(today: PoolPrediction, inputs: Inputs, plans: Mapping[str, Plan]) -> Section:
    """
    Return a row for each figure of pools that run today and of the plan, in a column each.

    Args:
        inputs: what *today* is predicted of.
        plans: by class of requests, as `ClassPlans.chosen`; may be empty.
    """
    kinds = gpus_by_kind(today.pools)
    cost = running_of(inputs, kinds, today.prediction.output_tokens_per_s)
    columns = {
        "today": {
            **dict(_rate(today.workload)),
            **dict(_sizes(layout_of(today), kinds.total(), cost)),
            **dict(_latencies("", today.prediction, inputs.scenario.promises)),
        }
    }
    if plans:
        found = figures(plans)
        columns["better"] = dict(_sizes(found.layout, found.gpus, found.running))
        for of, plan in plans.items():
            columns["better"] |= dict(_rate(plan.workload, of))
            columns["better"] |= dict(_latencies(of, plan.prediction, plan.promises))
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = ([name, *(column.get(name, "-") for column in columns.values())] for name in names)
    title = " and ".join(columns).capitalize()
    return table(title, ("", *columns), rows, words=tuple(columns))


def _sizes(layout: str, gpus: int, cost: Running) -> Rows:
    yield "layout", layout
    yield "GPUs", f"{gpus}"
    if cost.usd_per_hour is not None:
        yield "price", f"${cost.usd_per_hour:,.2f} an hour"
    if cost.joules_per_output_token is not None:
        yield "energy", f"{cost.joules_per_output_token:.2f} J/token"


def _rate(load: WorkloadSpec, own: str = "") -> Rows:
    """Yield what users send, which depends on the pools that serve them."""
    if load.has_users:
        yield f"{own} load".lstrip(), f"{load.requests_per_s:.3g} requests/s"


def _latencies(own: str, predicted: Prediction, promises: Mapping[str, SloSpec]) -> Rows:
    """Yield limits and whether they hold, and what load saturates pools that all requests share."""
    for of, slo in promises.items():
        for name, limit_s in slo.limits_s.items():
            value_s = predicted.latency(name, of).at(slo.percentile)
            label = f"{own or of} {name.upper()} {slo.percentile} < {seconds(limit_s)}".lstrip()
            yield label, verdict(holds=value_s <= limit_s, limit=f"{seconds(value_s)}, ")
    if not own:
        yield "saturates at", f"{predicted.capacity_requests_per_s:.3g} requests/s"
