"""How vLLM may slice a model: tensor-parallel degrees, pairs of them, and groups of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing


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


def expert_rule(model: ModelSpec, slicing: Slicing) -> str | None:
    """
    Return what the copies of attention and groups of experts have to be, if they are not.

    Source:
        vLLM 0.29.0, fused_moe/config.py: with expert parallelism whole experts are divided among
        all tp x dp ranks of a stage, without it each is sliced over all of them; data-parallel
        ranks of a model without experts share nothing, so they are replicas.
    """
    ranks = slicing.tp * slicing.dp
    if model.moe is None:
        if slicing.dp > 1 or slicing.ep > 1:
            return "dp 1 and ep 1: the model has no experts (more replicas instead of dp)"
        return None
    if slicing.ep not in {1, ranks}:
        return f"ep 1, or {ranks}: vLLM divides experts among all tp x dp = {ranks} ranks"
    if model.moe.num_experts % slicing.ep:
        return f"an ep that divides the model's {model.moe.num_experts} experts"
    if slicing.ep == 1 and model.moe.expert_ffn_size % ranks:
        rule = f"tp x dp that divides an expert's width {model.moe.expert_ffn_size}"
        return rule if model.moe.num_experts % ranks else f"{rule}, or ep {ranks}"
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
