"""Where a request's time went, predicted and as the servers saw it, and what explains an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.replay import Foretold, Replay
    from loadtest.samples import Sample


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
class Phases:
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


PREFILL_WHOLE = ("queue", "prefill")
HANDOFF = ("decode admission", "kv transfer", "first decode step")


def compare_phases(replay: Replay, measured: Sequence[Sample]) -> Phases | None:
    """
    Compare phase by phase, as far as the endpoint tells; `None` if it knows no request.

    Without `Server-Timing` there are two: everything up to the first token, and decode.
    """
    pairs = [(replay.requests[s.index], s) for s in measured if s.ok and s.index in replay.requests]
    if not pairs:
        return None
    told = [(f, s) for f, s in pairs if {"prefill", "handoff"} <= s.phases_s.keys()]
    rows = _told(told) if told else _untold(pairs)
    total = sum(abs(row.difference_s) for row in rows)
    worst = max(rows, key=lambda row: abs(row.difference_s))
    return Phases(
        rows=tuple(rows),
        explains=worst.name,
        share_fraction=abs(worst.difference_s) / total if total else 0.0,
        count=len(told or pairs),
    )


Pairs = list[tuple["Foretold", "Sample"]]


def _told(pairs: Pairs) -> list[Phase]:
    rows = [
        _phase(
            "way to the engines",
            pairs,
            lambda f: f.ttft_s - _sum(f, (*PREFILL_WHOLE, *HANDOFF)),
            lambda s: s.ttft_s - s.phases_s["prefill"] - s.phases_s["handoff"],
        )
    ]
    if all({"queue", "step"} <= s.phases_s.keys() for _, s in pairs):
        rows += [
            _phase(
                "prefill queue",
                pairs,
                lambda f: f.phases_s["queue"],
                # What is neither step nor wait in the engine was routing: it waited, too.
                lambda s: s.phases_s["prefill"] - s.phases_s["step"],
            ),
            _phase(
                "prefill",
                pairs,
                lambda f: f.phases_s["prefill"],
                lambda s: s.phases_s["step"],
            ),
        ]
    else:
        rows.append(
            _phase(
                "prefill and its queue",
                pairs,
                lambda f: _sum(f, PREFILL_WHOLE),
                lambda s: s.phases_s["prefill"],
            )
        )
    rows.append(
        _phase(
            "KV transfer and first step",
            pairs,
            lambda f: _sum(f, HANDOFF),
            lambda s: s.phases_s["handoff"],
        )
    )
    return [*rows, _decode(pairs)]


def _untold(pairs: Pairs) -> list[Phase]:
    first = _phase("up to the first token", pairs, lambda f: f.ttft_s, lambda s: s.ttft_s)
    return [first, _decode(pairs)]


def _decode(pairs: Pairs) -> Phase:
    return _phase("decode", pairs, lambda f: f.e2e_s - f.ttft_s, lambda s: s.e2e_s - s.ttft_s)


def _phase(
    name: str,
    pairs: Pairs,
    predicted: Callable[[Foretold], float],
    measured: Callable[[Sample], float],
) -> Phase:
    ours = sum(predicted(f) for f, _ in pairs) / len(pairs)
    theirs = sum(measured(s) for _, s in pairs) / len(pairs)
    return Phase(name=name, predicted_s=ours, measured_s=theirs, difference_s=ours - theirs)


def _sum(foretold: Foretold, names: Sequence[str]) -> float:
    return sum(foretold.phases_s.get(name, 0.0) for name in names)
