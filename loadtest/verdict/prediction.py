"""Prediction beside measurement: errors of means and percentiles, and whether they are small."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from loadtest.verdict.phases import PhaseTable, compare_phases
from minicluster.specs.slo import METRICS, PERCENTILES
from minicluster.stats.bootstrap import differences
from minicluster.stats.quantiles import LatencySummary, summarise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadtest.verdict.resimulation import Resimulation
    from minicluster.plan import Prediction
    from minicluster.workload.samples import Sample

PAIRED = ("ttft", "tpot", "e2e", "longest_stall")
"""Latencies that the simulation gives for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """
    One statistic of one latency.

    Attributes:
        error_fraction: predicted / measured - 1.
        error_low, error_high: its 95 % interval; `None` for the plan's own prediction.
        error_at_pace_fraction: error of the prediction at the pace that the engines had in this
            load; `None`: not known.
    """

    metric: str
    statistic: str
    predicted_s: float
    measured_s: float
    error_fraction: float
    error_low: float | None = None
    error_high: float | None = None
    error_at_pace_fraction: float | None = None

    @property
    def judged_error_fraction(self) -> float:
        """The error that counts: at the engines' pace, where it is known."""
        at_pace = self.error_at_pace_fraction
        return self.error_fraction if at_pace is None else at_pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """
    A prediction and its errors.

    Attributes:
        source: `resimulated`: for the run's own arrivals and lengths; `planned`: the plan's own.
        tolerance: by metric, the largest error of the mean that counts as correct.
        held: every mean with a tolerance was measured and is within it, at the engines' pace
            where it is known.
        phases: of the resimulated requests.
        pace: by role, measured / planned seconds of the engines' steps for the same work; empty:
            not known.
    """

    source: str
    rows: tuple[Compared, ...]
    tolerance: dict[str, float]
    held: bool
    phases: PhaseTable | None
    pace: dict[str, float] = field(default_factory=dict)

    def row(self, metric: str, statistic: str) -> Compared | None:
        """Return one row; `None` if it was not measured."""
        found = (r for r in self.rows if (r.metric, r.statistic) == (metric, statistic))
        return next(found, None)


def compare(
    predicted: Prediction,
    measured: Mapping[str, LatencySummary | None],
    tolerance: dict[str, float],
) -> Comparison:
    """Compare the plan's own prediction at every statistic that was measured."""
    rows = [
        _row(metric, statistic, getattr(predicted, metric).at(statistic), summary.at(statistic))
        for metric in METRICS
        if (summary := measured[metric])
        for statistic in PERCENTILES
        if summary.at(statistic) > 0
    ]
    return _comparison("planned", rows, tolerance, None)


def compare_resimulated(
    resimulation: Resimulation, answered: Sequence[Sample], tolerance: dict[str, float]
) -> Comparison | None:
    """Compare with the simulation of the same requests; `None` if it contains none of them."""
    known = [s for s in answered if s.index in resimulation.requests]
    if not known:
        return None
    rows = [row for metric in PAIRED for row in _paired(metric, resimulation, known)]
    gaps = summarise([gap for s in known for gap in s.gaps_s])
    paced = resimulation.at_pace
    if gaps:
        rows += [
            _row("itl", statistic, resimulation.itl[statistic], gaps.at(statistic))
            for statistic in PERCENTILES
            if statistic in resimulation.itl and gaps.at(statistic) > 0
        ]
    if paced is not None:
        errors = {
            (row.metric, row.statistic): row.error_fraction
            for metric in PAIRED
            for row in _paired(metric, paced, known)
        }
        rows = [
            replace(row, error_at_pace_fraction=errors.get((row.metric, row.statistic)))
            for row in rows
        ]
    compared = _comparison("resimulated", rows, tolerance, compare_phases(resimulation, known))
    return replace(compared, pace={} if paced is None else paced.pace)


def _paired(metric: str, resimulation: Resimulation, known: Sequence[Sample]) -> Iterator[Compared]:
    """Compare one metric request by request; the randomness of arrivals cancels."""
    pairs = [
        (predicted_s, measured_s)
        for s in known
        if (predicted_s := getattr(resimulation.requests[s.index], f"{metric}_s")) is not None
        and (measured_s := getattr(s, f"{metric}_s")) is not None
    ]
    if not pairs:
        return
    predicted, measured = np.array(pairs).T
    theirs, ours = summarise(predicted.tolist()), summarise(measured.tolist())
    errors = differences(measured, predicted, PERCENTILES, paired=True)
    for statistic, error in zip(PERCENTILES, errors, strict=True):
        if theirs and ours and (measured_s := ours.at(statistic)) > 0:
            row = _row(metric, statistic, theirs.at(statistic), measured_s)
            yield replace(row, error_low=error.low / measured_s, error_high=error.high / measured_s)


def _row(metric: str, statistic: str, predicted_s: float, measured_s: float) -> Compared:
    return Compared(
        metric=metric,
        statistic=statistic,
        predicted_s=predicted_s,
        measured_s=measured_s,
        error_fraction=predicted_s / measured_s - 1,
    )


def _comparison(
    source: str, rows: Sequence[Compared], tolerance: dict[str, float], phases: PhaseTable | None
) -> Comparison:
    means = {r.metric: abs(r.judged_error_fraction) for r in rows if r.statistic == "mean"}
    held = all(metric in means and means[metric] <= most for metric, most in tolerance.items())
    return Comparison(
        source=source, rows=tuple(rows), tolerance=tolerance, held=held, phases=phases
    )
