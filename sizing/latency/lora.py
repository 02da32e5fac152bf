"""LoRA adapters in a step: the two kernels of every layer that they change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.lora import lora_modules, popularity
from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.op import ACTIVATION_BYTES, Op, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.lora import LoraSpec
    from minicluster.specs.model import ModelSpec
    from sizing.latency.load import StepLoad

BUFFER_BYTES = DTYPE_BYTES["fp32"]
"""Bytes of a value between the two kernels (vLLM 0.29.0, lora/punica_wrapper/punica_gpu.py)."""


def distinct_adapters(lora: LoraSpec, requests: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Return the distinct adapters of a batch of independent requests, on average.

        g = min(max_loras, sum_i 1 - (1 - p_i)^B)      (docs/model.md, eq. W12)
    """
    shares = np.array(popularity(lora.adapters, lora.popularity_exponent))
    met = 1 - (1 - shares) ** np.asarray(requests, dtype=np.float64)[..., None]
    return np.asarray(np.minimum(float(lora.max_loras), met.sum(axis=-1)))


def lora_ops(lora: LoraSpec | None, model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Multiply each token by A and B of its request's adapter, beside every layer that has slots.

        shrink: F = 2 m r c k,  Q = g r c k a + m (k a + c r 4),
        expand: F = 2 m r n,  Q = g r n a + m (c r 4 + 2 n a),
        one launch of each a layer and module      (docs/model.md, eq. W12)

    Returns:
        No ops without adapters. A kernel takes what R4 says of one that mostly moves bytes.

    Source:
        vLLM 0.29.0, lora/ops/triton_ops/lora_shrink_op.py and lora_expand_op.py: weights of the
        batch's adapters, at the rank of the slots; k inputs, n outputs, c projections as one.

    Ignores:
        Tokens of an adapter that fill no tile, clearing the buffer, and sorting tokens by adapter.
    """
    if lora is None:
        return ()
    m, rank, a = load.tokens, lora.max_lora_rank, ACTIVATION_BYTES
    there = distinct_adapters(lora, load.prompts + load.sequences) * DTYPE_BYTES[model.dtype]
    ops = []
    for each in lora_modules(lora, model, tp=tp):
        inner, made = each.parts * each.inner, each.columns
        buffer = each.parts * rank * BUFFER_BYTES
        works = {
            "shrink": Work(
                2 * m * rank * inner, there * rank * inner + m * (each.inner * a + buffer)
            ),
            "expand": Work(2 * m * rank * made, there * rank * made + m * (buffer + 2 * made * a)),
        }
        ops += [
            Op(f"LoRA {each.name} {name}", "W12", "elementwise", "bf16", model.num_layers, work)
            for name, work in works.items()
        ]
    return tuple(ops)
