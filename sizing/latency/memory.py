"""Bytes on one GPU that weights and working memory leave for the KV cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.specs.slicing import Slicing
from sizing.latency.weights import weight_bytes
from sizing.latency.working import activation_bytes, exchange_bytes

if TYPE_CHECKING:
    from minicluster.specs.engine import EngineProfile
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.model import ModelSpec


def kv_space_bytes(
    model: ModelSpec,
    gpu: GpuSpec,
    engine: EngineProfile,
    *,
    tp: int = 1,
    slicing: Slicing | None = None,
) -> float:
    """
    What a GPU has left for the KV cache; negative if the weights do not fit.

        M_kv = f M - M_w - M_act - M_run - M_x      (docs/model.md, eq. M4)

    Args:
        model: shapes.
        gpu: M, its memory.
        engine: f, M_run (context and CUDA graphs), limits of a step.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*.

    Returns:
        Bytes.

    Source:
        vLLM profiles a step of `max_batched_tokens` and gives the rest to the KV cache.

    Ignores:
        Fragmentation; towers for images or sound.

    """
    sliced = slicing or Slicing(tp=tp)
    usable = gpu.require("hbm_bytes") * engine.memory_fraction
    working = activation_bytes(model, engine, slicing=sliced) + exchange_bytes(sliced)
    return usable - weight_bytes(model, slicing=sliced) - working - engine.runtime_bytes


def max_concurrent_tokens(
    model: ModelSpec,
    gpu: GpuSpec,
    engine: EngineProfile,
    *,
    slicing: Slicing,
    sequence_tokens: float,
) -> float:
    """
    Tokens in the KV caches of all copies of attention, held by sequences of one length.

        dp s floor(M_kv / M_s)      (docs/model.md, eq. M7)

    Args:
        model: shapes.
        gpu: its memory.
        engine: block size and working memory.
        slicing: of one replica.
        sequence_tokens: s.

    Returns:
        Tokens; 0 if the weights do not fit.

    """
    space = kv_space_bytes(model, gpu, engine, slicing=slicing)
    each = kv_bytes_per_sequence(
        model, sequence_tokens, slicing=slicing, block_size=engine.block_size
    )
    return slicing.dp * sequence_tokens * max(0, math.floor(space / each))
