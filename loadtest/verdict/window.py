"""The measurement window of a run: which requests count, and from when on it was steady."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.warmup import FEWEST_GROUPS, GROUP, mser5_of_measured, rises
from minicluster.workload.arrivals import CONTENT_TOKENS
from minicluster.workload.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from numpy.typing import NDArray

    from loadtest.run.folder import Run
    from loadtest.run.schedule import Window
    from minicluster.workload.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPart:
    """
    The part of the run that counts, without what MSER-5 cut as unsettled.

    Attributes:
        start_s: least arrival; later than the window's own start if latencies settled later.
        settled: whether latencies had settled by the middle of the run (MSER-5); of a run of
            fewer than 160 requests, whether they did not rise.
        rising: whether they rose to the end instead.
        cached_fraction: fraction of prompt tokens from the prefix cache, beyond those that the
            workload shares and those of earlier turns; `None` if the endpoint does not report it.
    """

    start_s: float
    length_s: float
    settled: bool = True
    rising: bool = False
    cached_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementWindow:
    """
    The requests that a verdict counts, in the order of their arrival, and their indices.

    Attributes:
        requests: `None`: never sent; of a run that was cut short, those that were sent.
        counted: when they arrived, and whether latencies had settled by then.
    """

    requests: tuple[Sample | None, ...]
    indices: tuple[int, ...]
    counted: CountedPart

    def among(self, indices: Container[int]) -> tuple[Sample | None, ...]:
        """Return those of the requests that are among *indices*."""
        pairs = zip(self.indices, self.requests, strict=True)
        return tuple(request for index, request in pairs if index in indices)

    @property
    def sent(self) -> tuple[Sample, ...]:
        """The requests that were sent."""
        return tuple(s for s in self.requests if s is not None)

    @property
    def answered(self) -> tuple[Sample, ...]:
        """The requests with a complete answer."""
        return tuple(s for s in self.requests if s is not None and s.ok)


def measurement_window(run: Run) -> MeasurementWindow:
    """
    Cut the warm-up: everything before the window, and what MSER-5 finds unsettled within it.

    At most half of the window is cut; nothing of a closed loop, nor of a load with stages, whose
    latencies are not meant to settle.
    """
    window, shape = run.job.window, run.job.shape
    counted = CountedPart(start_s=window.start_s, length_s=window.length_s)
    if not (shape.closed or shape.stages):
        ended = (s for s in run.samples if s.outcome != "unfinished" and s.due_s < window.end_s)
        arrived = sorted(ended, key=lambda s: s.due_s)
        ttft_s = np.array([s.ttft_s if s.ok else math.inf for s in arrived])
        counted = steady_part(np.array([s.due_s for s in arrived]), ttft_s, window)
    by_index = {s.index: s for s in run.samples}
    planned = [
        (r.index, by_index.get(r.index), r.due_s)
        for r in run.schedule
        if r.in_window and (r.index in by_index or not run.cut_short)
    ]
    placed = [(s.due_s if s else due_s, index, s) for index, s, due_s in planned]
    if not shape.closed:
        placed = sorted((p for p in placed if p[0] >= counted.start_s), key=lambda one: one[0])
    kept = tuple(s for _, _, s in placed)
    cached = _cached(run, [s for s in kept if s and s.ok])
    return MeasurementWindow(
        requests=kept,
        indices=tuple(index for _, index, _ in placed),
        counted=replace(counted, cached_fraction=cached),
    )


def steady_part(
    due_s: NDArray[np.float64], ttft_s: NDArray[np.float64], window: Window
) -> CountedPart:
    """
    Find where latencies settle, in the first half of the window.

    Args:
        due_s: arrivals up to the window's end, warm-up included, ascending, shape (n,).
        ttft_s: their TTFT, infinite without an answer, shape (n,).
        window: as scheduled.
    """
    start_s = window.start_s
    if len(ttft_s) < FEWEST_GROUPS * GROUP:
        rising = rises(ttft_s[due_s >= start_s])
        return CountedPart(
            start_s=start_s, length_s=window.length_s, settled=not rising, rising=rising
        )
    cut, settled = mser5_of_measured(ttft_s)
    if cut:
        start_s = min(max(start_s, float(due_s[cut])), (start_s + window.end_s) / 2)
    return CountedPart(
        start_s=start_s,
        length_s=window.end_s - start_s,
        settled=settled,
        rising=not settled and _rises(ttft_s),
    )


def _rises(values: NDArray[np.float64]) -> bool:
    """Whether the median of each quarter of a run is higher than the one before."""
    finite = np.minimum(values, values[np.isfinite(values)].max())
    medians = [float(np.median(part)) for part in np.array_split(finite, 4)]
    return medians == sorted(medians) and medians[-1] > medians[0]


def _cached(run: Run, answered: Sequence[Sample]) -> float | None:
    """Return the fraction of prompt tokens that were cached beyond what the workload shares."""
    reported = [s for s in answered if s.cached_tokens is not None]
    if not reported:
        return None
    template = run.job.chat.overhead_tokens if run.job.chat else 0
    scheduled = {r.index: r for r in run.schedule}

    def shared(request: ScheduledRequest) -> int:
        """Return the tokens of its trace's blocks or the prefix, or those of its earlier turns."""
        prefix = request.prefix_tokens or run.job.workload.prefix_tokens
        beginning = CONTENT_TOKENS * len(request.content) or max(prefix, template)
        if request.session is None or request.previous is None:
            return beginning
        earlier = scheduled[request.previous]
        return max(beginning, earlier.input_tokens + earlier.output_tokens)

    cached = ((s.cached_tokens or 0) - shared(scheduled[s.index]) for s in reported)
    return sum(max(0, beyond) for beyond in cached) / sum(s.asked_input_tokens for s in reported)
