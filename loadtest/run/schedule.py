"""The schedule of a run: arrival times and lengths of its requests, drawn from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import Fault, InputError
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.sources import RequestSource, drawn
from minicluster.workload.trace_options import AS_FOUND, TraceReading
from minicluster.workload.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from minicluster.specs.workload import WorkloadSpec
    from minicluster.workload.schedule import ScheduledRequest


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
    per_s = stages[-1].end_per_s or stages[-1].requests / stages[-1].duration_s
    return RateStage(start_per_s=per_s, end_per_s=per_s, duration_s=1.0)


MAX_REQUESTS = 1_000_000
"""Largest number of requests of a run: one process keeps schedule and answers in memory."""

WARMUP_ROUNDS = 3  # requests of each user of a closed loop before those that count


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """
    The scheduled arrivals that count: those in [start_s, end_s).

    Arrivals continue after the window, for at most `drain_s`, so that its last requests meet the
    same load as its first.
    """

    start_s: float
    end_s: float
    drain_s: float

    @property
    def length_s(self) -> float:
        """Length of the window."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalShape:
    """How requests arrive; *stages* are changing rates, empty: the workload's rate."""

    source: RequestSource = field(default_factory=RequestSource)
    stages: tuple[RateStage, ...] = ()
    skip_unanswered: bool = False
    reading: TraceReading = AS_FOUND

    def __post_init__(self) -> None:
        if self.stages and self.closed:
            raise InputError("--stages", "with --users", "one of both: a closed loop has no rate")

    @property
    def closed(self) -> bool:
        """Whether users wait for answers, so that arrivals are not known in advance."""
        return self.source.users is not None


def draw(
    workload: WorkloadSpec, shape: ArrivalShape, window: Window, *, seed: int, num_requests: int = 0
) -> tuple[ScheduledRequest, ...]:
    """
    Draw the requests of a run; equal seeds, equal schedules, as the simulator's.

    A conversation counts as a whole if its first turn lies in *window*; in a closed loop
    *num_requests* count.

    Raises InputError: more than `MAX_REQUESTS`, or none in the window.
    """
    if shape.closed:
        return _closed_loop(workload, shape.source, num_requests, seed)
    arrivals = _open_loop(workload, shape, window.end_s + window.drain_s, seed)
    starts = _starts_s(arrivals, shape)
    counts = (window.start_s <= starts) & (starts < window.end_s)
    if not counts.any():
        raise InputError(
            "the measured window",
            Fault(
                f"is empty: nothing arrives between {window.start_s:g} s, the warm-up, and"
                f" {window.end_s:g} s, the end of the {'trace' if workload.trace else 'run'}"
            ),
            f"requests after the warm-up, at {workload.requests_per_s:g} a second",
            "a shorter --warmup, or a longer run",
        )
    return arrivals.requests(counts)


def window_of(
    workload: WorkloadSpec,
    shape: ArrivalShape,
    base: Window,
    *,
    num_requests: int | None,
    seed: int,
) -> Window:
    """
    Return *base* with an end such that *num_requests* of the arrivals of *seed* are inside.

    `None` stands for all requests of a trace. Conversations count as a whole, so that there may
    be a few requests more.

    Raises InputError: a trace has fewer requests.
    """
    wanted = -(-(num_requests or 0) // shape.source.turns)
    # Ten standard deviations more than needed: the arrival that closes the window is there.
    spread = (shape.source.gap_cv or 1.0) * math.sqrt(wanted)
    longest_s = (wanted + 10 * spread + 10) * shape.source.turns / workload.requests_per_s
    horizon_s = math.inf if workload.trace else base.start_s + longest_s
    arrivals = _open_loop(workload, shape, horizon_s, seed)
    first = arrivals.due_s[_starts_s(arrivals, shape) == arrivals.due_s]
    first = first[first >= base.start_s]
    if workload.trace and num_requests in {None, len(first)}:
        return replace(base, end_s=float(arrivals.due_s[-1]) + 1 / workload.requests_per_s)
    if len(first) <= wanted:
        raise InputError(
            "--requests",
            num_requests,
            f"at most {len(first)}: no more arrive after {base.start_s:g} s",
            "a shorter --warmup, or all of a trace by leaving --requests out",
        )
    return replace(base, end_s=float(first[wanted - 1] + first[wanted]) / 2)


def share(
    requests: Sequence[ScheduledRequest], part: int, parts: int
) -> tuple[ScheduledRequest, ...]:
    """
    Return the share of worker *part*: each *parts*-th arrival, and the requests that follow it.

    The union over all workers is exactly *requests*, so that their number changes no arrival.
    """
    owner: dict[int, int] = {}
    roots = 0
    for request in requests:
        if request.previous is None:
            owner[request.index] = roots % parts
            roots += 1
        else:
            owner[request.index] = owner[request.previous]
    return tuple(r for r in requests if owner[r.index] == part)


def _open_loop(
    workload: WorkloadSpec, shape: ArrivalShape, horizon_s: float, seed: int
) -> Arrivals:
    if workload.trace:
        read = read_trace(
            Path(workload.trace), shape.reading, skip_unanswered=shape.skip_unanswered
        )
        # Each request of a trace has its own time: none waits for the answer before, as turns do.
        arrivals = replace(read.arrivals, session=None)
        arrivals = arrivals.with_adapters(workload, np.random.default_rng(seed))
        return _until(arrivals, horizon_s)
    rate, source = workload.requests_per_s, shape.source
    expected = expected_requests(shape.stages, horizon_s) if shape.stages else rate * horizon_s
    if expected > MAX_REQUESTS:
        raise InputError(
            "schedule",
            f"{expected:.3g} requests",
            f"at most {MAX_REQUESTS} for one client",
            "a lower rate or a shorter run",
        )
    spread = (source.gap_cv or 1.0) * math.sqrt(expected * source.turns)
    count = (int(expected + 10 * spread) // source.turns + 10) * source.turns
    arrivals = drawn(workload, source, count=count, seed=seed)
    if shape.stages:
        arrivals = replace(arrivals, due_s=staged(arrivals.due_s, rate, shape.stages))
    return _until(arrivals, horizon_s)


def _starts_s(arrivals: Arrivals, shape: ArrivalShape) -> NDArray[np.float64]:
    """Return the start of each request's conversation: without turns its own arrival."""
    if arrivals.session is None:
        return arrivals.due_s
    return arrivals.due_s[arrivals.session * shape.source.turns]


def _until(arrivals: Arrivals, horizon_s: float) -> Arrivals:
    late = np.flatnonzero(np.isfinite(arrivals.due_s) & (arrivals.due_s >= horizon_s))
    if not len(late):
        return arrivals
    return Arrivals(**{name: column[: late[0]] for name, column in arrivals.columns().items()})


def _closed_loop(
    workload: WorkloadSpec, source: RequestSource, num_requests: int, seed: int
) -> tuple[ScheduledRequest, ...]:
    """Draw each user's warm-up, *num_requests* that count, and more to sustain the load."""
    users = source.users or 0
    first = WARMUP_ROUNDS * users
    count = first + num_requests + max(4 * users, num_requests // 2)
    if count > MAX_REQUESTS:
        raise InputError("schedule", f"{count} requests", f"at most {MAX_REQUESTS} for one client")
    number = np.arange(count)
    counts = (first <= number) & (number < first + num_requests)
    return drawn(workload, source, count=count, seed=seed).requests(counts)
