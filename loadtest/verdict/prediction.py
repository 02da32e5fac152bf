"""Prediction beside measurement: errors of means and percentiles, and whether they are small."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from minicluster.phases import DECODE, HANDOFF, INGRESS, QUEUED_PREFILL, SUMS, phase_s
from minicluster.specs.slo import METRICS, PERCENTILES
from minicluster.stats.bootstrap import differences
from minicluster.stats.quantiles import LatencySummary, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from loadtest.verdict.resimulation import PredictedRequest, Resimulation
    from minicluster.plan import Prediction
    from minicluster.workload.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Mean seconds of a phase over the requests that were simulated and answered."""

    name: str
    predicted_s: float
    measured_s: float
    difference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTable:
    """
    The phases of the E2E latency in the order of the system.

    Their differences add up to the difference of the E2E latency.

    Attributes:
        explains: the phase with the largest difference.
        share_fraction: that difference as a fraction of all absolute differences.
        count: number of requests in the means.
    """

    rows: tuple[Phase, ...]
    explains: str
    share_fraction: float
    count: int


Pairs = list[tuple["PredictedRequest", "Sample"]]


def compare_phases(resimulation: Resimulation, measured: Sequence[Sample]) -> PhaseTable | None:
    """
    Compare the phases as finely as the server reports them; `None` without a common request.

    Without `Server-Timing` there are two: up to the first token, and decode. With it `ingress` is
    what neither engine accounts for, the client's own lag included.
    """
    predicted = resimulation.requests
    pairs = [(predicted[s.index], s) for s in measured if s.ok and s.index in predicted]
    if not pairs:
        return None
    timed = [pair for pair in pairs if _report([pair], (QUEUED_PREFILL, HANDOFF))]
    rows = _server_rows(timed) if timed else [_phase("ttft", pairs, attrgetter("ttft_s"))]
    rows.append(_phase(DECODE, timed or pairs, lambda request: request.e2e_s - request.ttft_s))
    total = sum(abs(row.difference_s) for row in rows)
    worst = max(rows, key=lambda row: abs(row.difference_s))
    return PhaseTable(
        rows=tuple(rows),
        explains=worst.name,
        share_fraction=abs(worst.difference_s) / total if total else 0.0,
        count=len(timed or pairs),
    )


def _server_rows(pairs: Pairs) -> list[Phase]:
    """Compare up to the first token; the hand-off only where there is one."""
    rows = [_phase(INGRESS, pairs, _seconds(INGRESS), _outside_engines_s)]
    handed = any(_seconds(HANDOFF)(request) for pair in pairs for request in pair)
    for whole in (QUEUED_PREFILL, HANDOFF) if handed else (QUEUED_PREFILL,):
        names = SUMS[whole] if _report(pairs, SUMS[whole]) else (whole,)
        rows += [_phase(name, pairs, _seconds(name)) for name in names]
    return rows


def _report(pairs: Pairs, names: Sequence[str]) -> bool:
    return all(phase_s(s.phases_s, name) is not None for _, s in pairs for name in names)


def _seconds(name: str) -> Callable[[PredictedRequest | Sample], float]:
    return lambda request: phase_s(request.phases_s, name) or 0.0


def _outside_engines_s(sample: Sample) -> float:
    return sample.ttft_s - _seconds(QUEUED_PREFILL)(sample) - _seconds(HANDOFF)(sample)


def _phase(
    name: str,
    pairs: Pairs,
    of_request: Callable[[PredictedRequest | Sample], float],
    of_sample: Callable[[Sample], float] | None = None,
) -> Phase:
    """Compare the means of a phase; *of_sample* gives a sample's where it is found otherwise."""
    predicted_s = sum(of_request(p) for p, _ in pairs) / len(pairs)
    measured_s = sum((of_sample or of_request)(s) for _, s in pairs) / len(pairs)
    return Phase(
        name=name,
        predicted_s=predicted_s,
        measured_s=measured_s,
        difference_s=predicted_s - measured_s,
    )


PAIRED = ("ttft", "tpot", "e2e", "longest_stall")
"""Latencies that the simulation gives for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """
    One statistic of one latency; errors are predicted / measured - 1.

    Attributes:
        error_low, error_high: its 95 % interval; `None` for the plan's own prediction.
        error_at_pace_fraction: that of the prediction at the engines' own pace; `None`: not known.
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
        tolerance: largest error of the mean, by metric, that counts as correct.
        held: every mean with a tolerance was measured and is within it (`judged_error_fraction`).
        pace: measured / planned seconds of the engines' steps for the same work, by role.
    """

    source: str
    rows: tuple[Compared, ...]
    tolerance: dict[str, float]
    held: bool
    phases: PhaseTable | None
    pace: dict[str, float] = field(default_factory=dict)

    def row(self, metric: str, statistic: str) -> Compared | None:
        """Return one row; `None` if it was not measured."""
        rows = (r for r in self.rows if (r.metric, r.statistic) == (metric, statistic))
        return next(rows, None)


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
    simulated = [s for s in answered if s.index in resimulation.requests]
    if not simulated:
        return None
    rows = [row for metric in PAIRED for row in _paired(metric, resimulation, simulated)]
    gaps = summarise([gap for s in simulated for gap in s.gaps_s])
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
            for row in _paired(metric, paced, simulated)
        }
        rows = [
            replace(row, error_at_pace_fraction=errors.get((row.metric, row.statistic)))
            for row in rows
        ]
    compared = _comparison("resimulated", rows, tolerance, compare_phases(resimulation, simulated))
    return replace(compared, pace={} if paced is None else paced.pace)


def _paired(
    metric: str, resimulation: Resimulation, simulated: Sequence[Sample]
) -> Iterator[Compared]:
    """Compare one metric request by request; the randomness of arrivals cancels."""
    pairs = [
        (predicted_s, measured_s)
        for s in simulated
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
