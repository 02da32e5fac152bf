"""Where a request's time went, predicted and as the servers saw it, and what explains an error."""

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
    Mean seconds of one phase over the requests that both sides know.

    Attributes:
        difference_s: predicted less measured.
    """

    name: str
    predicted_s: float
    measured_s: float
    difference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTable:
    """
    The phases of E2E in the order of the system; their differences add up to its own.

    Attributes:
        explains: the phase with the largest difference.
        share_fraction: of all differences, regardless of sign.
        count: requests behind the means.
    """

    rows: tuple[Phase, ...]
    explains: str
    share_fraction: float
    count: int


Pairs = list[tuple["PredictedRequest", "Sample"]]

PREFILL_WHOLE = ("queue", "prefill")
PULL = ("decode admission", "kv transfer")
FIRST_STEP = ("first decode step",)
"""Phases of the simulation by where the servers can tell them apart."""


def compare_phases(replay: Resimulation, measured: Sequence[Sample]) -> PhaseTable | None:
    """
    Compare phase by phase, as far as the endpoint tells; `None` if it knows no request.

    Without `Server-Timing` there are two: everything up to the first token, and decode. With it
    prefill and hand-off are apart; prefill's queue and its step if the header has them, and the
    pull and the first step if decode's engine sends its own times (vLLM's `metrics`).
    """
    pairs = [(replay.requests[s.index], s) for s in measured if s.ok and s.index in replay.requests]
    if not pairs:
        return None
    told = [(f, s) for f, s in pairs if {"prefill", "handoff"} <= s.phases_s.keys()]
    rows = _told(told) if told else _untold(pairs)
    total = sum(abs(row.difference_s) for row in rows)
    worst = max(rows, key=lambda row: abs(row.difference_s))
    return PhaseTable(
        rows=tuple(rows),
        explains=worst.name,
        share_fraction=abs(worst.difference_s) / total if total else 0.0,
        count=len(told or pairs),
    )


def _told(pairs: Pairs) -> list[Phase]:
    way = _phase(
        "way to the engines",
        pairs,
        lambda f: f.ttft_s - _sum(f, (*PREFILL_WHOLE, *PULL, *FIRST_STEP)),
        lambda s: s.ttft_s - s.phases_s["prefill"] - s.phases_s["handoff"],
    )
    return [way, *_prefill(pairs), *_handoff(pairs), _decode(pairs)]


def _prefill(pairs: Pairs) -> list[Phase]:
    """Compare the prompt's part: of its queue what is neither step nor engine was routing."""
    if not _all_tell("step", pairs):
        return [_phase("prefill and its queue", pairs, _whole(PREFILL_WHOLE), _prefill_s)]
    return [
        _phase("prefill queue", pairs, _whole(("queue",)), lambda s: _prefill_s(s) - _step_s(s)),
        _phase("prefill", pairs, _whole(("prefill",)), _step_s),
    ]


def _handoff(pairs: Pairs) -> list[Phase]:
    """Compare what is between prefill and the first token; nothing where pools are not split."""
    parts = (*PULL, *FIRST_STEP)
    if all(_is_local(s) for _, s in pairs):
        return []
    if not _all_tell("time_to_first_token", pairs):
        return [_phase("KV transfer and first step", pairs, _whole(parts), _handoff_s)]
    return [
        _phase("KV transfer", pairs, _whole(PULL), lambda s: _handoff_s(s) - _first_step_s(s)),
        _phase("first decode step", pairs, _whole(FIRST_STEP), _first_step_s),
    ]


def _untold(pairs: Pairs) -> list[Phase]:
    first = _phase("up to the first token", pairs, lambda f: f.ttft_s, lambda s: s.ttft_s)
    return [first, _decode(pairs)]


def _decode(pairs: Pairs) -> Phase:
    return _phase("decode", pairs, lambda f: f.e2e_s - f.ttft_s, lambda s: s.e2e_s - s.ttft_s)


def _all_tell(name: str, pairs: Pairs) -> bool:
    return all(name in s.phases_s for _, s in pairs)


def _is_local(sample: Sample) -> bool:
    """Say whether decode computed the prompt: no prefill engine took a step for it."""
    return sample.phases_s.get("step") == 0


def _prefill_s(sample: Sample) -> float:
    """Queue and prefill, in whichever pool."""
    told = sample.phases_s
    return told["prefill"] + (told["handoff"] if _is_local(sample) else 0.0)


def _step_s(sample: Sample) -> float:
    """Prefill, from being scheduled to its token."""
    told = sample.phases_s
    if _is_local(sample):
        return min(told["handoff"], told.get("time_to_first_token", told["handoff"]))
    return told["step"]


def _handoff_s(sample: Sample) -> float:
    """From prefill's answer to the first token; nothing where decode computed the prompt."""
    return 0.0 if _is_local(sample) else sample.phases_s["handoff"]


def _first_step_s(sample: Sample) -> float:
    """Of that, from being scheduled with the KV cache there: vLLM counts from then."""
    return min(_handoff_s(sample), sample.phases_s["time_to_first_token"])


def _phase(
    name: str,
    pairs: Pairs,
    predicted: Callable[[PredictedRequest], float],
    measured: Callable[[Sample], float],
) -> Phase:
    ours = sum(predicted(f) for f, _ in pairs) / len(pairs)
    theirs = sum(measured(s) for _, s in pairs) / len(pairs)
    return Phase(name=name, predicted_s=ours, measured_s=theirs, difference_s=ours - theirs)


def _whole(names: Sequence[str]) -> Callable[[PredictedRequest], float]:
    return lambda foretold: _sum(foretold, names)


def _sum(foretold: PredictedRequest, names: Sequence[str]) -> float:
    return sum(foretold.phases_s.get(name, 0.0) for name in names)
