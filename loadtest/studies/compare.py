"""Comparison of two runs, for example before and after a change, with significance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from loadtest.verdict.slo import good, undecided
from loadtest.verdict.verdict import PROVES_NOTHING
from minicluster.errors import Fault, InputError
from minicluster.stats.bootstrap import MANY_RESAMPLES, differences, holm
from minicluster.stats.confidence import design_effect
from minicluster.stats.quantiles import summarise
from minicluster.stats.shares import share_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.run.folder import Run
    from loadtest.verdict.verdict import Judged
    from minicluster.workload.samples import Sample

SCHEMA_VERSION = 2
"""Version of `loadtest compare --json`; 2 has `good`, p-values and joint significance (Holm)."""
METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """
    One statistic of one latency in both runs, over the answered requests.

    Attributes:
        low_s, high_s: 95 % interval of second minus first.
        p_value: of this statistic alone, two-sided; *significant* at 5 % for all together.
    """

    metric: str
    statistic: str
    first_s: float
    second_s: float
    low_s: float
    high_s: float
    p_value: float
    significant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodChange:
    """The fraction of requests that met the SLO, second minus first; no answer is a miss."""

    difference: float
    low: float
    high: float
    p_value: float
    significant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run: its load, and the fraction of it that met the SLO."""

    name: str
    requests: int
    answered: int
    offered_requests_per_s: float
    good_requests_per_s: float
    good_fraction: float
    good_low: float
    good_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """
    Two runs compared; `loadtest compare --json` prints exactly this.

    Attributes:
        paired: whether both had the same schedule, and are compared request by request.
        notes: reasons why the comparison is weaker than it looks.
    """

    schema_version: int
    paired: bool
    first: Side
    second: Side
    good: GoodChange
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def compare_runs(first: Judged, second: Judged, names: tuple[str, str]) -> RunComparison:
    """
    Compare *second* with *first*, each judged by its own SLO.

    Runs of the same schedule are compared request by request: the randomness of arrivals and
    lengths is the same in both and cancels.

    Raises InputError: one of the runs has no answered request.
    """
    both = (first, second)
    windows = [judged.window for judged in both]
    for name, window in zip(names, windows, strict=True):
        if not window.answered:
            raise InputError(
                name, Fault("has no answered request"), "a run with at least one answer"
            )
    paired = _same_schedule(first.run, second.run)
    sides = tuple(map(_side, names, both))
    good = _good_change(both, sides, paired=paired)
    changes = [
        change
        for metric in METRICS
        for change in _changes(metric, [window.answered for window in windows], paired=paired)
    ]
    good_mark, *marks = holm([good.p_value, *(change.p_value for change in changes)])
    return RunComparison(
        schema_version=SCHEMA_VERSION,
        paired=paired,
        first=sides[0],
        second=sides[1],
        good=replace(good, significant=good_mark),
        changes=tuple(
            replace(change, significant=mark) for change, mark in zip(changes, marks, strict=True)
        ),
        notes=_notes(both, sides),
    )


def _by_index(metric: str, answered: Sequence[Sample]) -> dict[int, float]:
    return {s.index: v for s in answered if (v := getattr(s, f"{metric}_s")) is not None}


def _changes(metric: str, answered: list[tuple[Sample, ...]], *, paired: bool) -> Iterator[Change]:
    """Compare one latency; nothing if one of the runs has none."""
    columns = [_by_index(metric, samples) for samples in answered]
    ours, theirs = (summarise(list(column.values())) for column in columns)
    if not (ours and theirs):
        return
    both = sorted(columns[0].keys() & columns[1].keys()) if paired else []
    first, second = (
        np.array([column[index] for index in both] or list(column.values())) for column in columns
    )
    apart = differences(first, second, STATISTICS, paired=bool(both), resamples=MANY_RESAMPLES)
    for statistic, found in zip(STATISTICS, apart, strict=True):
        yield Change(
            metric=metric,
            statistic=statistic,
            first_s=ours.at(statistic),
            second_s=theirs.at(statistic),
            low_s=found.low,
            high_s=found.high,
            p_value=found.p_value,
        )


