"""What a plan has least of: GPUs, dollars or watts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate
    from sizing.planner.layout import LayoutShape


def cost_of_gpu(inputs: Inputs, gpu: str) -> float:
    """
    Return what one GPU counts for in the objective: 1, US dollars per hour, or watts.

    Raises:
        InputError: a price or a power that nobody gave.
    """
    objective = inputs.scenario.search.objective
    if objective == "gpus":
        return 1.0
    one = {gpu: 1}
    value = inputs.price_usd_per_hour(one) if objective == "usd" else inputs.power_w(one)
    if value is None:
        wanted = "a price" if objective == "usd" else "a power"
        key = (
            f'[search] prices_usd_per_gpu_hour = {{ "{gpu}" = 2.0 }}'
            if objective == "usd"
            else "cluster.power_w_per_gpu"
        )
        raise InputError("search.objective", objective, f"{wanted} of every GPU ({gpu})", key)
    return value


def cost_of(inputs: Inputs, shape: LayoutShape) -> float:
    """Return what one replica costs."""
    return shape.gpus * cost_of_gpu(inputs, shape.gpu)


def cost(inputs: Inputs, chosen: Candidate) -> float:
    """Return what a configuration costs."""
    return sum(
        count * cost_of(inputs, chosen.layout.shapes[role])
        for role, count in chosen.replicas.items()
    )
