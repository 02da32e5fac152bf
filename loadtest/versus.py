"""Two runs beside each other: before and after, or split against aggregated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadtest.confidence import cautious, design_effect, share_interval
from loadtest.evidence import evidence_of
from loadtest.promise import count_good
from loadtest.significance import difference
from loadtest.spread import spread
from sizing.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadtest.run import Run
    from loadtest.samples import Sample

SCHEMA_VERSION = 1
METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """
    One statistic of both runs.

    Attributes:
        low_s, high_s: 95 % interval of second less first.
        significant: 0 lies outside.
    """

    metric: str
    statistic: str
    first_s: float
    second_s: float
    low_s: float
    high_s: float
    significant: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run: its load and how much of it met the SLO."""

    name: str
    requests: int
    answered: int
    offered_requests_per_s: float
    good_requests_per_s: float
    good_fraction: float
    good_low: float
    good_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """
    Two runs compared; `loadtest compare --json` prints exactly this.

    Attributes:
        paired: both had the same schedule, so that request by request is compared.
        notes: what makes the comparison weaker than it looks.
    """

    schema_version: int
    paired: bool
    first: Side
    second: Side
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def compare_runs(first: Run, second: Run, names: tuple[str, str]) -> Versus:
    """
    Compare *second* with *first*, judged by the SLO of each.

    Runs of the same schedule are compared request by request: what chance did to arrivals and
    lengths is the same in both and cancels.

    Raises:
        InputError: nothing was answered in one of them.
    """
    answered = [evidence_of(run).answered for run in (first, second)]
    for name, each in zip(names, answered, strict=True):
        if not each:
            raise InputError(name, "no request answered", "a run to compare with")
    paired = _same_schedule(first, second)
    changes = [
        _change(metric, statistic, answered, paired=paired)
        for metric in METRICS
        for statistic in STATISTICS
        if all(_values(metric, each).size for each in answered)
    ]
    return Versus(
        schema_version=SCHEMA_VERSION,
        paired=paired,
        first=_side(first, names[0]),
        second=_side(second, names[1]),
        changes=tuple(changes),
        notes=_notes(first, second),
    )


def to_json(versus: Versus) -> str:
    """Write *versus* as JSON."""
    return json.dumps(asdict(versus), indent=2, allow_nan=False) + "\n"


def _values(metric: str, answered: Sequence[Sample]) -> NDArray[np.float64]:
    return np.array([v for s in answered if (v := getattr(s, f"{metric}_s")) is not None])


def _change(
    metric: str, statistic: str, answered: list[tuple[Sample, ...]], *, paired: bool
) -> Change:
    columns = [_values(metric, each) for each in answered]
    tested = columns
    if paired:
        both = set.intersection(
            *({s.index for s in each if getattr(s, f"{metric}_s") is not None} for each in answered)
        )
        paired = bool(both)
        tested = [_values(metric, [s for s in each if s.index in both]) for each in answered]
    first, second = tested if paired else columns
    apart = difference(first, second, statistic, paired=paired)
    ours, theirs = (spread(column.tolist()) for column in columns)
    return Change(
        metric=metric,
        statistic=statistic,
        first_s=ours.at(statistic) if ours else 0.0,
        second_s=theirs.at(statistic) if theirs else 0.0,
        low_s=apart.low_s,
        high_s=apart.high_s,
        significant=apart.significant,
    )


def _side(run: Run, name: str) -> Side:
    evidence = evidence_of(run)
    good = count_good(run.job.slo, evidence.answered)
    share = good / len(evidence.requests)
    ttft = np.array([s.ttft_s if s and s.ok else np.inf for s in evidence.requests])
    around = share_interval(share, len(evidence.requests), cautious(design_effect(ttft)))
    return Side(
        name=name,
        requests=len(evidence.requests),
        answered=len(evidence.answered),
        offered_requests_per_s=len(evidence.requests) / evidence.length_s,
        good_requests_per_s=good / evidence.length_s,
        good_fraction=share,
        good_low=around.low,
        good_high=1.0 if around.high is None else around.high,
    )


def _same_schedule(first: Run, second: Run) -> bool:
    """Whether both sent the same requests at the same times, and the loop was open."""
    if first.job.shape.closed or second.job.shape.closed:
        return False
    sides = [
        [(r.index, r.due_s, r.input_tokens, r.output_tokens) for r in run.schedule if r.in_window]
        for run in (first, second)
    ]
    return sides[0] == sides[1]


def _notes(first: Run, second: Run) -> tuple[str, ...]:
    one, two = first.job, second.job
    notes = []
    if one.model != two.model:
        notes.append(f"the models differ: {one.model} and {two.model}")
    if one.workload != two.workload:
        notes.append("the workloads differ: so may latencies for that reason alone")
    if one.slo != two.slo:
        notes.append("the SLOs differ: goodput counts what met each run's own")
    if first.client.machine != second.client.machine:
        notes.append("the client machines differ")
    for run, name in ((first, "first"), (second, "second")):
        if run.client.stop != "complete":
            notes.append(f"the {name} run was {run.client.stop}")
    return tuple(notes)
