"""Where something stops to hold: the least count, the highest rate, the rate of users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Prediction
    from minicluster.specs.workload import WorkloadSpec


RESOLUTION = 0.03
"""Relative step to which rates and large pools are resolved: a quick run's p99 is known to about as
much, and replicas are whole."""

LEAST_SHARE = 1e-3
"""Share of the highest rate below which nothing is tried: the SLO does not hold there."""

SATURATED = 2.0
"""Share of a limit that stands for no latency at all: a pool that no run was needed for."""

STEEPNESS = 1.5
"""Per cent by which a latency near its limit changes, for each by which the rate does."""

STRIDE = 1.15
"""Factor by which one run changes the rate at most; it is squared from run to run."""

INSENSITIVE = 2.0
"""Factor that a run may change the rate by, from which on one that missed has to: some latencies
miss their limit by little at any rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """
    Shares of the tightest limit between which a rate is the edge.

    Attributes:
        least: share from which on no higher rate is looked for.
        aim: share that is aimed at.
        most: share up to which a rate holds.
    """

    least: float
    aim: float
    most: float


def least(
    holds: Callable[[int], bool], guess: int, floor: int, ceiling: int, *, step: int = 1
) -> int | None:
    """
    Return the smallest count from *floor* to *ceiling* that *holds*; `None`: none does.

    A larger count never fails where a smaller one holds. Strides double away from the guess, then
    the last one is halved down to *step*.
    """
    guess, stride = min(max(guess, floor), ceiling), step
    if holds(guess):
        high, low = guess, guess - stride
        while low >= floor and holds(low):
            high, stride = low, 2 * stride
            low = high - stride
        low = max(low, floor - 1)
    else:
        low, high = guess, min(guess + stride, ceiling)
        while not holds(high):
            if high >= ceiling:
                return None
            stride *= 2
            low, high = high, min(high + stride, ceiling)
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def highest(
    used: Callable[[float], float], low: float, high: float, *, guess: float, band: Band
) -> float | None:
    """
    Return the highest rate from *low* on that is known to hold, below *high*; `None`: none is.

    Each try says how near its tightest limit is, and so about how far away the rate is that uses
    up as much of it as is aimed at; between a rate that holds and one that does not, it is
    bisected.

    Args:
        used: share of its tightest limit that a rate uses up; `SATURATED` where there is no
            latency.
        guess: rate that is tried first.
    """
    best, rate, ceiling, stride = None, guess, high, STRIDE
    while low <= rate < high > low * (1 + RESOLUTION) and high > ceiling * LEAST_SHARE:
        share = used(rate)
        if share > band.most:
            high = rate
        else:
            best = low = rate
            if share >= band.least and high < ceiling:
                break
        rate *= min(max(factor_to(band.aim, share), 1 / stride), stride)
        if best is None and stride > INSENSITIVE:
            rate = min(rate, high / stride)
        known = best is not None and not low * (1 + RESOLUTION / 2) < rate < high
        overshot = rate < low and high > low * STRIDE**2
        if known or overshot:
            rate = (low * high) ** 0.5
        stride = min(stride**2, 1 / LEAST_SHARE)
    return best


def factor_to(aim: float, share: float) -> float:
    """Return the factor on a rate by which the share of its tightest limit becomes *aim*."""
    return float((aim / share) ** (1 / STEEPNESS))


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
