"""Where something stops to hold: the least count, and the highest rate, in few tries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
