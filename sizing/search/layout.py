"""Which tensor-parallel degrees a pool may have, and how many sequences then fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.errors import InputError
from sizing.latency.memory import kv_bytes_per_sequence, kv_space_bytes, weight_bytes

if TYPE_CHECKING:
    from sizing.plan import Inputs
    from sizing.specs.model import ModelSpec

MARGIN = 3.0
"""Deviations of the total context that a full batch leaves room for, so that it never preempts."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """Tensor-parallel degree of each pool."""

    prefill_tp: int
    decode_tp: int

    def __str__(self) -> str:
        """Write as people do."""
        return f"prefill TP{self.prefill_tp}, decode TP{self.decode_tp}"


def legal_degrees(inputs: Inputs) -> tuple[int, ...]:
    """
    List the tensor-parallel degrees that may be searched.

    Without `[search] tp`: all that divide the model and fit the HB domain.

    Raises:
        InputError: a degree that the scenario asks for cannot be had.
    """
    asked = inputs.scenario.search.tp
    if inputs.calibration is not None or inputs.gpu.kind == "cpu":
        for tp in asked:
            if tp != 1:
                raise InputError(
                    "search.tp", tp, "1: step times come from a calibration, measured at TP 1"
                )
        return (1,)
    for tp in asked:
        check_degree(inputs, tp, place="search.tp")
    widest = min(inputs.cluster.gpus_per_hb_domain, inputs.model.num_heads)
    return tuple(sorted(set(asked))) or tuple(
        tp for tp in range(1, widest + 1) if broken_rule(inputs.model, tp) is None
    )


def check_degree(inputs: Inputs, tp: int, *, place: str) -> None:
    """Refuse a degree that does not divide the model, or that no cluster of this size holds."""
    rule = broken_rule(inputs.model, tp)
    if rule is not None:
        raise InputError(place, tp, rule)
    if tp > inputs.cluster.max_gpus:
        raise InputError(place, tp, f"at most cluster.max_gpus = {inputs.cluster.max_gpus}")


def broken_rule(model: ModelSpec, tp: int) -> str | None:
    """Return the rule that *tp* breaks for this model, if any."""
    if model.num_heads % tp:
        return f"a divisor of the model's {model.num_heads} attention heads"
    if model.mla is None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"a divisor or a multiple of the model's {model.num_kv_heads} KV heads"
    widths = [model.ffn_size, model.moe.expert_ffn_size if model.moe else 0]
    for width in widths:
        if width % tp:
            return f"a divisor of the feed-forward width {width}"
    return None


def pairing_rule(model: ModelSpec, layout: Layout) -> str | None:
    """Return the rule of the NIXL connector that a pair of degrees breaks, if any."""
    wide, narrow = (
        max(layout.prefill_tp, layout.decode_tp),
        min(layout.prefill_tp, layout.decode_tp),
    )
    if wide % narrow:
        return f"one TP is a multiple of the other (NIXL), not {layout}"
    if layout.prefill_tp > layout.decode_tp and (
        model.mla is None and layout.prefill_tp > model.num_kv_heads
    ):
        return (
            f"a prefill TP wider than decode's is at most the {model.num_kv_heads} KV heads (NIXL),"
            f" not {layout}"
        )
    return None


def max_model_len(inputs: Inputs) -> int:
    """
    Longest sequence that the engines accept.

    What the scenario says, else the longest request of its load, in whole blocks.
    """
    asked = inputs.scenario.model.max_context_tokens
    if asked is not None:
        return asked
    load = inputs.scenario.workload
    longest = load.input_tokens.max_tokens + load.output_tokens.max_tokens
    block = block_size(inputs)
    return min(-(-longest // block) * block, inputs.model.max_context_tokens)


def block_size(inputs: Inputs) -> int:
    """Tokens of a KV block on this kind of machine."""
    engine = inputs.engine
    return engine.cpu_block_size if inputs.gpu.kind == "cpu" else engine.block_size


def memory_rule(inputs: Inputs, tp: int) -> str | None:
    """Say by how much the model does not fit at *tp*, if so; a CPU is given its KV space."""
    if inputs.gpu.kind == "cpu":
        return None
    left = kv_space_bytes(inputs.model, inputs.gpu, inputs.engine, tp=tp)
    needed = 2 * _sequence_bytes(inputs, max_model_len(inputs), tp)
    if left >= needed:
        return None
    weights = weight_bytes(inputs.model, tp=tp)
    return (
        f"TP{tp}: {weights / 1e9:.0f} GB of weights per GPU leave {max(0.0, left) / 1e9:.1f} GB of"
        f" {inputs.gpu.require('hbm_bytes') / 1e9:.0f} GB for the KV cache; two of the longest"
        f" requests need {needed / 1e9:.1f} GB"
    )


def decode_slots(inputs: Inputs, tp: int, *, context: float, deviation: float) -> int:
    """
    Largest batch whose KV cache fits, three deviations of its total context included.

        B b(E[s]) + 3 sqrt(B) b(1) sigma_s <= M_kv      (docs/model.md, eq. M5)

    Args:
        inputs: model, GPU, engine, calibration.
        tp: tensor-parallel degree.
        context: E[s], tokens of a sequence.
        deviation: sigma_s.

    Returns:
        Sequences; 0 if none fits, never more than engine and calibration know.

    Source:
        Contexts of a batch are independent; vLLM preempts where their sum exceeds the cache.

    Ignores:
        Prefixes that sequences share.

    """
    limit = inputs.engine.max_batch_size
    if inputs.calibration is not None:
        limit = min(limit, inputs.calibration.decode.max_batch)
    if inputs.gpu.kind == "cpu":
        return limit
    space = kv_space_bytes(inputs.model, inputs.gpu, inputs.engine, tp=tp)
    if space <= 0:
        return 0
    each = _sequence_bytes(inputs, context + block_size(inputs) / 2, tp)
    token = each / context
    root = (
        -MARGIN * token * deviation
        + np.hypot(MARGIN * token * deviation, 2 * np.sqrt(each * space))
    ) / (2 * each)
    return min(limit, int(root**2))


def kv_pool_bytes(inputs: Inputs, tp: int, *, sequences: int) -> float:
    """
    KV cache per GPU: all that memory leaves; on a CPU what *sequences* of full length need.

    (docs/model.md, eq. M4)
    """
    if inputs.gpu.kind == "cpu":
        return sequences * _sequence_bytes(inputs, max_model_len(inputs), tp)
    return float(np.floor(kv_space_bytes(inputs.model, inputs.gpu, inputs.engine, tp=tp)))


def _sequence_bytes(inputs: Inputs, tokens: float, tp: int) -> float:
    """KV cache of one sequence (eq. M3)."""
    return kv_bytes_per_sequence(inputs.model, tokens, tp=tp, block_size=block_size(inputs))
