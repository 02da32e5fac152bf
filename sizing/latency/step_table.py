"""A table of the term-by-term model, from which a simulation reads steps in a microsecond."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.step import StepTable
from sizing.latency.load import StepLoad, decode_load, joined
from sizing.latency.step import Machine, interval_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.slicing import Slicing

POINTS_PER_OCTAVE = 3
WHOLE_PROMPTS = 4
"""Typical prompts, one to so many, that the grid holds: steps often compute just these."""
FAR_TOKENS = 4096.0
"""Cached tokens at which the attention of prompts to earlier tokens is evaluated."""
DIGITS = 6
"""Digits of a number in the table: finer than its interpolation."""


def step_table(
    machine: Machine,
    slicing: Slicing,
    *,
    most: tuple[int, int],
    contexts: tuple[float, float],
    prompt_tokens: float,
    batches: int,
) -> StepTable:
    """
    Tabulate the step model (docs/model.md, eq. S9).

    Args:
        most: prompt tokens, and sequences decoded, of a step.
        contexts: shortest and longest mean context of a batch, tokens.
        prompt_tokens: m, computed of a typical prompt: more tokens in a step are several prompts.
        batches: under way in a pipeline at a time (eq. L5).

    Source:
        Of our step model: GEMMs see n + B rows, attention sees prompts and sequences apart.

    Ignores:
        Curvature between grid points, about 1 %, and that of attention over the contexts.
    """
    tokens, sequences = (_octaves(largest) for largest in most)
    whole = prompt_tokens * np.arange(1, WHOLE_PROMPTS + 1)
    tokens = np.unique(_rounded(np.append(tokens, whole[whole < most[0]])))
    if machine.engine.two_batch_overlap and slicing.routes_tokens:
        tokens = _with_step(tokens, machine.engine.overlap_prompt_tokens)
        each = 1 + machine.engine.speculative_tokens
        sequences = _with_step(sequences, -(-machine.engine.overlap_decode_tokens // each))

    n, b = (each.ravel() for each in np.meshgrid(tokens, sequences))
    prompts, batch = tokens[1:], sequences[1:]
    short, long = contexts[0], max(contexts[1], contexts[0] + 1)
    loads = (
        replace(_prompts(n, prompt_tokens, 0.0), sequences=b),
        _prompts(prompts, prompt_tokens, FAR_TOKENS),
        _prompts(prompts, prompt_tokens, 0.0),
        decode_load(batch, short),
        decode_load(batch, long),
    )
    # All at once: most of an op's time is numpy's, however few steps there are.
    seconds = interval_s(machine, joined(loads), slicing=slicing, batches=batches)
    ends = np.cumsum([len(load.prompts) for load in loads])
    fixed_s, behind_s, alone_s, low_s, high_s = np.split(seconds, ends[:-1])
    fixed_s = fixed_s.reshape(len(sequences), len(tokens))
    fixed_s[0, 0] = min(fixed_s[0, 1], fixed_s[1, 0])  # no step holds nothing: only interpolated
    key_s = (behind_s - alone_s) / FAR_TOKENS
    fixed_s[:, 1:] -= key_s * (np.minimum(prompts, prompt_tokens) + 1) / 2
    # Where the floor of S5 binds, two contexts cost the same, up to rounding.
    context_s = np.maximum(0.0, high_s - low_s) / (long - short) / batch
    fixed_s[1:] += (low_s - fixed_s[1:, 0] - context_s * batch * short)[:, None]
    return StepTable(
        tokens=_rounded(tokens),
        sequences=_rounded(sequences),
        fixed_s=tuple(_rounded(row) for row in fixed_s),
        per_key_s=_rounded(np.append(key_s[:1], key_s)),
        per_context_token_s=_rounded(np.append(context_s[:1], context_s)),
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


def _octaves(largest: int) -> NDArray[np.float64]:
    """0, then 1 to *largest*, evenly in its logarithm."""
    points = int(np.ceil(np.log2(largest) * POINTS_PER_OCTAVE)) + 1
    return np.append(0.0, np.geomspace(1.0, largest, points))


def _with_step(grid: NDArray[np.float64], at: int) -> NDArray[np.float64]:
    """Add both sides of a step at *at*, where halves begin, to a grid that reaches it."""
    if not 1 < at <= grid[-1]:
        return grid
    return np.unique(_rounded(np.append(grid, [at - 1, at])))  # as they are written


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Round, so that plans are short."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
