"""The rate that users of a closed loop come to, found together with the latency it leads to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Prediction
    from minicluster.specs.workload import WorkloadSpec

T = TypeVar("T")

ABOVE = 0.01
"""Relative margin above what users send, by which a next trial that is faster still covers them; so
much more with each trial until one does."""

TOLERANCE = 0.03
"""Relative excess of a rate over what users send that is no longer lowered."""

MOST_TRIALS = 16
"""Rates that are tried; a search takes three as a rule, named pools near saturation nine."""


def covering_rates(
    load: WorkloadSpec, tried: Callable[[WorkloadSpec], tuple[T, Prediction | None]]
) -> T:
    """
    Find the least rates that cover what users send, by trials at one load after the other.

    Users of a class send users / (E[e2e] + think) requests per second (docs/model.md, eq. E3);
    E[e2e] depends on the rate. A rate covers them if it is no less than what they send at the
    latency that it leads to.

    Args:
        load: with users in at least one class; its rates are where the trials begin.
        tried: returns the result of a load and its prediction (`None`: no latency exists at it, so
            that the rates are too high).

    Returns:
        The result at the lowest rates that were found to cover: within 3 % of what users send,
        unless the result changes so much from one rate to the next that none does. Where no rate
        covers, the result at one that is too high: users saturate what is tried.

    Ignores:
        That users who wait send nothing: arrivals are taken as Poisson, which is harder for users
        who think, and easier for those who do not and get equally long answers: these end
        together, and the next requests come in bursts (`sizing simulate --users`).
    """
    rates = {each.name: each.requests_per_s for each in load.parts if each.users is not None}
    low, high = dict.fromkeys(rates, 0.0), dict.fromkeys(rates, math.inf)
    best: tuple[float, T] | None = None
    too_high: T | None = None
    for trial in range(1, MOST_TRIALS + 1):
        result, predicted = tried(load.with_rates(rates))
        sent = _sent(load, predicted)
        too_high = result if predicted is None else too_high
        enough = {name: sent[name] <= rate for name, rate in rates.items()}
        total = sum(rates.values())
        if all(enough.values()) and predicted and (best is None or total < best[0]):
            best = total, result
        for name, rate in rates.items():
            (high if enough[name] else low)[name] = rate
        least = {name: max(low[name], sent[name] if enough[name] else 0.0) for name in rates}
        near = all(high[name] <= (1 + TOLERANCE) * least[name] for name in rates)
        if near and (best is not None or too_high is not None):
            break
        above = 1 + ABOVE * (trial if best is None else 1)
        rates = {name: _next(sent[name] * above, low[name], high[name]) for name in rates}
    if best is not None:
        return best[1]
    return result if too_high is None else too_high


def _sent(load: WorkloadSpec, predicted: Prediction | None) -> dict[str, float]:
    """Return what users send by class; nothing where no latency exists."""
    if predicted is None:
        return {each.name: 0.0 for each in load.parts}
    return {
        each.name: each.users / (predicted.latency("e2e", each.name).mean_s + each.think_s)
        for each in load.parts
        if each.users is not None
    }


def _next(sent: float, low: float, high: float) -> float:
    """Return what users send, or where that is known to be wrong the middle; four digits."""
    if not low < sent < high:
        sent = math.sqrt(low * high) if low else high / 2
    return float(f"{sent:.4g}")
