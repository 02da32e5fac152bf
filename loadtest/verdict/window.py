"""The requests of a run that count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.stats.warmup import mser5_of_measured
from minicluster.workload.arrivals import CONTENT_TOKENS
from minicluster.workload.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from loadtest.run.folder import Run
    from loadtest.run.schedule import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """
    Where a run settles.

    Attributes:
        start_s: what arrives from here on counts; behind the window's own start if the run
            settled later.
        settled: whether latencies had settled by the middle of the run (MSER-5).
        rising: they had not, for they rose to the end.
    """

    start_s: float
    settled: bool
    rising: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementWindow:
    """
    What a verdict rests on.

    Attributes:
        requests: scheduled in the window and after the warm-up, in the order of their arrival;
            `None`: never sent.
        settling: where they begin, and whether the run had settled there.
        length_s: from there to the end of the window.
        cached_fraction: share of prompt tokens from the prefix cache, beyond those that the
            workload shares and those of a conversation's turns before; `None` where the endpoint
            does not tell.
    """

    requests: tuple[Sample | None, ...]
    settling: SteadyState
    length_s: float
    cached_fraction: float | None

    @property
    def sent(self) -> tuple[Sample, ...]:
        """Those that were sent."""
        return tuple(s for s in self.requests if s is not None)

    @property
    def answered(self) -> tuple[Sample, ...]:
        """Those whose whole answer came."""
        return tuple(s for s in self.requests if s is not None and s.ok)


def evidence_of(run: Run) -> MeasurementWindow:
    """
    Cut the warm-up: what the window leaves out, and what MSER-5 finds unsettled behind it.

    No more than half of the window is cut, and nothing of a closed loop or of a load that
    changes by itself, where latencies are not meant to settle.
    """
    window, end_s = run.job.window, run.job.window.end_s
    settling = SteadyState(start_s=window.start_s, settled=True, rising=False)
    if not (run.job.shape.closed or run.job.shape.stages):
        came = sorted((s for s in run.samples if s.due_s < end_s), key=lambda s: s.due_s)
        ttft_s = np.array([s.ttft_s if s.ok else math.inf for s in came])
        settling = settling_of(np.array([s.due_s for s in came]), ttft_s, window)
    by_index = {s.index: s for s in run.samples}
    planned = [(by_index.get(r.index), r.due_s) for r in run.schedule if r.in_window]
    placed = [(s.due_s if s else due_s, s) for s, due_s in planned]
    kept = [s for due_s, s in sorted(placed, key=lambda pair: pair[0]) if due_s >= settling.start_s]
    if run.job.shape.closed:
        kept = [s for _, s in placed]
    return MeasurementWindow(
        requests=tuple(kept),
        settling=settling,
        length_s=end_s - settling.start_s,
        cached_fraction=_cached(run, [s for s in kept if s and s.ok]),
    )


def settling_of(
    due_s: NDArray[np.float64], ttft_s: NDArray[np.float64], window: Window
) -> SteadyState:
    """
    Find where a run settles, in the first half of its window.

    Args:
        due_s: arrivals up to the window's end, warm-up included, ascending, shape (n,).
        ttft_s: of each, infinite without an answer, shape (n,).
        window: of the run.
    """
    cut, settled = mser5_of_measured(ttft_s)
    start_s = window.start_s
    if cut:
        start_s = min(max(start_s, float(due_s[cut])), (start_s + window.end_s) / 2)
    return SteadyState(start_s=start_s, settled=settled, rising=not settled and _rises(ttft_s))


def _rises(values: NDArray[np.float64]) -> bool:
    """Whether each quarter of a run is slower than the one before."""
    finite = np.minimum(values, values[np.isfinite(values)].max())
    medians = [float(np.median(part)) for part in np.array_split(finite, 4)]
    return medians == sorted(medians) and medians[-1] > medians[0]


def _cached(run: Run, answered: Sequence[Sample]) -> float | None:
    """Share of prompt tokens that the server had, less what prompts share by the workload."""
    told = [s for s in answered if s.cached_tokens is not None]
    if not told:
        return None
    template = run.job.chat.overhead_tokens if run.job.chat else 0
    prefix, content = max(run.job.workload.prefix_tokens, template), run.content
    shared = {s.index: CONTENT_TOKENS * len(content.get(s.index, ())) or prefix for s in told}
    shared |= _said_before(run, shared)
    beyond = sum(max(0, (s.cached_tokens or 0) - shared[s.index]) for s in told)
    return beyond / sum(s.asked_input_tokens for s in told)


def _said_before(run: Run, shared: Mapping[int, int]) -> dict[int, int]:
    """Tokens of the turns before: a prompt that goes on with a conversation holds them all."""
    by_index = {r.index: r for r in run.schedule}
    before = {
        r.index: by_index[r.previous]
        for r in run.schedule
        if r.session is not None and r.previous in by_index and r.index in shared
    }
    return {
        index: max(shared[index], last.input_tokens + last.output_tokens)
        for index, last in before.items()
    }