def _good_change(runs: tuple[Judged, Judged], sides: Sequence[Side], *, paired: bool) -> GoodChange:
    """Compare the good fractions; if paired, of the requests that count in both runs."""
    counted = [_decided(judged) for judged in runs]
    if paired:
        counted = [sorted({*counted[0]} & {*counted[1]})] * 2
    met = [good(run.promises, {s.index: s for s in window.answered}) for run, window, *_ in runs]
    first, second = (
        np.array([index in good_ones for index in indices], dtype=np.float64)
        for good_ones, indices in zip(met, counted, strict=True)
    )
    (found,) = differences(first, second, ("mean",), paired=paired, resamples=MANY_RESAMPLES)
    return GoodChange(
        difference=sides[1].good_fraction - sides[0].good_fraction,
        low=found.low,
        high=found.high,
        p_value=found.p_value,
    )


def _side(name: str, judged: Judged) -> Side:
    run, window = judged.run, judged.window
    decided = {*_decided(judged)}
    counted = [s for s, at in zip(window.requests, window.indices, strict=True) if at in decided]
    num = len(counted)
    met = good(run.promises, {s.index: s for s in window.answered})
    ttft = np.array([s.ttft_s if s and s.ok else np.inf for s in counted])
    interval = share_interval(len(met) / num, num, design_effect(ttft).adjusted)
    return Side(
        name=name,
        requests=num,
        answered=len(window.answered),
        offered_requests_per_s=len(window.requests) / window.counted.length_s,
        good_requests_per_s=len(met) / window.counted.length_s,
        good_fraction=len(met) / num,
        good_low=interval.low,
        good_high=interval.high,
    )


def _decided(judged: Judged) -> list[int]:
    """Return the requests that count: not those in flight at the end of a run cut short."""
    run, window = judged.run, judged.window
    unknown = {
        s.index
        for _, slo, own in run.promises
        for s in window.among(own)
        if s is not None and undecided(slo, s)
    }
    return [index for index in window.indices if index not in unknown]


def _same_schedule(first: Run, second: Run) -> bool:
    if first.job.shape.closed or second.job.shape.closed:
        return False
    sides = [
        [(r.index, r.due_s, r.input_tokens, r.output_tokens) for r in run.schedule if r.in_window]
        for run in (first, second)
    ]
    return sides[0] == sides[1]


def _notes(both: tuple[Judged, Judged], sides: Sequence[Side]) -> tuple[str, ...]:
    runs = [judged.run for judged in both]
    one, two = (run.job for run in runs)
    notes = [
        f"the {name} run: {remark}"
        for run, name in zip(runs, ("first", "second"), strict=True)
        for remark in (*run.job.caveats, *run.job.remarks)
    ]
    if one.model != two.model:
        notes.append(f"the models differ: {one.model} and {two.model}")
    if one.workload != two.workload:
        notes.append("the workloads differ, which alone may explain other latencies")
    if one.slo != two.slo:
        notes.append("the SLOs differ: the goodput of each run is by its own SLO")
    if runs[0].client.machine != runs[1].client.machine:
        notes.append("the client machines differ")
    lost = [f"{side.requests - side.answered} of {side.requests}" for side in sides]
    if len({side.answered / side.requests for side in sides}) > 1:
        notes.append(
            f"{lost[0]} requests of the first run have no answer, {lost[1]} of the second: "
            "latencies cover the answered requests only"
        )
    for judged, name in zip(both, ("first", "second"), strict=True):
        verdict = judged.verdict
        if verdict.verdict in PROVES_NOTHING:
            why = "; ".join(verdict.reasons)
            notes.append(f"the {name} run proves nothing by itself, it is {verdict.verdict}: {why}")
    return tuple(notes)
