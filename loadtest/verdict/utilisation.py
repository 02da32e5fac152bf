"""Utilisation of the pools: planned, and estimated from the client's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan.step_time import decode_s, prefill_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loadtest.run.schedule import Window
    from minicluster.plan import Plan, Pool
    from minicluster.workload.samples import Sample

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """
    Load of one pool.

    Attributes:
        predicted_utilisation_fraction: fraction of the capacity in use, according to the plan.
        measured_utilisation_fraction: the same for the requests that arrived; see `pool_loads`.
        predicted_concurrent: mean number of requests in the pool, by Little's law.
        measured_concurrent: the same, averaged over the window.
        busy_fraction: fraction of the window with at least one request in the pool.
    """

    role: str
    replicas: int
    predicted_utilisation_fraction: float | None
    measured_utilisation_fraction: float | None
    predicted_concurrent: float
    measured_concurrent: float
    busy_fraction: float


def pool_loads(plan: Plan, samples: Sequence[Sample], window: Window) -> tuple[PoolLoad, ...]:
    """
    Compare the load of the pools with the plan.

    The client cannot see engine steps, so the measured utilisation puts the lengths that arrived
    in the window, and the utilisation of the other pool, into the plan's own step model (eq. T6
    and T8 of docs/model.md). The number of requests in a pool is measured directly.

    Ignores:
        The phases before the first token: the client cannot separate prefill's queue, prefill and
        KV transfer, so all of them count for the prefill pool. A mixed pool has no measured
        utilisation.
    """
    planned = plan.prediction
    spans = {
        "prefill": [(s.send_s, s.chunk_s[0] if s.chunk_s else s.end_s) for s in samples],
        "decode": [(s.chunk_s[0], s.end_s) for s in samples if s.chunk_s],
        "mixed": [(s.send_s, s.end_s) for s in samples],
    }
    mean_s = {
        "prefill": planned.ttft.mean_s,
        "decode": planned.e2e.mean_s - planned.ttft.mean_s,
        "mixed": planned.e2e.mean_s,
    }
    shares = utilisations(plan, [s for s in samples if s.in_window], window.length_s)
    return tuple(
        PoolLoad(
            role=pool.role,
            replicas=pool.replicas,
            predicted_utilisation_fraction=planned.utilisation_fraction.get(pool.role),
            measured_utilisation_fraction=shares.get(pool.role),
            predicted_concurrent=plan.workload.requests_per_s * mean_s[pool.role],
            measured_concurrent=mean_concurrent(spans[pool.role], window),
            busy_fraction=busy_fraction(spans[pool.role], window),
        )
        for pool in plan.pools
    )


def utilisations(plan: Plan, arrived: Sequence[Sample], window_s: float) -> dict[str, float]:
    """
    Return the fraction of each pool's capacity that *arrived* takes; none for a mixed pool.

    Interference as in eq. T12: decode is slowed by prefill's utilisation and by each request that
    joins; prefill by serving at all, by each sequence in decode, and by each request.
    """
    pools = {pool.role: pool for pool in plan.pools}
    if not arrived or "mixed" in pools:
        return {}
    between = plan.step_model.interference
    decoding = [(s.chunk_s[0], s.end_s) for s in arrived if s.chunk_s]
    held = sum(b - a for a, b in decoding) / window_s / pools["decode"].replicas
    prefill = _prefill_share(plan, pools["prefill"], arrived) / window_s
    prefill *= 1 + between.prefill_fraction + held * between.prefill_per_sequence_fraction
    prefill += len(arrived) * between.prefill_per_request_s / window_s / pools["prefill"].replicas
    decode = _decode_share(plan, pools["decode"], arrived) / window_s
    decode *= 1 + min(1.0, prefill) * between.decode_fraction
    decode += len(arrived) * between.decode_per_request_s / window_s / pools["decode"].replicas
    return {"prefill": prefill, "decode": decode}


def _prefill_share(plan: Plan, pool: Pool, arrived: Sequence[Sample]) -> float:
    """Return the seconds of prefill per replica, if every batch is full (eq. T5, T6)."""
    step, cached = plan.step_model.prefill, plan.workload.prefix_tokens
    asked = np.array([s.asked_input_tokens for s in arrived], dtype=np.float64)
    n = np.maximum(1.0, asked - cached)
    chunk = plan.engine.chunked_prefill_tokens or pool.max_num_batched_tokens
    chunks = np.ceil(n / chunk)
    alone = prefill_s(step, n, cached) + (chunks - 1) * step.base_s
    linear = float(np.maximum(step.stream_s, step.per_prefill_token_s * n).mean())
    filled = max(linear, step.per_prefill_token_s * float(n.mean()) * pool.max_num_seqs)
    saved = step.base_s + linear - (step.base_s + filled) / pool.max_num_seqs
    return float(alone.sum() - len(n) * saved) / pool.replicas


def _decode_share(plan: Plan, pool: Pool, arrived: Sequence[Sample]) -> float:
    """Return the seconds of full decode batches per replica (eq. T7, T8)."""
    n = np.array([s.asked_input_tokens for s in arrived], dtype=np.float64)
    out = np.array([s.asked_output_tokens for s in arrived], dtype=np.float64)
    context = float(n.mean() + (out**2).mean() / (2 * out.mean()))
    full_s = float(decode_s(plan.step_model.decode, pool.max_num_seqs, context))
    return float(out.sum()) * full_s / (pool.replicas * pool.max_num_seqs)


def mean_concurrent(spans: Iterable[Span], window: Window) -> float:
    """Return the number of concurrent *spans*, averaged over the window."""
    return sum(end - start for start, end in _clip(spans, window)) / window.length_s


def busy_fraction(spans: Iterable[Span], window: Window) -> float:
    """Return the fraction of the window that *spans* cover."""
    busy_s, until_s = 0.0, window.start_s
    for start, end in sorted(_clip(spans, window)):
        if end > until_s:
            busy_s += end - max(start, until_s)
            until_s = end
    return busy_s / window.length_s


def _clip(spans: Iterable[Span], window: Window) -> list[Span]:
    clipped = ((max(a, window.start_s), min(b, window.end_s)) for a, b in spans)
    return [(a, b) for a, b in clipped if a < b]
