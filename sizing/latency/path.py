"""Seconds of a request outside the steps: the engine's constants and the KV pull."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.specs.step import PathCoefficients
from sizing.latency.collectives import kv_pull_s_per_byte

if TYPE_CHECKING:
    from sizing.latency.step import Machine


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
