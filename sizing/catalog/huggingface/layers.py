"""Attention and feed-forward of a config's layers: which see what, dense size, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from minicluster.errors import InputError
from minicluster.specs.model import IndexSpec, LinearSpec, MlaSpec, MoeSpec
from sizing.catalog.huggingface.families import EXPERT_KEYS, Family


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one file (`place`), with what their family assumes where one is absent."""

    values: Mapping[str, object]
    defaults: Mapping[str, object]
    place: str

    def has(self, name: str) -> bool:
        """Say whether the key is there, in the file or by default."""
        return self.values.get(name, self.defaults.get(name)) is not None

    def count(self, name: str, otherwise: int | None = None) -> int:
        """Return a whole number; *otherwise* where the key is absent."""
        value = self.values.get(name, self.defaults.get(name, otherwise))
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "a whole number, zero or more")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false where the key is absent."""
        value = self.values.get(name, self.defaults.get(name, False))
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def sequence(self, name: str) -> list[object]:
        """Return a list; empty where the key is absent."""
        value = self.values.get(name, self.defaults.get(name, []))
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def refuse(self, name: str, why: str) -> None:
        """Refuse the model if the key is there and says more than nothing."""
        if self.values.get(name) not in (None, False, 0, [], {}):
            raise self.wrong(name, f"no such key: {why}")

    def wrong(self, name: str, expectation: str) -> InputError:
        """Return the error for a key."""
        return InputError(f"{self.place}: {name}", self.values.get(name), expectation)


STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that see a window, and the key with its size."""


class Layers(NamedTuple):
    """Number of layers with a window or a linear state; the others attend to everything."""

    window_tokens: int = 0
    num_windowed: int = 0
    chunked: bool = False
    num_linear: int = 0


def read_layers(keys: Keys, family: Family, context: int) -> Layers:
    """
    Find which layers are windowed or linear.

    Args:
        family: its rules where the config is silent.
        context: longest sequence; a window at least as long is none.
    """
    kinds = _kinds(keys, family)
    linear = kinds.count("linear_attention")
    kind = "chunked_attention" if "chunked_attention" in kinds else "sliding_attention"
    window = keys.count(WINDOWED[kind], 0)
    if "use_sliding_window" in family.defaults and not keys.flag("use_sliding_window"):
        window = 0
    if not 0 < window < context:
        return Layers(num_linear=linear)
    covered = kinds.count(kind) if kinds else _covered(keys, family)
    if not covered:
        return Layers(num_linear=linear)
    return Layers(
        window_tokens=window,
        num_windowed=covered,
        chunked=kind == "chunked_attention",
        num_linear=linear,
    )


def _kinds(keys: Keys, family: Family) -> list[object]:
    """Return the kind of each layer; empty where only windows have a rule."""
    layers, kinds = keys.count("num_hidden_layers"), keys.sequence("layer_types")
    known = ["sliding_attention", "full_attention"]
    for kind, is_known in (
        ("chunked_attention", keys.has("attention_chunk_size")),
        ("linear_attention", bool(family.linear)),
        ("indexed_attention", keys.has("index_topk")),
    ):
        known += [kind] * is_known
    if kinds and len(kinds) != layers:
        raise keys.wrong("layer_types", f"{layers} entries")
    for layer, found in enumerate(kinds):
        if found not in known:
            place = f"{keys.place}: layer_types[{layer}]"
            raise InputError(place, found, "one of " + ", ".join(known))
    return kinds or _patterned(keys, family, layers)


def _patterned(keys: Keys, family: Family, layers: int) -> list[object]:
    """Return the kind of each layer where a pattern says so, in any order."""
    if keys.has("attention_chunk_size"):
        interval = max(1, keys.count("no_rope_layer_interval"))
        windowed: list[object] = keys.sequence("no_rope_layers")
        windowed = windowed or [(layer + 1) % interval != 0 for layer in range(layers)]
        return ["chunked_attention" if one else "full_attention" for one in windowed]
    if not family.linear:
        return []
    if family.linear == "delta":
        full = layers // max(1, keys.count("full_attention_interval"))
    else:
        full = layers // 2
    return [*["full_attention"] * full, *["linear_attention"] * (layers - full)]


def _covered(keys: Keys, family: Family) -> int:
    """Count the layers that use the sliding window by the rule of the family."""
    layers = keys.count("num_hidden_layers")
    if family.windows == "above":
        return max(0, layers - keys.count("max_window_layers"))
    if family.windows == "pattern":
        return layers - layers // max(1, keys.count("sliding_window_pattern"))
    if family.windows == "all":
        return layers
    raise keys.wrong("sliding_window", "no such key: nothing says which layers use it")


def read_latent(keys: Keys, family: Family) -> MlaSpec | None:
    """Read multi-head latent attention, if the family has it."""
    if not family.latent_attention:
        keys.refuse("kv_lora_rank", "models of this model_type have no latent attention")
        return None
    return MlaSpec(
        q_lora_rank=keys.count("q_lora_rank", 0),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )


def read_index(keys: Keys, mla: MlaSpec | None) -> IndexSpec | None:
    """Read the index of sparse attention, if there is one in every layer."""
    if not keys.has("index_topk"):
        return None
    if mla is None:
        keys.refuse("index_topk", "only latent attention is known to have an index")
    if any(kind != "full" for kind in keys.sequence("indexer_types")):
        raise keys.wrong("indexer_types", "full in every layer: shared ones are not known")
    keys.refuse("index_topk_pattern", "an index of its own in every layer is all that is known")
    if keys.count("index_topk_freq", 1) != 1:
        raise keys.wrong("index_topk_freq", "1: an index of its own in every layer")
    return IndexSpec(
        num_heads=keys.count("index_n_heads"),
        head_dim=keys.count("index_head_dim"),
        top_k=keys.count("index_topk"),
    )


def read_linear(keys: Keys, family: Family, num_layers: int) -> LinearSpec | None:
    """Read linear attention, if any layer has it."""
    if not num_layers:
        return None
    if family.linear == "lightning":
        heads = keys.count("num_attention_heads")
        size = keys.count("head_dim", keys.count("hidden_size") // max(heads, 1))
        return LinearSpec(
            num_layers=num_layers,
            num_key_heads=heads,
            num_value_heads=heads,
            key_head_dim=size,
            value_head_dim=size,
            kind="lightning",
        )
    named = keys.values.get("mamba_ssm_dtype", "float32")
    if str(named) not in STATE_DTYPES:
        raise keys.wrong("mamba_ssm_dtype", "one of " + ", ".join(STATE_DTYPES))
    return LinearSpec(
        num_layers=num_layers,
        num_key_heads=keys.count("linear_num_key_heads"),
        num_value_heads=keys.count("linear_num_value_heads"),
        key_head_dim=keys.count("linear_key_head_dim"),
        value_head_dim=keys.count("linear_value_head_dim"),
        conv_kernel=keys.count("linear_conv_kernel_dim"),
        state_dtype=STATE_DTYPES[str(named)],
    )


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
    if keys.has("mlp_layer_types"):
        kinds = keys.sequence("mlp_layer_types")
        first = kinds.count("dense")
        if kinds != ["dense"] * first + ["sparse"] * (layers - first):
            raise keys.wrong("mlp_layer_types", f"{layers} entries, dense ones before sparse ones")
        return first
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
