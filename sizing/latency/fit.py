"""From the term-by-term model to the few coefficients that a plan carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.specs.step import PathCoefficients, StepCoefficients
from sizing.latency.collectives import kv_pull_s_per_byte
from sizing.latency.least_squares import fit_bent_line
from sizing.latency.load import decode_load, pairs, prefill_load
from sizing.latency.step import Machine, step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing

GRID = 24
"""Points along each axis of a fit."""

BATCHED_TOKENS = 1024
"""Short prompts share a step: their fit reaches up to here, past where compute saturates."""


def prefill_coefficients(
    machine: Machine, *, slicing: Slicing, shortest: int, longest: int, cached: int
) -> StepCoefficients:
    """
    Fit eq. S2 of docs/model.md to the modelled time of prompts.

    Args:
        cached: tokens before them, in the prefix cache.
    """
    longest = max(longest, BATCHED_TOKENS)
    n = np.unique(np.rint(np.geomspace(max(1, shortest / 2), longest, GRID)))
    seconds = step_s(machine, prefill_load(n, cached), slicing=slicing)
    attended = pairs(n, np.full_like(n, cached))
    line = fit_bent_line(n, (_touched(machine.model, n), attended), seconds)
    return line.step(
        (int(longest), int(max(1, longest // shortest)), int(longest + cached)),
        per_prefill_token_s=line.slope,
        per_pair_s=line.rates[1],
        experts_s=line.rates[0],
        expert_miss_fraction=miss_fraction(machine.model),
    )


def decode_coefficients(
    machine: Machine, *, slicing: Slicing, max_batch: int, contexts: tuple[float, float]
) -> StepCoefficients:
    """
    Fit eq. S3 of docs/model.md to the modelled time of decode steps.

    Args:
        contexts: shortest and longest mean context of a batch, tokens.
    """
    sizes = np.unique(np.rint(np.geomspace(1, max_batch, GRID)))
    batch, context = (
        axis.ravel() for axis in np.meshgrid(sizes, np.linspace(*contexts, 4), indexing="ij")
    )
    seconds = step_s(machine, decode_load(batch, context), slicing=slicing)
    line = fit_bent_line(batch, (_touched(machine.model, batch), batch * context), seconds)
    return line.step(
        (int(max_batch), int(max_batch), int(np.ceil(contexts[1]))),
        per_sequence_s=line.slope,
        per_context_token_s=line.rates[1],
        experts_s=line.rates[0],
        expert_miss_fraction=miss_fraction(machine.model),
    )


def path_coefficients(
    machine: Machine, *, prefill_tp: int, decode_tp: int, tokens: float
) -> PathCoefficients:
    """Return engine constants of a request, and its KV pull (docs/model.md, eq. N4)."""
    block = machine.engine.block_size
    held = kv_bytes_per_sequence(machine.model, tokens, tp=decode_tp, block_size=block)
    per_byte = kv_pull_s_per_byte(prefill_tp, decode_tp, machine.gpu, machine.cluster)
    pieces = machine.model.num_layers / block
    return PathCoefficients(
        request_s=machine.engine.per_request_s,
        transfer_base_s=machine.engine.transfer_base_s,
        transfer_per_token_s=held / tokens * per_byte
        + pieces * machine.engine.transfer_per_descriptor_s,
        error_fraction=0.0,
    )


def miss_fraction(model: ModelSpec) -> float:
    """Return the chance that one token leaves an expert alone, q of eq. S1; 0 without experts."""
    if model.moe is None:
        return 0.0
    return 1 - model.moe.experts_per_token / model.moe.num_experts


def _touched(model: ModelSpec, load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of the experts that some token of a step needs (eq. S1)."""
    return 1 - miss_fraction(model) ** load if model.moe else np.zeros_like(load)
