"""Bounds and sizes of split pools by closed forms: the guesses that simulations start from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidates import Candidate, largest_batch
from sizing.planner.objective import cost, cost_of
from sizing.planner.slo import meets
from sizing.queueing import decode, prefill
from sizing.queueing.forecast import forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minicluster.plan import Inputs

MAX_REPLICAS = 1 << 14
"""Replicas of a pool beyond which the search gives up: a bound on its work, not on its time."""

MAX_BUDGETS = 16
"""Multiple of `cluster.max_gpus` up to which closed forms size pools."""

UNCONTENDED_FACTOR = 16
"""Replicas over those that the load needs, at which a pool counts as free of queues."""

MAX_DECODE_FACTOR = 2
"""Decode replicas over the fewest that hold: more save TTFT no more than a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedCandidate:
    """
    A layout and batch limit, with steps as slow as the confidence asks for.

    Attributes:
        slow: one replica per pool.
        lowest: fewest replicas of each pool by utilisation alone.
        bound: cost of those: no configuration of this layout and limit costs less.
    """

    slow: Candidate
    lowest: tuple[int, int]
    bound: float


def limits(slow: Candidate, inputs: Inputs) -> Iterator[BoundedCandidate]:
    """
    Yield the decode batch limits that are worth sizing.

    The first is the largest that keeps TPOT with full batches and fits memory; each next one is
    half of it, which interference between the pools may ask for.
    """
    limit = largest_batch(slow, inputs.scenario.slo)
    while limit >= 1:
        one = slow.limited(limit)
        lowest = fewest_by_utilisation(one, inputs)
        yield BoundedCandidate(slow=one, lowest=lowest, bound=cost(inputs, one.sized(*lowest)))
        limit //= 2


def fewest_by_utilisation(one: Candidate, inputs: Inputs) -> tuple[int, int]:
    """
    Return the fewest replicas of each pool at the allowed utilisation, without interference.

    No scheduling serves a prompt in less than its share of a full batch, nor a token in less than
    its share of a full decode step, so that fewer replicas cannot hold (docs/model.md, eq. L2).
    """
    ceiling = inputs.scenario.search.max_utilisation_fraction
    tandem = one.sized(1, 1).tandem
    return (
        max(1, int(np.ceil(prefill.utilisation(tandem) / ceiling - 1e-9))),
        max(1, int(np.ceil(decode.utilisation(tandem) / ceiling - 1e-9))),
    )


def fewest(bounded: BoundedCandidate, inputs: Inputs, below: float) -> tuple[int, int] | None:
    """
    Return the cheapest sizes of one layout and limit by forecast; `None` if all cost over *below*.

    The decode pool is the smallest that holds the SLO behind an uncontended prefill pool, then
    grows while that saves more than it costs (docs/model.md, eq. L2).
    """
    slo, one, (low_prefill, low_decode) = inputs.scenario.slo, bounded.slow, bounded.lowest
    shapes = one.layout.shapes
    prefill_cost, decode_cost = (cost_of(inputs, shapes[role]) for role in ("prefill", "decode"))

    def holds(prefill_replicas: int, decode_replicas: int) -> bool:
        return meets(forecast(one.sized(prefill_replicas, decode_replicas).tandem), slo)

    gpus = MAX_BUDGETS * inputs.cluster.max_gpus

    def affordable(decode_replicas: int) -> int:
        rest = min(below, 1e12) - decode_replicas * decode_cost
        room = gpus - decode_replicas * shapes["decode"].gpus
        return int(min(MAX_REPLICAS, rest / prefill_cost + 1e-9, room / shapes["prefill"].gpus))

    most_decode = gpus // shapes["decode"].gpus
    uncontended = UNCONTENDED_FACTOR * low_prefill
    count = least(lambda many: holds(uncontended, many), low_decode, most_decode)
    if count is None or affordable(count) < low_prefill:
        return None
    found: tuple[int, int] | None = None
    decode_replicas = count
    while decode_replicas <= MAX_DECODE_FACTOR * count + 1:
        most = affordable(decode_replicas)
        if found is not None:
            most = found[0] - 1 - int((decode_replicas - found[1]) * decode_cost / prefill_cost)
        enough = partial(holds, decode_replicas=decode_replicas)
        many = _up_to(most, low_prefill, enough) if most >= low_prefill else None
        if many is not None:
            found = (many, decode_replicas)
        elif found is not None or most < low_prefill:
            break
        decode_replicas += max(1, count // 8)
    return found


def _up_to(most: int, low: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count from *low* to *most* that holds; *most* is tested first."""
    if most < MAX_REPLICAS and not holds(most):
        return None
    found = least(holds, low)
    return found if found is not None and found <= most else None


def least(holds: Callable[[int], bool], start: int, most: int = MAX_REPLICAS) -> int | None:
    """Return the smallest count from *start* to *most* that *holds*; larger counts hold too."""
    if holds(start):
        return start
    low, step = start, 1
    while not holds(low + step):
        low += step
        step *= 2
        if low + step > most:
            return None
    return between(holds, low, low + step)


def between(holds: Callable[[int], bool], low: int, high: int, *, step: int = 1) -> int:
    """Bisect between *low*, which fails, and *high*, which holds, down to *step*; return *high*."""
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def least_near(
    holds: Callable[[int], bool], guess: int, floor: int, ceiling: int, *, step: int = 1
) -> int | None:
    """
    Return the smallest count from *floor* to *ceiling* that *holds*, searched from *guess* on.

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
    return between(holds, low, high, step=step)
