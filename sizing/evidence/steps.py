"""Seconds of one engine's steps in a table, so that a replay reads one in microseconds."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.load import StepLoad
from sizing.latency.step import Machine, step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.slicing import Slicing

TOKENS_PER_OCTAVE = 3
LARGEST_PROMPT_TOKENS = 65_536


def seconds_of(machine: Machine, load: StepLoad, slicing: Slicing) -> NDArray[np.float64]:
    """Seconds of steps (docs/model.md, eq. S5): the one place here that asks the step model."""
    return step_s(machine, load, slicing=slicing)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """
    Seconds of steps on grids of prompt tokens n, sequences B and mean context s.

        t = M(n, B) + p a(n) + A(B, s)      (docs/model.md, eq. V1)

    M: no context; p: tokens cached before the prompt tokens; A: attention over the context of
    decoded sequences. Linear between grid points.
    """

    tokens: list[float]
    sequences: list[float]
    contexts: list[float]
    plain: list[list[float]]
    per_cached: list[float]
    attention: list[list[float]]

    def seconds(self, prompt_tokens: float, cached: float, sequences: float, ctx: float) -> float:
        """Seconds of one step."""
        i, u = _locate(self.tokens, prompt_tokens)
        j, v = _locate(self.sequences, sequences)
        low, high = self.plain[i], self.plain[i + 1]
        t = (1 - u) * ((1 - v) * low[j] + v * low[j + 1]) + u * (
            (1 - v) * high[j] + v * high[j + 1]
        )
        if prompt_tokens:
            t += cached * ((1 - u) * self.per_cached[i] + u * self.per_cached[i + 1])
        if sequences:
            k, w = _locate(self.contexts, ctx)
            low, high = self.attention[j], self.attention[j + 1]
            t += (1 - v) * ((1 - w) * low[k] + w * low[k + 1]) + v * (
                (1 - w) * high[k] + w * high[k + 1]
            )
        return t


def step_table(
    machine: Machine, slicing: Slicing, *, max_sequences: int, max_context: int
) -> StepTable:
    """
    Tabulate the step model (docs/model.md, eq. V1).

    Args:
        machine: model, GPU, cluster, engine.
        slicing: of the replica.
        max_sequences: largest batch asked for.
        max_context: longest context asked for.

    Returns:
        A table; beyond its grids it extrapolates its last interval.

    Source:
        Of our step model: GEMMs see n + B rows, attention sees prompts and sequences apart.

    Ignores:
        Curvature between grid points, about 1 %.

    """
    tokens = np.concatenate([[0.0], _octaves(LARGEST_PROMPT_TOKENS)])
    sequences = np.concatenate([[0.0], _octaves(max(2, max_sequences))])
    contexts = np.concatenate([[1.0], np.geomspace(64, max(128, max_context), 8)])
    n, b = np.meshgrid(tokens, sequences, indexing="ij")
    plain = _nothing_is_free(seconds_of(machine, _load(n, 0 * n, b, 0 * n + 1.0), slicing))
    prompts = tokens[1:]
    far = 4096.0
    slope = (
        seconds_of(machine, _load(prompts, prompts * 0 + far), slicing)
        - seconds_of(machine, _load(prompts, prompts * 0), slicing)
    ) / far
    batch, context = np.meshgrid(sequences[1:], contexts, indexing="ij")
    nothing = 0 * batch
    attention = seconds_of(machine, _load(nothing, nothing, batch, context), slicing)
    attention = attention - attention[:, :1]
    return StepTable(
        tokens=tokens.tolist(),
        sequences=sequences.tolist(),
        contexts=contexts.tolist(),
        plain=plain.tolist(),
        per_cached=[float(slope[0]), *slope.tolist()],
        attention=[[0.0] * len(contexts), *attention.tolist()],
    )


def _load(
    tokens: NDArray[np.float64],
    cached: NDArray[np.float64],
    sequences: NDArray[np.float64] | None = None,
    context: NDArray[np.float64] | None = None,
) -> StepLoad:
    """One prompt chunk of *tokens*, if any, beside *sequences*."""
    none = np.zeros_like(tokens)
    return StepLoad(
        prompts=np.where(tokens > 0, 1.0, 0.0),
        prompt_tokens=tokens,
        cached_tokens=cached,
        sequences=none if sequences is None else sequences,
        context_tokens=none if context is None else context,
    )


def _nothing_is_free(plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """A step without prompts and sequences is not made: its corner only interpolates."""
    plain = np.array(plain)
    plain[0, 0] = min(plain[0, 1], plain[1, 0])
    return plain


def _octaves(largest: float) -> NDArray[np.float64]:
    """1 to *largest*, evenly in its logarithm."""
    points = int(np.ceil(np.log2(largest) * TOKENS_PER_OCTAVE)) + 1
    return np.geomspace(1.0, largest, points)


def _locate(grid: list[float], value: float) -> tuple[int, float]:
    """Interval that holds *value*, and how far along it."""
    i = min(max(bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return i, (value - grid[i]) / (grid[i + 1] - grid[i])
