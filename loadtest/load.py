"""How busy the pools were: as planned, and as seen from the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.steptime import prefill_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loadtest.samples import Sample
    from loadtest.schedule import Window
    from sizing.plan import Plan

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """
    One pool.

    Attributes:
        predicted_utilisation_fraction: busy share according to the plan.
        measured_utilisation_fraction: see `pool_loads`; `None` where the client cannot tell.
        predicted_concurrent: mean number of requests in it, by Little's law on the prediction.
        measured_concurrent: the same, averaged over the window.
    """

    role: str
    replicas: int
    predicted_utilisation_fraction: float | None
    measured_utilisation_fraction: float | None
    predicted_concurrent: float
    measured_concurrent: float


def pool_loads(plan: Plan, samples: Sequence[Sample], window: Window) -> tuple[PoolLoad, ...]:
    """
    Compare how busy the pools were with what the plan said.

    Prefill: the seconds of prefill that arrived in the window according to the plan's step
    model, at the lengths sent, per replica and second: what was asked of the pool. Decode and
    mixed: the share of the window in which the client waited for a token of at least one
    request, which for a single replica is the time it was busy.

    Ignores:
        What happens on the way: the client cannot tell prefill's queue from prefill, nor the
        KV transfer from either; all of it counts as being in the prefill pool.

    """
    planned = plan.prediction
    rate = plan.workload.requests_per_s
    waiting = [(s.send_s, s.chunk_s[0] if s.chunk_s else s.end_s) for s in samples]
    decoding = [(s.chunk_s[0], s.end_s) for s in samples if s.chunk_s]
    whole = [(s.send_s, s.end_s) for s in samples]
    spans = {"prefill": waiting, "decode": decoding, "mixed": whole}
    mean_s = {
        "prefill": planned.ttft.mean_s,
        "decode": planned.e2e.mean_s - planned.ttft.mean_s,
        "mixed": planned.e2e.mean_s,
    }
    decode_busy = busy_fraction(decoding, window)
    loads = []
    for pool in plan.pools:
        measured = busy_fraction(spans[pool.role], window) if pool.replicas == 1 else None
        if pool.role == "prefill":
            slowed = 1 + decode_busy * plan.step_model.interference.prefill_fraction
            measured = slowed * _prefill_seconds(plan, samples) / window.length_s / pool.replicas
        loads.append(
            PoolLoad(
                role=pool.role,
                replicas=pool.replicas,
                predicted_utilisation_fraction=planned.utilisation_fraction.get(pool.role),
                measured_utilisation_fraction=measured,
                predicted_concurrent=rate * mean_s[pool.role],
                measured_concurrent=mean_concurrent(spans[pool.role], window),
            )
        )
    return tuple(loads)


def _prefill_seconds(plan: Plan, samples: Iterable[Sample]) -> float:
    """Seconds of prefill that arrived in the window, eq. S2 of docs/model.md."""
    cached = plan.workload.prefix_tokens
    tokens = [s.asked_input_tokens - cached for s in samples if s.in_window]
    return float(prefill_s(plan.step_model.prefill, tokens, cached).sum())


def mean_concurrent(spans: Iterable[Span], window: Window) -> float:
    """Return how many *spans* are open at a time, averaged over the window."""
    return sum(end - start for start, end in _clip(spans, window)) / window.length_s


def busy_fraction(spans: Iterable[Span], window: Window) -> float:
    """Return the share of the window in which at least one of *spans* is open."""
    busy_s, until_s = 0.0, window.start_s
    for start, end in sorted(_clip(spans, window)):
        if end > until_s:
            busy_s += end - max(start, until_s)
            until_s = end
    return busy_s / window.length_s


def _clip(spans: Iterable[Span], window: Window) -> list[Span]:
    clipped = ((max(a, window.start_s), min(b, window.end_s)) for a, b in spans)
    return [(a, b) for a, b in clipped if a < b]
