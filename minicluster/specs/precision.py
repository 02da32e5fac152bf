"""A model with its weights in another dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec

UNQUANTISED = ("bf16", "fp16", "fp32")


def with_weight_dtype(model: ModelSpec, dtype: str | None) -> ModelSpec:
    """
    Return *model* with its weights in another dtype; itself where *dtype* is `None`.

    16 and 32 bits are the dtype of everything; narrower ones that of the quantised parts.
    """
    if dtype in UNQUANTISED:
        return replace(
            model,
            dtype=dtype,
            weight_dtype=dtype,
            kv_dtype=dtype,
            attention_quantised=True,
            dense_quantised=True,
            shared_quantised=True,
            weight_group=0,
        )
    if dtype is None or dtype == model.weight_dtype:
        return model
    return replace(model, weight_dtype=dtype, weight_group=0)
