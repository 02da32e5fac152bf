"""Predicted against measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from loadtest.verdict.phases import PhaseTable, compare_phases
from minicluster.errors import InputError
from minicluster.specs.slo import PERCENTILES
from minicluster.stats.bootstrap import differences
from minicluster.stats.quantiles import LatencySummary, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadtest.verdict.resimulation import Resimulation
    from minicluster.plan import Prediction
    from minicluster.workload.samples import Sample

PREDICTED = ("ttft", "tpot", "itl", "e2e")
PAIRED = ("ttft", "tpot", "e2e", "longest_stall")
"""What a replay tells of each request."""

TOLERANCE = {"ttft": 0.35, "tpot": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """
    One statistic.

    Attributes:
        error_fraction: predicted / measured - 1.
        error_low, error_high: its 95 % interval; `None` without a replay.
    """

    metric: str
    statistic: str
    predicted_s: float
    measured_s: float
    error_fraction: float
    error_low: float | None
    error_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """
    A prediction and how it held.

    Attributes:
        source: `replayed`: for the run's own arrivals and lengths; `planned`: as in the plan.
        tolerance: by metric, the error of the mean that is allowed.
        held: every mean with a tolerance was measured, and lies within it.
        phases: of the replayed requests.
    """

    source: str
    rows: tuple[Compared, ...]
    tolerance: dict[str, float]
    held: bool
    phases: PhaseTable | None

    def row(self, metric: str, statistic: str) -> Compared | None:
        """Return one row, `None` where nothing was measured."""
        found = (r for r in self.rows if (r.metric, r.statistic) == (metric, statistic))
        return next(found, None)


def compare(
    predicted: Prediction,
    measured: Mapping[str, LatencySummary | None],
    tolerance: dict[str, float],
) -> Comparison:
    """Compare the plan's own prediction at every statistic that both have."""
    rows = []
    for metric in PREDICTED:
        seen = measured[metric]
        for statistic in PERCENTILES if seen else ():
            planned_s = getattr(predicted, metric).at(statistic)
            seen_s = seen.at(statistic) if seen else 0.0
            if seen_s > 0:
                rows.append(_row(metric, statistic, planned_s, seen_s))
    return Comparison(
        source="planned",
        rows=tuple(rows),
        tolerance=tolerance,
        held=_held(rows, tolerance),
        phases=None,
    )


def compare_replayed(
    replay: Resimulation, answered: Sequence[Sample], tolerance: dict[str, float]
) -> Comparison | None:
    """Compare with the simulation of the same requests; `None` if it knows none of them."""
    known = [s for s in answered if s.index in replay.requests]
    if not known:
        return None
    rows = [row for metric in PAIRED for row in _paired(metric, replay, known)]
    gaps = spread([gap for s in known for gap in s.gaps_s])
    if gaps:
        rows += [
            _row("itl", statistic, replay.itl[statistic], gaps.at(statistic))
            for statistic in PERCENTILES
            if statistic in replay.itl and gaps.at(statistic) > 0
        ]
    return Comparison(
        source="replayed",
        rows=tuple(rows),
        tolerance=tolerance,
        held=_held(rows, tolerance),
        phases=compare_phases(replay, known),
    )


def _paired(metric: str, replay: Resimulation, known: Sequence[Sample]) -> Iterator[Compared]:
    """Compare one metric of the same requests; what chance did to their arrivals cancels."""
    pairs = [
        (ours, theirs)
        for s in known
        if (ours := getattr(replay.requests[s.index], f"{metric}_s")) is not None
        and (theirs := getattr(s, f"{metric}_s")) is not None
    ]
    if not pairs:
        return
    predicted, measured = np.array(pairs).T
    ours, theirs = spread(predicted.tolist()), spread(measured.tolist())
    apart = differences(measured, predicted, PERCENTILES, paired=True)
    for statistic, found in zip(PERCENTILES, apart, strict=True):
        if not (ours and theirs and theirs.at(statistic) > 0):
            continue
        seen_s = theirs.at(statistic)
        row = _row(metric, statistic, ours.at(statistic), seen_s)
        yield replace(row, error_low=found.low / seen_s, error_high=found.high / seen_s)


def _row(metric: str, statistic: str, predicted_s: float, measured_s: float) -> Compared:
    return Compared(
        metric=metric,
        statistic=statistic,
        predicted_s=predicted_s,
        measured_s=measured_s,
        error_fraction=predicted_s / measured_s - 1,
        error_low=None,
        error_high=None,
    )


def _held(rows: Sequence[Compared], tolerance: dict[str, float]) -> bool:
    means = {r.metric: abs(r.error_fraction) for r in rows if r.statistic == "mean"}
    return all(metric in means and means[metric] <= most for metric, most in tolerance.items())


def parse_tolerance(text: str) -> dict[str, float]:
    """Read `ttft=0.35,tpot=0.25`, or one number for both."""
    expectation = "fractions like ttft=0.35,tpot=0.25, or one for both"
    try:
        if "=" not in text:
            given = dict.fromkeys(TOLERANCE, float(text))
        else:
            pairs = (part.split("=") for part in text.split(","))
            given = {key.strip(): float(value) for key, value in pairs}
    except ValueError:
        raise InputError("--tolerance", text, expectation) from None
    if not set(given) <= set(PREDICTED) or not all(
        0 < value < float("inf") for value in given.values()
    ):
        raise InputError("--tolerance", text, expectation)
    return given
