"""The objective of a search: GPUs, US dollars per hour or watts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from minicluster.plan import Inputs, Plan
    from sizing.planner.candidates import Candidate
    from sizing.planner.layout import LayoutShape


def cost_of_gpu(inputs: Inputs, gpu: str) -> float:
    """
    Return the cost of one GPU in the objective's unit: 1, US dollars per hour, or watts.

    Raises:
        InputError: neither scenario nor catalog has the price or the power.
    """
    objective = inputs.scenario.search.objective
    if objective == "gpus":
        return 1.0
    one = {gpu: 1}
    value = inputs.price_usd_per_hour(one) if objective == "usd" else inputs.power_w(one)
    if value is None:
        wanted = "a price" if objective == "usd" else "a power"
        key = (
            f'[search] prices_usd_per_gpu_hour = {{ "{gpu}" = 2.0 }}, or cost.prices = "catalog"'
            if objective == "usd"
            else "cluster.power_w_per_gpu"
        )
        raise InputError("search.objective", objective, f"{wanted} of every GPU ({gpu})", key)
    return value


def cost_of(inputs: Inputs, shape: LayoutShape) -> float:
    """Return the cost of one replica."""
    return shape.gpus * cost_of_gpu(inputs, shape.gpu)


def cost_of_plan(plan: Plan) -> float:
    """Return the cost of a plan, its spare replicas included."""
    return sum(pool.gpus * cost_of_gpu(plan.inputs, pool.gpu) for pool in plan.pools)


def cost(inputs: Inputs, chosen: Candidate) -> float:
    """Return the cost of a configuration."""
    return sum(
        count * cost_of(inputs, chosen.layout.shapes[role])
        for role, count in chosen.replicas.items()
    )
