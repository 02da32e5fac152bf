"""Bounds and sizes of two pools by closed forms: where simulations begin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidate import Candidate
from sizing.planner.objective import cost, cost_of
from sizing.planner.slo import meets
from sizing.planner.starts import largest_batch
from sizing.queueing import decode, prefill
from sizing.queueing.forecast import forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minicluster.plan import Inputs

MOST_REPLICAS = 1 << 14
"""Beyond this many replicas of a pool the search gives up: a bound counted in work, not time."""

MOST_BUDGETS = 16
"""Times `cluster.max_gpus` up to which sizes are looked for by closed forms."""

SPARE = 16
"""Times as many replicas as the load needs: as good as no queue."""


DECODE_FOR_PREFILL = 2
"""Times as many decode replicas as have to be, for the few milliseconds that they save TTFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """
    A layout and batch limit, with steps as slow as the confidence asks for.

    Attributes:
        slow: one replica a pool.
        lowest: fewest replicas of each pool by utilisation alone.
        bound: what those cost: no configuration of this layout and limit costs less.
    """

    slow: Candidate
    lowest: tuple[int, int]
    bound: float


def limits(slow: Candidate, inputs: Inputs) -> Iterator[Sized]:
    """
    Yield the decode batch limits worth trying.

    The largest whose full batches keep the TPOT, or what memory allows; then halves, which
    interference may ask for.
    """
    limit = largest_batch(slow, inputs.scenario.slo)
    while limit >= 1:
        one = slow.limited(limit)
        lowest = fewest_by_utilisation(one, inputs)
        yield Sized(slow=one, lowest=lowest, bound=cost(inputs, one.sized(*lowest)))
        limit //= 2


def fewest_by_utilisation(one: Candidate, inputs: Inputs) -> tuple[int, int]:
    """
    Fewest replicas of each pool at the allowed utilisation, interference left out.

    No scheduling serves a prompt in less than its share of a full batch, nor a token in less than
    its share of a full decode step, so that fewer replicas cannot hold (docs/model.md, eq. L2).
    """
    ceiling = inputs.scenario.search.max_utilisation_fraction
    tandem = one.sized(1, 1).tandem
    return (
        max(1, int(np.ceil(prefill.utilisation(tandem) / ceiling - 1e-9))),
        max(1, int(np.ceil(decode.utilisation(tandem) / ceiling - 1e-9))),
    )


def fewest(start: Sized, inputs: Inputs, below: float) -> tuple[int, int] | None:
    """
    Find the cheapest sizes of one layout and limit by forecast; `None` if none costs up to *below*.

    The decode pool is the smallest that holds the SLO behind an uncontended prefill pool, then
    grows while that saves more than it costs (docs/model.md, eq. L2).
    """
    slo, one, (low_prefill, low_decode) = inputs.scenario.slo, start.slow, start.lowest
    shapes = one.layout.shapes
    prefill_cost, decode_cost = (cost_of(inputs, shapes[role]) for role in ("prefill", "decode"))

    def holds(prefill_replicas: int, decode_replicas: int) -> bool:
        return meets(forecast(one.sized(prefill_replicas, decode_replicas).tandem), slo)

    gpus = MOST_BUDGETS * inputs.cluster.max_gpus

    def affordable(decode_replicas: int) -> int:
        rest = min(below, 1e12) - decode_replicas * decode_cost
        room = gpus - decode_replicas * shapes["decode"].gpus
        return int(min(MOST_REPLICAS, rest / prefill_cost + 1e-9, room / shapes["prefill"].gpus))

    most_decode = gpus // shapes["decode"].gpus
    count = least(lambda many: holds(SPARE * low_prefill, many), low_decode, most_decode)
    if count is None or affordable(count) < low_prefill:
        return None
    found: tuple[int, int] | None = None
    decode_replicas = count
    while decode_replicas <= DECODE_FOR_PREFILL * count + 1:
        most = affordable(decode_replicas)
        if found is not None:
            most = found[0] - 1 - int((decode_replicas - found[1]) * decode_cost / prefill_cost)
        enough = partial(_swap, holds, decode_replicas)
        many = _up_to(most, low_prefill, enough) if most >= low_prefill else None
        if many is not None:
            found = (many, decode_replicas)
        elif found is not None or most < low_prefill:
            break
        decode_replicas += max(1, count // 8)
    return found


def _swap(holds: Callable[[int, int], bool], decode_replicas: int, prefill_replicas: int) -> bool:
    """Ask for a number of prefill replicas."""
    return holds(prefill_replicas, decode_replicas)


def _up_to(most: int, low: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count from *low* to *most* that holds; the most is asked first."""
    if most < MOST_REPLICAS and not holds(most):
        return None
    found = least(holds, low)
    return found if found is not None and found <= most else None


def least(holds: Callable[[int], bool], start: int, most: int = MOST_REPLICAS) -> int | None:
    """Return the smallest count from *start* to *most* that *holds*, which more never break."""
    if holds(start):
        return start
    low, step = start, 1
    while not holds(low + step):
        low += step
        step *= 2
        if low + step > most:
            return None
    return between(holds, low, low + step)


def between(holds: Callable[[int], bool], low: int, high: int, *, grain: int = 1) -> int:
    """Halve the way from *low*, which does not hold, to *high*, which does, down to *grain*."""
    while high - low > grain:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def least_near(
    holds: Callable[[int], bool], guess: int, floor: int, ceiling: int, *, grain: int = 1
) -> int | None:
    """
    Return the smallest count from *floor* to *ceiling* that *holds*, looking near *guess* first.

    More never break what holds; steps double away from the guess, then halve down to *grain*.
    """
    guess, step = min(max(guess, floor), ceiling), grain
    if holds(guess):
        high, low = guess, guess - step
        while low >= floor and holds(low):
            high, step = low, 2 * step
            low = high - step
        low = max(low, floor - 1)
    else:
        low, high = guess, min(guess + step, ceiling)
        while not holds(high):
            if high >= ceiling:
                return None
            step *= 2
            low, high = high, min(high + step, ceiling)
    return between(holds, low, high, grain=grain)
