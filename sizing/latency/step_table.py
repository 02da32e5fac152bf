"""A table of the term-by-term model, from which the simulation reads steps in a microsecond."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.step import StepTable
from sizing.latency.load import StepLoad, decode_load
from sizing.latency.step import Machine, stage_s, step_s

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from minicluster.specs.slicing import Slicing

TOKENS_PER_OCTAVE = 3
LARGEST_PROMPT_TOKENS = 65_536
WHOLE_PROMPTS = 4
"""Whole prompts of a step that are points of the grid: most steps hold so many, and the time of
experts jumps by 5 % where each has a tile more to compute."""

FAR_TOKENS = 4096.0
"""Cached tokens at which the attention of prompts to earlier tokens is evaluated."""


def step_table(
    machine: Machine,
    slicing: Slicing,
    *,
    max_sequences: int,
    contexts: tuple[float, float],
    prompt_tokens: float,
    full: bool = True,
) -> StepTable:
    """
    Tabulate the step model (docs/model.md, eq. S9), of plans and of measured rows.

    Args:
        contexts: shortest and longest mean context of a batch, tokens.
        prompt_tokens: computed of a typical prompt: more tokens in a step are several prompts.
        full: a batch is under way in every stage of a pipeline (eq. L5), not one in all of them.

    Returns:
        A table; beyond its grids it extrapolates its last interval.

    Source:
        Of our step model: GEMMs see n + B rows, attention sees prompts and sequences apart.

    Ignores:
        Curvature between grid points, about 1 %, and that of attention over the contexts.
    """
    whole = prompt_tokens * np.arange(1, WHOLE_PROMPTS + 1)
    tokens = np.unique(np.concatenate([[0.0], _octaves(LARGEST_PROMPT_TOKENS), whole]))
    sequences = np.concatenate([[0.0], _octaves(max(2, max_sequences))])
    n, b = np.meshgrid(tokens, sequences, indexing="ij")

    def seconds(load: StepLoad) -> NDArray[np.float64]:
        through = step_s(machine, load, slicing=slicing)
        if slicing.pp == 1 or not full:
            return through
        return np.maximum(through, slicing.pp * stage_s(machine, load, slicing=slicing))

    plain = seconds(replace(_prompts(n, prompt_tokens, 0.0), sequences=b))
    plain[0, 0] = min(plain[0, 1], plain[1, 0])  # no step holds nothing: only interpolated
    prompts, batch = tokens[1:], sequences[1:]
    behind, first = (
        seconds(_prompts(prompts, prompt_tokens, cached)) for cached in (FAR_TOKENS, 0.0)
    )
    per_cached = (behind - first) / FAR_TOKENS
    short, long = contexts[0], max(contexts[1], contexts[0] + 1)
    low, high = (seconds(decode_load(batch, context)) for context in (short, long))
    per_token = (high - low) / (long - short) / batch
    fixed = low - plain[0, 1:] - per_token * batch * short
    return StepTable(
        tokens=_rounded(tokens),
        sequences=_rounded(sequences),
        plain_s=tuple(_rounded(column) for column in plain.T),
        per_cached_s=_rounded([per_cached[0], *per_cached]),
        attention_s=_rounded([0.0, *fixed]),
        per_context_token_s=_rounded([per_token[0], *per_token]),
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


def _rounded(values: ArrayLike) -> tuple[float, ...]:
    """Round to six digits, finer than the table's own curvature, so that plans stay short."""
    return tuple(float(f"{value:.6g}") for value in np.asarray(values))
