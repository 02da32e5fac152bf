"""The phases of a request, predicted and measured, and the phase that explains the error."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from minicluster.phases import DECODE, HANDOFF, INGRESS, QUEUED_PREFILL, SUMS, phase_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.verdict.resimulation import PredictedRequest, Resimulation
    from minicluster.workload.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    Mean seconds of one phase over the requests that were both simulated and answered.

    Attributes:
        name: one of `minicluster.phases`, or `ttft`.
        difference_s: predicted minus measured.
    """

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
    known = resimulation.requests
    pairs = [(known[s.index], s) for s in measured if s.ok and s.index in known]
    if not pairs:
        return None
    timed = [pair for pair in pairs if _report([pair], (QUEUED_PREFILL, HANDOFF))]
    rows = _server_rows(timed) if timed else [_row("ttft", pairs, attrgetter("ttft_s"))]
    rows.append(_row(DECODE, timed or pairs, lambda request: request.e2e_s - request.ttft_s))
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
    rows = [_row(INGRESS, pairs, _seconds(INGRESS), _outside_engines_s)]
    handed = any(_seconds(HANDOFF)(request) for pair in pairs for request in pair)
    for whole in (QUEUED_PREFILL, HANDOFF) if handed else (QUEUED_PREFILL,):
        names = SUMS[whole] if _report(pairs, SUMS[whole]) else (whole,)
        rows += [_row(name, pairs, _seconds(name)) for name in names]
    return rows


def _report(pairs: Pairs, names: Sequence[str]) -> bool:
    return all(phase_s(s.phases_s, name) is not None for _, s in pairs for name in names)


def _seconds(name: str) -> Callable[[PredictedRequest | Sample], float]:
    return lambda request: phase_s(request.phases_s, name) or 0.0


def _outside_engines_s(sample: Sample) -> float:
    return sample.ttft_s - _seconds(QUEUED_PREFILL)(sample) - _seconds(HANDOFF)(sample)


def _row(
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
