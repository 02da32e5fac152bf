"""Seconds of the steps that a plan's pools make, of arrays of lengths and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from minicluster.specs.step import PathCoefficients, StepSpec


def prefill_s(
    step: StepSpec, tokens: ArrayLike, cached: ArrayLike = 0, prompts: ArrayLike = 1
) -> NDArray[np.float64]:
    """
    Seconds of a step of equal prompts.

        t(k n, k n (p + (n + 1)/2), 0, 0)      (docs/model.md, eq. S2)

    Args:
        tokens: n, tokens to compute of each prompt, any shape.
        cached: p, tokens before them that are in the prefix cache, broadcast against *tokens*.
        prompts: k, likewise.

    Returns:
        Seconds, float64, shape of the broadcast arguments.

    Ignores:
        Chunking: a prompt longer than the token budget takes several steps.
    """
    n, p, k = np.broadcast_arrays(*(np.asarray(each, float) for each in (tokens, cached, prompts)))
    loads = list(zip((k * n).flat, (k * n * (p + (n + 1) / 2)).flat, strict=True))
    seconds = step.beside(0)
    found = {load: seconds(*load) for load in set(loads)}  # many are often equal
    return np.reshape([found[load] for load in loads], n.shape)


def decode_s(step: StepSpec, batch: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
    """
    Seconds of one decode step.

        t(0, 0, B, B s)      (docs/model.md, eq. S3)

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
    size, s = np.broadcast_arrays(np.asarray(batch, float), np.asarray(context, float))
    lines = {each: step.decode_line(each) for each in set(size.flat)}  # often there is one batch
    fixed_s, per_token_s = np.array([lines[each] for each in size.flat]).T
    return np.reshape(fixed_s + per_token_s * (size * s).flat, size.shape)


def transfer_s(path: PathCoefficients, tokens: ArrayLike) -> NDArray[np.float64]:
    """Seconds to pull the KV cache of *tokens* prompt tokens (docs/model.md, eq. S4)."""
    n = np.asarray(tokens, dtype=np.float64)
    return np.asarray(path.transfer_base_s + path.transfer_per_token_s * n)
