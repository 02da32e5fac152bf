"""The phases of a request, predicted and measured, and the phase that explains the error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.verdict.resimulation import PredictedRequest, Resimulation
    from minicluster.workload.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    Mean seconds of one phase over the requests that were both simulated and answered.

    Attributes:
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

PREFILL_WHOLE = ("queue", "prefill")
PULL = ("decode admission", "kv transfer")
FIRST_STEP = ("first decode step",)
"""Phases of the simulation, grouped as the endpoint's timings can separate them."""


def compare_phases(resimulation: Resimulation, measured: Sequence[Sample]) -> PhaseTable | None:
    """
    Compare the phases as far as the endpoint reports them; `None` without a common request.

    Without `Server-Timing` there are two phases: up to the first token, and decode. With it
    prefill and hand-off are separate; prefill's queue and its step if the header has them, and
    the KV transfer and the first step if decode's engine reports its own times (vLLM's `metrics`).
    """
    known = resimulation.requests
    pairs = [(known[s.index], s) for s in measured if s.ok and s.index in known]
    if not pairs:
        return None
    timed = [(p, s) for p, s in pairs if {"prefill", "handoff"} <= s.phases_s.keys()]
    rows = _server_phases(timed) if timed else _client_phases(pairs)
    total = sum(abs(row.difference_s) for row in rows)
    worst = max(rows, key=lambda row: abs(row.difference_s))
    return PhaseTable(
        rows=tuple(rows),
        explains=worst.name,
        share_fraction=abs(worst.difference_s) / total if total else 0.0,
        count=len(timed or pairs),
    )


def _server_phases(pairs: Pairs) -> list[Phase]:
    network = _phase(
        "network path to the engines",
        pairs,
        lambda p: p.ttft_s - _sum(p, (*PREFILL_WHOLE, *PULL, *FIRST_STEP)),
        lambda s: s.ttft_s - s.phases_s["prefill"] - s.phases_s["handoff"],
    )
    return [network, *_prefill(pairs), *_handoff(pairs), _decode(pairs)]


def _client_phases(pairs: Pairs) -> list[Phase]:
    first = _phase("up to the first token", pairs, lambda p: p.ttft_s, lambda s: s.ttft_s)
    return [first, _decode(pairs)]


def _prefill(pairs: Pairs) -> list[Phase]:
    if not _all_report("step", pairs):
        return [_phase("prefill and its queue", pairs, _whole(PREFILL_WHOLE), _prefill_s)]
    return [
        _phase("prefill queue", pairs, _whole(("queue",)), lambda s: _prefill_s(s) - _step_s(s)),
        _phase("prefill", pairs, _whole(("prefill",)), _step_s),
    ]


def _handoff(pairs: Pairs) -> list[Phase]:
    """Compare hand-off to the decode pool; no rows where the pools are not split."""
    parts = (*PULL, *FIRST_STEP)
    if all(_is_local(s) for _, s in pairs):
        return []
    if not _all_report("time_to_first_token", pairs):
        return [_phase("KV transfer and first step", pairs, _whole(parts), _handoff_s)]
    return [
        _phase("KV transfer", pairs, _whole(PULL), lambda s: _handoff_s(s) - _first_step_s(s)),
        _phase("first decode step", pairs, _whole(FIRST_STEP), _first_step_s),
    ]


def _decode(pairs: Pairs) -> Phase:
    return _phase("decode", pairs, lambda p: p.e2e_s - p.ttft_s, lambda s: s.e2e_s - s.ttft_s)


def _all_report(name: str, pairs: Pairs) -> bool:
    return all(name in s.phases_s for _, s in pairs)


def _is_local(sample: Sample) -> bool:
    """Whether the decode replica computed the prompt: no prefill engine took a step for it."""
    return sample.phases_s.get("step") == 0


def _prefill_s(sample: Sample) -> float:
    """Return queue and prefill, in either pool."""
    phases_s = sample.phases_s
    return phases_s["prefill"] + (phases_s["handoff"] if _is_local(sample) else 0.0)


def _step_s(sample: Sample) -> float:
    """Return prefill alone, from being scheduled to its token."""
    phases_s = sample.phases_s
    if _is_local(sample):
        return min(phases_s["handoff"], phases_s.get("time_to_first_token", phases_s["handoff"]))
    return phases_s["step"]


def _handoff_s(sample: Sample) -> float:
    """Return the time from prefill's answer to the first token; 0 for a local prefill."""
    return 0.0 if _is_local(sample) else sample.phases_s["handoff"]


def _first_step_s(sample: Sample) -> float:
    """Return the part of the hand-off after the KV cache is there: vLLM counts from then."""
    return min(_handoff_s(sample), sample.phases_s["time_to_first_token"])


def _phase(
    name: str,
    pairs: Pairs,
    predicted: Callable[[PredictedRequest], float],
    measured: Callable[[Sample], float],
) -> Phase:
    predicted_s = sum(predicted(p) for p, _ in pairs) / len(pairs)
    measured_s = sum(measured(s) for _, s in pairs) / len(pairs)
    return Phase(
        name=name,
        predicted_s=predicted_s,
        measured_s=measured_s,
        difference_s=predicted_s - measured_s,
    )


def _whole(names: Sequence[str]) -> Callable[[PredictedRequest], float]:
    return lambda request: _sum(request, names)


def _sum(request: PredictedRequest, names: Sequence[str]) -> float:
    return sum(request.phases_s.get(name, 0.0) for name in names)
