"""Parts of a measured load in which something else happened: they are cut out, and named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.evidence.refit.engine_steps import modelled_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from minicluster.plan import StepModel
    from minicluster.workload.samples import Sample
    from sizing.evidence.refit.engine_steps import TimedSteps

LATE_S = 0.1
"""A request sent this late shows a client that stood still: its TTFT is not the endpoint's."""

SLOW_FACTOR = 1.6
"""Steps of a second that took this many times as long as those of the whole load, for their size:
beyond what pools on shared cores do to one another within a second."""

BIN_S = 1.0
FEWEST_IN_BIN = 4
"""Steps of a second whose sum says something."""

SETTLE_S = 1.0
"""Time after the end of a hiccup until the queue that it left has cleared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiccup:
    """A part of a load that does not count, in seconds since its start, and why."""

    begin_s: float
    end_s: float
    cause: str

    @property
    def text(self) -> str:
        """The hiccup in words."""
        return f"{self.begin_s:.1f} to {self.end_s:.1f} s: {self.cause}"


def find_hiccups(
    samples: Sequence[Sample],
    model: StepModel,
    steps: dict[str, TimedSteps],
    *,
    start_unix_s: float,
) -> tuple[Hiccup, ...]:
    """
    Find where the client stood still, or engines were slowed down from outside.

    A suspended machine and a burst of other work show as either, whatever caused them.

    Args:
        samples: of the load.
        model: of the steps; only ratios to the whole load count, not how good it is.
        start_unix_s: start of the load.
    """
    found = [
        Hiccup(
            begin_s=sample.due_s,
            end_s=sample.send_s + SETTLE_S,
            cause=f"the load client stood still for {sample.send_s - sample.due_s:.1f} s",
        )
        for sample in samples
        if sample.send_s - sample.due_s > LATE_S
    ]
    for role, timed in steps.items():
        slower = _slower_by_bin(timed, modelled_s(model, role, timed), start_unix_s)
        found += [
            Hiccup(
                begin_s=at_s,
                end_s=at_s + BIN_S + SETTLE_S,
                cause=f"{role} steps took {factor:.1f} times as long as in the rest of the load",
            )
            for at_s, factor in slower
        ]
    return _joined(sorted(found, key=lambda hiccup: hiccup.begin_s))


def _slower_by_bin(
    timed: TimedSteps, modelled: NDArray[np.float64], start_unix_s: float
) -> list[tuple[float, float]]:
    """Return begin, in seconds of the load, and factor of each second with slow steps."""
    if not len(modelled):
        return []
    bins = np.floor((timed.begin_s - start_unix_s) / BIN_S).astype(int)
    whole = float(np.median(timed.seconds / modelled))
    slow = []
    for number in np.unique(bins):
        inside = bins == number
        if inside.sum() >= FEWEST_IN_BIN:
            factor = float(timed.seconds[inside].sum() / modelled[inside].sum()) / whole
            if factor > SLOW_FACTOR:
                slow.append((float(number) * BIN_S, factor))
    return slow


def _joined(found: Sequence[Hiccup]) -> tuple[Hiccup, ...]:
    """Join hiccups that overlap; the longest one's cause stays."""
    joined: list[Hiccup] = []
    for hiccup in found:
        last = joined[-1] if joined else None
        if last is None or hiccup.begin_s > last.end_s:
            joined.append(hiccup)
            continue
        longer = max(last, hiccup, key=lambda one: one.end_s - one.begin_s)
        joined[-1] = Hiccup(
            begin_s=last.begin_s, end_s=max(last.end_s, hiccup.end_s), cause=longer.cause
        )
    return tuple(joined)


def outside(
    hiccups: Sequence[Hiccup], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return which of these spans, in seconds of the load, touch no hiccup, shape of both."""
    clear = np.ones(begin_s.shape, dtype=bool)
    for hiccup in hiccups:
        clear &= (end_s < hiccup.begin_s) | (begin_s > hiccup.end_s)
    return clear
