"""Bounds without queues: what no schedule beats, so that a search need not simulate it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import step_time
from sizing.planner.tandem import QUANTILES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.step import StepCoefficients
    from sizing.planner.tandem import TandemLoad

FIXED_POINT_STEPS = 50
"""Iterations of the decode batch: a step of twice the batch takes less than twice as long."""


def prefill_s(tandem: TandemLoad) -> NDArray[np.float64]:
    """
    Return the seconds to prefill each of the tandem's prompts alone.

        S = t(n) + (ceil(n / budget) - 1) base      (docs/model.md, eq. T1)
    """
    n = tandem.computed_tokens
    return _prompt_s(tandem, tandem.step_model.prefill, n, tandem.prefill.max_batched_tokens)


def _prompt_s(
    tandem: TandemLoad, step: StepCoefficients, tokens: NDArray[np.float64], budget: int
) -> NDArray[np.float64]:
    chunks = np.ceil(tokens / budget)
    alone = step_time.prefill_s(step, tokens, tandem.workload.prefix_tokens)
    return np.asarray(alone + (chunks - 1) * step.base_s)


def prefill_batch_s(tandem: TandemLoad, prompts: float) -> float:
    """
    Return the mean seconds of a step that prefills several prompts together.

        t(b) = base + experts (1 - q^(b n)) + max(stream, a b n) + c b pairs
        (docs/model.md, eq. T2)
    """
    step = tandem.step_model.prefill
    n = tandem.computed_tokens
    alone = float(prefill_s(tandem).mean())
    linear = float(np.maximum(step.stream_s, step.per_prefill_token_s * n).mean())
    once = float(step_time.fixed_s(step, n).mean()) + linear
    filled = max(linear, step.per_prefill_token_s * float(n.mean()) * prompts)
    shared = float(step_time.fixed_s(step, n * prompts).mean()) + filled
    return shared + prompts * (alone - once)


def decode_step_s(tandem: TandemLoad, batch: float) -> float:
    """Return the seconds of a decode step of mean context (eq. S3)."""
    return float(step_time.decode_s(tandem.step_model.decode, batch, tandem.context[0]))


def prefill_load(tandem: TandemLoad) -> float:
    """Return the prefill replicas that full batches keep busy all the time (eq. T2)."""
    b = tandem.prefill.max_batch_size
    return tandem.prefill_requests_per_s * prefill_batch_s(tandem, b) / b


def decode_load(tandem: TandemLoad) -> float:
    """
    Return the decode replicas that full batches keep busy all the time.

        lambda E[o] t(B_max) / B_max + lambda E[local prompts]      (docs/model.md, eq. T3)
    """
    b = tandem.decode.max_batch_size
    rate = tandem.workload.requests_per_s
    tokens_per_s = rate * float(tandem.output_tokens.mean())
    local = rate * float(_local_s(tandem).sum()) / QUANTILES
    return tokens_per_s * decode_step_s(tandem, b) / b + local


def steady_decode(tandem: TandemLoad, *, split: bool) -> tuple[float, float]:
    """
    Return the seconds per token and the sequences of a decode replica in the steady state.

        t = t_d(b) / (1 - rho_p), b = (lambda / D) E[o] t,   rho_p = 0 where pools are split
        (docs/model.md, eq. T6)

    Returns:
        Infinite both, where the load exceeds the largest batch.

    Ignores:
        That batches vary, and the other pool's interference.
    """
    rate = tandem.workload.requests_per_s / tandem.decode.replicas
    left = 1.0 if split else 1 - rate * float(prefill_s(tandem).mean())
    pace_s, batch = np.inf, 1.0
    for _ in range(FIXED_POINT_STEPS):
        pace_s = decode_step_s(tandem, max(1.0, batch)) / left if left > 0 else np.inf
        batch = rate * float(tandem.output_tokens.mean()) * pace_s
        if batch > tandem.decode.max_batch_size:
            return np.inf, np.inf
    return float(pace_s), float(batch)


def mixed_load(tandem: TandemLoad) -> float:
    """
    Return the aggregated replicas that are busy all the time: prompts and tokens share steps.

        D >= lambda (S_p + E[o] t_d(B)/B), S_p: compute and attention of one prompt
        (docs/model.md, eq. L6)
    """
    step = tandem.step_model.decode
    prompt_s = float(_work_s(step, tandem.computed_tokens, tandem.workload.prefix_tokens).mean())
    token_s = step.per_sequence_s + step.per_context_token_s * tandem.context[0]
    answer_s = float(tandem.output_tokens.mean()) * token_s
    return max(tandem.workload.requests_per_s * (prompt_s + answer_s), decode_load(tandem))


def _local_s(tandem: TandemLoad) -> NDArray[np.float64]:
    """Return the seconds that each prompt computed by a decode replica adds to a step of it."""
    cached = tandem.workload.prefix_tokens
    n = np.maximum(1.0, tandem.all_tokens[: tandem.num_local] - cached)
    return _work_s(tandem.step_model.decode, n, cached)


def _work_s(step: StepCoefficients, n: NDArray[np.float64], cached: int) -> NDArray[np.float64]:
    """Return the seconds that prompts add to a step that is made anyway."""
    pairs = n * (cached + (n + 1) / 2)
    return np.asarray(step.per_prefill_token_s * n + step.per_pair_s * pairs)


def unloaded_s(tandem: TandemLoad, *, split: bool) -> dict[str, NDArray[np.float64]]:
    """
    Return the latencies of requests that are alone in the system.

        split: TTFT = request + S + pull + t_d(1, n + 1);  aggregated: request + S
        TPOT = ITL = t_d(1, n + o / 2)      (docs/model.md, eq. T4)

    Args:
        tandem: load and step model; its rate does not matter.
        split: whether a prefill pool computes the prompts.

    Returns:
        Seconds by latency, `ttft`, `tpot` and `itl`: of equally likely requests.

    Ignores:
        The other pool's interference, which is not there without load.
    """
    model, cached = tandem.step_model, tandem.workload.prefix_tokens
    prompts = tandem.all_tokens
    computed = np.maximum(1.0, prompts - cached)
    local_s = model.path.request_s + _prompt_s(
        tandem, model.decode, computed, tandem.decode.max_batched_tokens
    )
    if split:
        remote_s = model.path.request_s + _prompt_s(
            tandem, model.prefill, computed, tandem.prefill.max_batched_tokens
        )
        remote_s = remote_s + step_time.transfer_s(model.path, prompts)
        remote_s = remote_s + step_time.decode_s(model.decode, 1, prompts)
        local = prompts <= tandem.local_threshold_tokens
        ttft = np.where(local, local_s, remote_s)
    else:
        ttft = local_s
    context = prompts.mean() + tandem.output_tokens / 2
    pace = step_time.decode_s(model.decode, 1, context)
    return {"ttft": np.sort(ttft), "tpot": np.sort(pace), "itl": np.sort(pace)}


def interference(tandem: TandemLoad, *, prefill_busy: float, mean_batch: float) -> dict[str, float]:
    """
    Return by role the share by which the other pool slows steps, at a run's mean state.

        prefill: f_p + L g_p + h_p / S;  decode: (1 + u f_d) / (1 - joins/s h_d) - 1
        (docs/model.md, eq. Q9)

    Args:
        tandem: pools on the same cores; zero where they share nothing.
        prefill_busy: u, share of the time in which a prefill replica computes.
        mean_batch: L, sequences of a decode replica.
    """
    between = tandem.step_model.interference
    alone_s = float(prefill_s(tandem).mean())
    joins_per_s = tandem.workload.requests_per_s / tandem.decode.replicas
    delayed = min(0.99, joins_per_s * between.decode_per_request_s)
    return {
        "prefill": between.prefill_fraction
        + mean_batch * between.prefill_per_sequence_fraction
        + between.prefill_per_request_s / alone_s,
        "decode": (1 + prefill_busy * between.decode_fraction) / (1 - delayed) - 1,
    }
