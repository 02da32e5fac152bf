"""Feed-forwards of a config: dense size and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.specs.model import MoeSpec
from sizing.catalog.huggingface.families import EXPERT_KEYS, Family

if TYPE_CHECKING:
    from sizing.catalog.huggingface.keys import Keys


def read_experts(keys: Keys, family: Family) -> MoeSpec | None:
    """Read the experts, if there are any."""
    if not family.experts:
        for key in EXPERT_KEYS:
            keys.refuse(key, "models of this model_type have no experts")
        return None
    counts = next((key for key in EXPERT_KEYS if keys.has(key)), family.experts)
    if family.latent_attention and not keys.has(counts):
        return None
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        if keys.count(key, 1) != 1:
            raise keys.wrong(key, "1: experts in every layer after the dense ones")
    keys.refuse("shared_intermediate_size", "shared experts of this kind are not known")
    size = keys.count(family.expert_ffn)
    num_shared = keys.count("n_shared_experts", 0)
    shared_size = keys.count("shared_expert_intermediate_size", num_shared * size)
    return MoeSpec(
        num_experts=keys.count(counts),
        experts_per_token=keys.count("num_experts_per_tok"),
        expert_ffn_size=size,
        num_shared_experts=num_shared or int(shared_size > 0),
        shared_ffn_size=shared_size,
        num_dense_layers=_dense_layers(keys),
    )


def _dense_layers(keys: Keys) -> int:
    """Count the layers without experts, by whichever key says so."""
    layers = keys.count("num_hidden_layers")
    if keys.has("moe_layers"):
        return layers - len(keys.sequence("moe_layers"))
    if keys.has("interleave_moe_layer_step"):
        return layers - layers // max(1, keys.count("interleave_moe_layer_step"))
    dense = keys.sequence("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise keys.wrong("mlp_only_layers", "the first layers only")
    return keys.count("first_k_dense_replace", len(dense))


def read_dense_size(keys: Keys, family: Family, moe: MoeSpec | None) -> int:
    """Return the dense feed-forward's size; 0 where every layer has experts."""
    if moe and not moe.num_dense_layers:
        return 0
    otherwise = None if family.gated_mlp else 4 * keys.count("hidden_size")
    return keys.count(family.dense_ffn, otherwise)
