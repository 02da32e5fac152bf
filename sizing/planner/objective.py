"""What a plan has least of: GPUs, dollars or watts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate
    from sizing.planner.layout import LayoutShape


def price_usd_per_hour(inputs: Inputs, gpu: str) -> float | None:
    """Return the user's price of one GPU; `None` where the scenario gives none."""
    prices = inputs.scenario.search.prices_usd_per_gpu_hour
    if gpu in prices:
        return prices[gpu]
    return inputs.cluster.price_usd_per_gpu_hour if gpu == inputs.gpu.name else None


def power_w(inputs: Inputs, gpu: str) -> float | None:
    """Return the power of one GPU: at the wall where the scenario says it, else its datasheet's."""
    return inputs.scenario.cluster.power_w_per_gpu or inputs.kinds[gpu].power_w


def cost_of_gpu(inputs: Inputs, gpu: str) -> float:
    """
    Return what one GPU counts for in the objective: 1, US dollars per hour, or watts.

    Raises:
        InputError: a price or a power that nobody gave.
    """
    objective = inputs.scenario.search.objective
    if objective == "gpus":
        return 1.0
    value = price_usd_per_hour(inputs, gpu) if objective == "usd" else power_w(inputs, gpu)
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


def total_price_usd_per_hour(inputs: Inputs, gpus: dict[str, int]) -> float | None:
    """Return dollars per hour of all GPUs; `None` where a price is missing."""
    prices = {gpu: price_usd_per_hour(inputs, gpu) for gpu in gpus}
    known = [count * price for gpu, count in gpus.items() if (price := prices[gpu]) is not None]
    return sum(known) if len(known) == len(gpus) else None


def total_power_w(inputs: Inputs, gpus: dict[str, int]) -> float | None:
    """Return watts of all GPUs; `None` where a power is unknown."""
    powers = {gpu: power_w(inputs, gpu) for gpu in gpus}
    known = [count * power for gpu, count in gpus.items() if (power := powers[gpu]) is not None]
    return sum(known) if len(known) == len(gpus) else None
