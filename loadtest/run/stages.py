"""Changing request rates during a run: steps and ramps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EXAMPLE = "stages like 5x60,10x60,10-40x120 (requests/s x seconds; a-b is a ramp)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateStage:
    """
    *duration_s* seconds in which the rate changes from *start_per_s* to *end_per_s*.

    Raises InputError: a rate is negative, both are 0, or the duration is not positive.
    """

    start_per_s: float
    end_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        rates = (self.start_per_s, self.end_per_s)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or not sum(rates):
            raise InputError("--stages", f"{rates[0]:g}-{rates[1]:g}", "rates above 0", EXAMPLE)
        if not 0 < self.duration_s < math.inf:
            raise InputError("--stages", self.duration_s, "more than 0 seconds", EXAMPLE)

    @property
    def requests(self) -> float:
        """Mean number of arrivals in the stage."""
        return (self.start_per_s + self.end_per_s) / 2 * self.duration_s


def parse_stages(text: str) -> tuple[RateStage, ...]:
    """
    Parse `5x60,10-40x120`: 5 requests/s for 60 s, then from 10 to 40 within 120 s.

    Raises InputError: another form, or numbers out of range.
    """
    stages = []
    for part in text.split(","):
        rates, _, seconds = part.strip().partition("x")
        start, dash, end = rates.partition("-")
        try:
            stage = (float(start), float(end if dash else start), float(seconds))
        except ValueError:
            raise InputError("--stages", part, EXAMPLE) from None
        stages.append(RateStage(start_per_s=stage[0], end_per_s=stage[1], duration_s=stage[2]))
    return tuple(stages)


def duration_s(stages: Sequence[RateStage]) -> float:
    """Return the total duration of *stages*."""
    return sum(stage.duration_s for stage in stages)


def mean_per_s(stages: Sequence[RateStage]) -> float:
    """Return the mean rate over all *stages*."""
    return sum(stage.requests for stage in stages) / duration_s(stages)


def expected_requests(stages: Sequence[RateStage], until_s: float) -> float:
    """Return the mean number of arrivals until *until_s*; the last rate continues."""
    after_s = max(0.0, until_s - duration_s(stages))
    return sum(stage.requests for stage in stages) + after_s * _continuation(stages).start_per_s


def staged(
    due_s: NDArray[np.float64], per_s: float, stages: Sequence[RateStage]
) -> NDArray[np.float64]:
    """
    Map arrivals at the constant rate *per_s* to the rates of *stages*, shape (n,).

    The arrival before which c others are expected moves to the time at which *stages* expects c:
    a Poisson process becomes one with the rate of the stages. After the last stage its last rate
    continues, or its mean if that is 0. Infinite times stay.

    Source: time change of a point process (Cinlar, Introduction to Stochastic Processes, 4.7).
    """
    rows = [(s.start_per_s, s.end_per_s, s.duration_s) for s in (*stages, _continuation(stages))]
    a, b, d = np.array(rows).T
    counts = np.concatenate([[0.0], np.cumsum((a + b) / 2 * d)[:-1]])
    starts = np.concatenate([[0.0], np.cumsum(d)[:-1]])
    moved = due_s.copy()
    expected = due_s[np.isfinite(due_s)] * per_s
    k = np.searchsorted(counts, expected, side="right") - 1
    c, slope = expected - counts[k], (b[k] - a[k]) / d[k]
    # c = a t + slope t^2 / 2, solved for t in the form that bears slope = 0 and a = 0.
    root = a[k] + np.sqrt(np.maximum(a[k] ** 2 + 2 * slope * c, 0.0))
    t = np.divide(2 * c, root, out=np.zeros_like(c), where=root > 0)
    moved[np.isfinite(due_s)] = starts[k] + t
    return moved


def _continuation(stages: Sequence[RateStage]) -> RateStage:
    """Return the stage after the last one: its final rate, or its mean if that is 0."""
    per_s = stages[-1].end_per_s or stages[-1].requests / stages[-1].duration_s
    return RateStage(start_per_s=per_s, end_per_s=per_s, duration_s=1.0)
