"""Known values of `model_type`, and what each implies that its config does not say."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sizing.catalog import folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    Models that one `model_type` names: what `configs/huggingface/families.json` does not say.

    Attributes:
        library: the model_type whose configuration class has the defaults; "": its own.
        renamed: keys of this family by the key that we read in their place.
        also: further keys of the hub that the library leaves unread.
        gated_mlp: three matrices in a feed-forward instead of two.
        experts: it has a mixture of experts, unless its number of experts is absent or 0.
        expert_ffn: key with the intermediate size of one expert.
        dense_ffn: key with the intermediate size of a dense feed-forward.
        shared_ffn: key with that of all shared experts together.
        latent_attention: multi-head latent attention (DeepSeek).
        linear: kind of linear attention in layers of that type (`LinearSpec.kind`), or "".
        layers: the rule for the kinds of layers where `layer_types` does not say; see `layers.py`.
        fp8_blocks: its publishers' fp8 checkpoints are scaled in blocks (`ModelSpec.block_scaled`).
        position_rows: rows of a table of positions beyond the longest sequence; `None`: no table.
        query_norm: `head` or `all`, whatever the config says (`ModelSpec.query_norm`).
        defaults: what the modelling code assumes, in place of the configuration class.
    """

    library: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    gated_mlp: bool = True
    experts: bool = False
    expert_ffn: str = "moe_intermediate_size"
    dense_ffn: str = "intermediate_size"
    shared_ffn: str = "shared_expert_intermediate_size"
    latent_attention: bool = False
    linear: str = ""
    layers: str = ""
    position_rows: int | None = None
    query_norm: str = ""
    fp8_blocks: bool = False
    defaults: dict[str, object] = field(default_factory=dict)


class Library(NamedTuple):
    """What the configuration class of a model_type says: other names of its keys, and defaults."""

    renamed: Mapping[str, str]
    defaults: Mapping[str, object]


@cache
def _table(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def library(model_type: str) -> Library:
    """Return what transformers' configuration class of a family of ours says."""
    table = _table(folder.configs() / "huggingface" / "families.json")
    return Library(**table["families"][FAMILIES[model_type].library or model_type])


def shapes_nothing(key: str) -> bool:
    """Say whether a key changes neither parameters, nor work, nor cache of a language model."""
    table = _table(folder.configs() / "huggingface" / "families.json")
    return harmless(key) or key in table["generation"]


def harmless(key: str) -> bool:
    """Say whether a key is one of `configs/huggingface/harmless.toml`."""
    return _patterns(folder.configs() / "huggingface" / "harmless.toml").fullmatch(key) is not None


@cache
def _patterns(path: Path) -> re.Pattern[str]:
    tables = tomllib.loads(path.read_text(encoding="utf-8")).values()
    return re.compile("|".join(name for table in tables for name in table["names"]))


LLAMA = Family()
QWEN2 = Family(layers="above", defaults={"attention_bias": True})
QWEN3 = Family(layers="above", query_norm="head", fp8_blocks=True)
QWEN3_MOE = Family(
    experts=True, query_norm="head", fp8_blocks=True, layers="all",
    also=("max_window_layers",),
)  # fmt: skip
QWEN_NEXT = Family(
    linear="delta", layers="interval", experts=True, query_norm="head", fp8_blocks=True,
    also=("full_attention_interval", "attn_output_gate", "mamba_ssm_dtype"),
    defaults={"attn_output_gate": True, "full_attention_interval": 4},
)  # fmt: skip
DEEPSEEK = Family(
    experts=True, renamed={"num_experts": "n_routed_experts"}, latent_attention=True,
    fp8_blocks=True, also=("moe_layer_freq", "qk_head_dim"),
)  # fmt: skip
DEEPSEEK_INDEX = replace(
    DEEPSEEK, layers="indexed",
    also=(*DEEPSEEK.also, "index_topk_pattern", "index_topk_freq", "indexer_types", "num_experts"),
)  # fmt: skip
GLM4_MOE = Family(
    experts=True, renamed={"num_experts": "n_routed_experts"}, fp8_blocks=True,
)  # fmt: skip
LOCAL = {"num_experts": "num_local_experts"}
MIXTRAL = Family(experts=True, renamed=LOCAL, expert_ffn="intermediate_size", layers="all")
GRANITE_MOE = Family(
    experts=True,
    renamed=LOCAL,
    expert_ffn="intermediate_size",
    shared_ffn="shared_intermediate_size",
)
MAMBA = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "chunk_size": "mamba_chunk_size",
}
"""Keys of a Mamba-2 layer in Falcon-H1, Bamba and Granite 4 by those of Nemotron-H."""
GEMMA3 = Family(
    layers="pattern", query_norm="head", also=("sliding_window_pattern", "_sliding_window_pattern"),
    defaults={"sliding_window_pattern": 6},
)  # fmt: skip
PLAIN = Family(gated_mlp=False, defaults={"attention_bias": True})
GPT2 = replace(PLAIN, renamed={"intermediate_size": "n_inner"}, position_rows=0)

