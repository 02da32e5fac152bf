"""Seconds of one engine step, evaluated from the coefficients that a plan carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from minicluster.specs.step import PathCoefficients, StepCoefficients


def prefill_s(
    step: StepCoefficients, tokens: ArrayLike, cached: ArrayLike = 0
) -> NDArray[np.float64]:
    """
    Seconds to prefill one prompt alone.

        t = base + experts (1 - q^n) + max(stream, a n) + c n (p + (n + 1) / 2)
        (docs/model.md, eq. S2)

    Args:
        tokens: n, prompt tokens to compute, any shape.
        cached: p, tokens before them that are in the prefix cache, broadcast against *tokens*.

    Returns:
        Seconds, float64, shape of the broadcast arguments.

    Source:
        Work per token is constant but for attention, which is linear in the tokens attended to;
        DistServe (arXiv 2401.09670) fits the same three terms.

    Ignores:
        Chunking: a prompt longer than the token budget pays `base` once a chunk.
    """
    n = np.asarray(tokens, dtype=np.float64)
    p = np.asarray(cached, dtype=np.float64)
    pairs = n * (p + (n + 1) / 2)
    return np.asarray(
        fixed_s(step, n)
        + np.maximum(step.stream_s, step.per_prefill_token_s * n)
        + step.per_pair_s * pairs
    )


def decode_s(step: StepCoefficients, batch: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
    """
    Seconds of one decode step.

        t = base + experts (1 - q^B) + max(stream, b B) + d B s      (docs/model.md, eq. S3)

    Args:
        batch: B, sequences in the step, any shape.
        context: s, mean tokens cached per sequence, broadcast against *batch*.

    Returns:
        Seconds, float64, shape of the broadcast arguments.

    Source:
        Weights are read once a step, the KV cache once a sequence; DistServe's decode fit.

    Ignores:
        Spread of the context among the sequences: attention is linear in it.
    """
    size = np.asarray(batch, dtype=np.float64)
    s = np.asarray(context, dtype=np.float64)
    return np.asarray(
        fixed_s(step, size)
        + np.maximum(step.stream_s, step.per_sequence_s * size)
        + step.per_context_token_s * size * s
    )


def fixed_s(step: StepCoefficients, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds that a step takes whatever its tokens cost: base and experts touched (eq. S1)."""
    return np.asarray(step.base_s + step.experts_s * (1 - step.expert_miss_fraction**tokens))


def transfer_s(path: PathCoefficients, tokens: ArrayLike) -> NDArray[np.float64]:
    """Seconds to pull the KV cache of *tokens* prompt tokens (docs/model.md, eq. S4)."""
    n = np.asarray(tokens, dtype=np.float64)
    return np.asarray(path.transfer_base_s + path.transfer_per_token_s * n)
