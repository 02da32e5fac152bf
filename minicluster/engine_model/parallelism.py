"""Tensor-parallel degrees that vLLM accepts of a model, alone and in a prefill-decode pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec


def tp_rule(model: ModelSpec, tp: int) -> str | None:
    """
    Return what a tensor-parallel degree of *model* has to be, if *tp* is not; else `None`.

    Source:
        vLLM 0.29.0: `ensure_divisibility` of attention heads and of every sliced projection; KV
        heads are sliced, or copied whole where there are fewer of them than ranks.
    """
    if model.num_heads % tp:
        return f"a divisor of the model's {model.num_heads} attention heads"
    if model.mla is None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"a divisor or a multiple of the model's {model.num_kv_heads} KV heads"
    for width in (model.ffn_size, model.moe.expert_ffn_size if model.moe else 0):
        if width % tp:
            return f"a divisor of the feed-forward width {width}"
    return None


def nixl_rule(model: ModelSpec, *, prefill_tp: int, decode_tp: int) -> str | None:
    """
    Return what the degrees of a pair have to be for NIXL, if they are not; else `None`.

    Source:
        vLLM 0.29.0, nixl/base_worker.py: a rank of one pool reads from whole ranks of the other,
        and a decode rank that reads from several of prefill's finds no KV head on two of them.
    """
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        return "degrees of which one is a multiple of the other (NIXL)"
    if prefill_tp > decode_tp and model.mla is None and prefill_tp > model.num_kv_heads:
        return (
            f"a prefill TP of at most the model's {model.num_kv_heads} KV heads, where it is wider"
            " than decode's (NIXL)"
        )
    return None