FAMILIES = {
    "llama": LLAMA,
    "Yi": replace(LLAMA, library="llama"),
    "mistral": Family(layers="all"),
    "ministral": Family(layers="all"),
    "ministral3": Family(layers="all"),
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "mimo": replace(QWEN2, library="qwen2", also=("attention_bias",)),
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen2_vl": replace(QWEN2, library="qwen2_vl_text"),
    "qwen2_5_vl": replace(QWEN2, library="qwen2_5_vl_text"),
    "qwen3": QWEN3,
    "qwen3_vl_text": replace(QWEN3, layers=""),
    "qwen2_moe": Family(experts=True, layers="below", renamed={"attention_bias": "qkv_bias"}),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe_text": QWEN3_MOE,
    "qwen3_next": QWEN_NEXT,
    "qwen3_5_moe_text": QWEN_NEXT,
    "qwen3_5_text": replace(QWEN_NEXT, experts=False),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK_INDEX,
    "kimi_k2": replace(DEEPSEEK, library="deepseek_v3"),
    "glm_moe_dsa": DEEPSEEK_INDEX,
    "glm": LLAMA,
    "glm4": LLAMA,
    "glm4_moe": GLM4_MOE,
    "glm4v_moe_text": GLM4_MOE,
    "glm4_moe_lite": replace(
        DEEPSEEK, also=(*DEEPSEEK.also, "first_k_dense_replace"),
        defaults={"first_k_dense_replace": 1},
    ),
    "llama4_text": Family(
        experts=True, renamed=LOCAL, expert_ffn="intermediate_size", layers="chunks",
        dense_ffn="intermediate_size_mlp", defaults={"n_shared_experts": 1},
    ),
    "minimax": Family(
        experts=True, renamed=LOCAL, expert_ffn="intermediate_size", linear="lightning",
        layers="alternate",
    ),
    "minimax_m2": Family(
        experts=True, renamed=LOCAL, expert_ffn="intermediate_size", query_norm="all",
        fp8_blocks=True, also=("attn_type_list",),
    ),
    "gpt_oss": Family(
        experts=True, renamed=LOCAL, expert_ffn="intermediate_size", layers="pattern",
        also=("experts_per_token",), defaults={"sliding_window_pattern": 2},
    ),
    "gptj": Family(
        renamed={"intermediate_size": "n_inner"}, gated_mlp=False, defaults={"parallel_attn": True}
    ),
    "falcon": Family(
        renamed={"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
        also=("n_embed",), gated_mlp=False,
    ),
    "bloom": Family(
        renamed={"hidden_size": "n_embed"}, also=("seq_length", "n_inner"), gated_mlp=False,
        # Positions have no table; 2,048 is what vLLM takes for a config that names no length.
        defaults={"max_position_embeddings": 2048, "attention_bias": True},
    ),
    "phi3": Family(layers="all"),
    "phimoe": MIXTRAL,
    "gemma": LLAMA,
    "gemma2": Family(layers="pattern", defaults={"sliding_window_pattern": 2}),
    "gemma3_text": GEMMA3,
    "gemma4_text": Family(
        layers="pattern", query_norm="head", experts=True, shared_ffn="intermediate_size",
        renamed={"num_experts_per_tok": "top_k_experts"},
        also=(
            "global_head_dim", "num_global_key_value_heads", "expert_intermediate_size",
            "vocab_size_per_layer_input", "per_layer_config",
        ),
        defaults={"sliding_window_pattern": 6, "global_head_dim": 512},
    ),
    "olmo2": Family(query_norm="all"),
    "olmo3": Family(layers="pattern", query_norm="all", defaults={"sliding_window_pattern": 4}),
    "smollm3": Family(layers="unrotated"),
    "granite": LLAMA,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
    "granitemoehybrid": replace(
        GRANITE_MOE, linear="mamba2", layers="linear", renamed={**LOCAL, **MAMBA},
        also=("position_embedding_type", "layers_block_type"),
    ),
    "bamba": Family(linear="mamba2", layers="indices", renamed=MAMBA),
    "falcon_h1": Family(
        linear="mamba2", layers="hybrid", renamed=MAMBA, also=("layer_types", "head_dim"),
    ),
    "nemotron_h": Family(
        linear="mamba2", layers="letters", experts=True, gated_mlp=False,
        renamed={"num_experts": "n_routed_experts"},
        shared_ffn="moe_shared_expert_intermediate_size",
        also=("hybrid_override_pattern", "num_hidden_layers", "attention_head_dim", "expand"),
    ),
    "nemotron": Family(gated_mlp=False),
    "arcee": Family(gated_mlp=False),
    "ernie4_5": Family(renamed={"attention_bias": "use_bias"}),
    "ernie4_5_moe": Family(
        experts=True,
        renamed={
            "attention_bias": "use_bias", "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k", "n_shared_experts": "moe_num_shared_experts",
        },
    ),
    "exaone4": Family(layers="pattern", query_norm="head"),
    "hunyuan_v1_dense": Family(query_norm="head"),
    "seed_oss": LLAMA,
    "dots1": Family(
        experts=True, renamed={"num_experts": "n_routed_experts"}, layers="above",
        query_norm="head", also=("moe_layer_freq",),
    ),
    "solar_open": GLM4_MOE,
    "cohere": Family(defaults={"parallel_attn": True}),
    "cohere2": Family(
        layers="pattern", also=("sliding_window_pattern",),
        defaults={"parallel_attn": True, "sliding_window_pattern": 4},
    ),
    "phi": replace(PLAIN, defaults={"parallel_attn": True, "attention_bias": True}),
    "stablelm": Family(renamed={"attention_bias": "use_qkv_bias"}),
    "starcoder2": Family(layers="all", renamed={"attention_bias": "use_bias"}, gated_mlp=False),
    "gpt_neox": replace(PLAIN, renamed={"parallel_attn": "use_parallel_residual"}),
    "gpt2": GPT2,
    "gpt_bigcode": replace(GPT2, also=("num_key_value_heads",)),
    "opt": replace(PLAIN, renamed={"intermediate_size": "ffn_dim"}, position_rows=2),
}  # fmt: skip

REFUSED = {
    "deepseek_v4": "its attention is compressed (CSA, HCA)",
    "deepseek_ref": "its attention is compressed (CSA, HCA)",
    "gemma3n_text": "layers have inputs of their own and share keys and values",
    "gemma3n": "layers have inputs of their own and share keys and values",
    "kimi_linear": "its linear attention (KDA) has gates per channel",
    "minimax_m3": "its sparse attention has an index without a latent",
    "minimax_m3_vl": "its sparse attention has an index without a latent",
    "mimo_v2_flash": "layers with a window have other heads than the others",
    "step3p7": "layers with a window have other heads than the others",
    "lfm2": "layers of short convolutions have neither attention nor a state",
    "lfm2_moe": "layers of short convolutions have neither attention nor a state",
    "nemotron-nas": "its layers differ from one another",
    "mamba": "no layer has attention",
    "mamba2": "no layer has attention",
    "falcon_mamba": "no layer has attention",
    "jamba": "its state-space layers are of Mamba-1",
    "zamba2": "layers share their weights",
    "recurrent_gemma": "its recurrence is an LRU",
}
