"""Which keys of a Hugging Face `config.json` make the architecture, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ARCHITECTURE_KEYS = frozenset({
    "model_type",
    # width and depth
    "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "tie_word_embeddings",
    "max_position_embeddings", "mlp_bias",
    "n_layer", "n_embd", "n_embed", "n_inner", "n_positions", "seq_length", "ffn_hidden_size",
    "intermediate_size_mlp",
    # attention
    "n_head", "num_kv_heads", "multi_query", "new_decoder_architecture", "parallel_attn",
    "attn_output_gate", "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval",
    "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "qkv_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "sliding_window_pattern",
    # linear attention
    "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "mamba_ssm_dtype",
    # multi-head latent attention
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "index_topk", "index_n_heads", "index_head_dim", "indexer_types", "index_topk_pattern",
    "index_topk_freq",
    # mixture of experts
    "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok",
    "experts_per_token", "moe_intermediate_size", "n_shared_experts",
    "shared_expert_intermediate_size", "first_k_dense_replace", "moe_layer_freq",
    "decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step", "moe_layers",
    "shared_intermediate_size",
})  # fmt: skip
"""Keys that change shapes or work; the reader of `sizing.catalog.huggingface` sees no others."""


def language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the language model's config: keys of a `text_config` go over those outside it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def architecture(config: Mapping[str, object]) -> dict[str, object]:
    """Return what shapes the language model; keys that are null count as absent."""
    keys = language_model(config)
    return {key: keys[key] for key in ARCHITECTURE_KEYS & keys.keys() if keys[key] is not None}


def architecture_hash(config: Mapping[str, object]) -> str:
    """
    Fingerprint the architecture of a Hugging Face config.

    Two configs that differ only in names, token ids, dtypes, quantisation, RoPE settings or the
    version of the library that wrote them have the same fingerprint.

    Args:
        config: parsed `config.json`.

    Returns:
        The first 16 hex digits of the SHA-256 of the canonical JSON of `architecture(config)`.

    """
    canonical = json.dumps(architecture(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
