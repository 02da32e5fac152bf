"""A table of the term-by-term model, from which the simulation reads steps in a microsecond."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.step_seconds import StepTable
from sizing.latency.load import StepLoad, decode_load
from sizing.latency.step import Machine, step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.slicing import Slicing

TOKENS_PER_OCTAVE = 3
LARGEST_PROMPT_TOKENS = 65_536
FAR_TOKENS = 4096.0
"""Cached tokens at which the attention of prompts to earlier tokens is evaluated."""


def step_table(
    machine: Machine,
    slicing: Slicing,
    *,
    max_sequences: int,
    contexts: tuple[float, float],
    prompt_tokens: float,
) -> StepTable:
    """
    Tabulate the step model (docs/model.md, eq. S9).

    Args:
        contexts: shortest and longest mean context of a batch, tokens.
        prompt_tokens: computed of a typical prompt: more tokens in a step are several prompts.

    Returns:
        A table; beyond its grids it extrapolates its last interval.

    Source:
        Of our step model: GEMMs see n + B rows, attention sees prompts and sequences apart.

    Ignores:
        Curvature between grid points, about 1 %, and that of attention over the contexts.
    """
    tokens = np.concatenate([[0.0], _octaves(LARGEST_PROMPT_TOKENS)])
    sequences = np.concatenate([[0.0], _octaves(max(2, max_sequences))])
    n, b = np.meshgrid(tokens, sequences, indexing="ij")
    plain = step_s(machine, replace(_prompts(n, prompt_tokens, 0.0), sequences=b), slicing=slicing)
    plain[0, 0] = min(plain[0, 1], plain[1, 0])  # no step holds nothing: only interpolated
    prompts, batch = tokens[1:], sequences[1:]
    behind, first = (
        step_s(machine, _prompts(prompts, prompt_tokens, cached), slicing=slicing)
        for cached in (FAR_TOKENS, 0.0)
    )
    per_cached = (behind - first) / FAR_TOKENS
    short, long = contexts[0], max(contexts[1], contexts[0] + 1)
    low, high = (step_s(machine, decode_load(batch, s), slicing=slicing) for s in (short, long))
    per_token = (high - low) / (long - short) / batch
    fixed = low - plain[0, 1:] - per_token * batch * short
    return StepTable(
        tokens=tokens.tolist(),
        sequences=sequences.tolist(),
        plain=plain.T.tolist(),
        per_cached=[float(per_cached[0]), *per_cached.tolist()],
        attention=[0.0, *fixed.tolist()],
        per_context_token=[float(per_token[0]), *per_token.tolist()],
        prompt_tokens=prompt_tokens,
    )


def _prompts(tokens: NDArray[np.float64], each: float, cached: float) -> StepLoad:
    """*tokens* of prompts of length *each*, or one chunk of such a prompt, after *cached* ones."""
    none = np.zeros_like(tokens)
    return StepLoad(
        prompts=np.where(tokens > 0, np.maximum(1.0, tokens / each), 0.0),
        prompt_tokens=np.minimum(tokens, each),
        cached_tokens=none + cached,
        sequences=none,
        context_tokens=none + 1,
    )


def _octaves(largest: float) -> NDArray[np.float64]:
    """1 to *largest*, evenly in its logarithm."""
    points = int(np.ceil(np.log2(largest) * TOKENS_PER_OCTAVE)) + 1
    return np.geomspace(1.0, largest, points)
