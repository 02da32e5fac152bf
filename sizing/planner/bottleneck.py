"""The bottleneck of each pool: compute, memory bandwidth, capacity, network or queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.phases import DECODE_QUEUE, PREFILL, PREFILL_QUEUE
from minicluster.specs.step import StepCoefficients
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.step import BOUNDS, step_terms
from sizing.planner.step_models import machine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Inputs
    from sizing.latency.load import StepLoad
    from sizing.latency.step import Term
    from sizing.planner.candidates import Candidate
    from sizing.planner.layout import LayoutShape


def mean_batch(chosen: Candidate, tpot_s: float) -> float:
    """Return the sequences of a decode step, by Little's law: those that come while one decodes."""
    stay_s = float(chosen.tandem.output_tokens.mean()) * tpot_s
    return chosen.tandem.workload.requests_per_s * stay_s / chosen.tandem.decode.replicas


def bottlenecks(
    inputs: Inputs, chosen: Candidate, parts_s: Mapping[str, float], tpot_s: float
) -> dict[str, str]:
    """
    Return the bottleneck of each phase by role.

    `queue`: requests wait longer for the phase than they spend in it. `capacity`: the KV cache
    limits the decode batch, and it is nearly full. Otherwise the bottleneck is what a step spends
    most of its time on.

    Args:
        inputs: the engine's limits.
        chosen: the pools.
        parts_s: mean TTFT by phase.
        tpot_s: mean time per output token.
    """
    waits = parts_s[PREFILL_QUEUE] > parts_s[PREFILL]
    if chosen.layout.prefill is None:
        return {"mixed": "queue" if waits else "compute"}
    batch, context = mean_batch(chosen, tpot_s), chosen.tandem.context[0]
    limit = chosen.tandem.decode.max_batch_size
    words = {
        role: _step_bound(inputs, chosen, role, batch, context) for role in ("prefill", "decode")
    }
    most = inputs.engine_on(chosen.layout.decode.gpu).max_num_seqs
    full = limit == chosen.max_batch < most and inputs.calibration is None
    if full and batch > limit / 2:
        words["decode"] = "capacity"
    if waits:
        words["prefill"] = "queue"
    if parts_s[DECODE_QUEUE] > float(chosen.tandem.output_tokens.mean()) * tpot_s:
        words["decode"] = "queue"
    return words


def representative_terms(
    inputs: Inputs, chosen: Candidate, role: str, batch: float
) -> tuple[Term, ...]:
    """Split a step of *role* at the load's mean lengths into the terms of eq. S5."""
    shape, load = representative_load(chosen, role, batch)
    return step_terms(machine(inputs, shape.gpu), load, slicing=shape.slicing)


def representative_load(chosen: Candidate, role: str, batch: float) -> tuple[LayoutShape, StepLoad]:
    """Return the replica of *role*, and its step at the load's mean lengths."""
    tandem, decode = chosen.tandem, chosen.layout.decode
    if role == "prefill":
        tokens, cached = (float(x.mean()) for x in (tandem.computed_tokens, tandem.cached_tokens))
        return chosen.layout.prefill or decode, prefill_load(tokens, cached)
    return decode, decode_load(max(1.0, batch), tandem.context[0])


def _step_bound(inputs: Inputs, chosen: Candidate, role: str, batch: float, context: float) -> str:
    """Return what takes most of a step, kernel launches left out."""
    step = chosen.tandem.step_model.of(role)
    if isinstance(step, StepCoefficients):
        return _fitted_bound(step, chosen, role, batch, context)
    seconds = dict.fromkeys(BOUNDS, 0.0)
    for term in representative_terms(inputs, chosen, role, batch):
        seconds[term.bound] += float(np.sum(term.seconds))
    del seconds["launch"]
    return max(seconds, key=lambda bound: seconds[bound])


def _fitted_bound(
    step: StepCoefficients, chosen: Candidate, role: str, batch: float, context: float
) -> str:
    """Compare what a fitted step reads, weights and cache, with what grows with tokens."""
    if role == "prefill":
        n = float(chosen.tandem.computed_tokens.mean())
        compute = step.per_prefill_token_s * n + step.per_pair_s * n * n / 2
        return "compute" if compute >= step.stream_s else "memory bandwidth"
    read = max(step.stream_s, step.per_context_token_s * batch * context)
    return "compute" if step.per_sequence_s * batch > read else "memory bandwidth"
