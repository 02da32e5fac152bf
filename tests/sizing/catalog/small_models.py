"""The keys of a small model of every family that the sizer reads, as the hub has them."""

from __future__ import annotations

from typing import Any

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_ROUTED = {**ROUTED, "num_experts": 8}
DEEPSEEK_ROUTED = {**ROUTED, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
WITH_LATENT = {
    **DEEPSEEK_ROUTED,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
INDEX = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 16, "n_shared_experts": 1}
STATE = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
SHARED = {"shared_expert_intermediate_size": 48}
UNKNOWN = {"intermediate_size": None, "num_key_value_heads": None}
"""Keys that a family does not have."""
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 6,
    "sliding_window": 32,
}
ALSO: dict[str, dict[str, Any]] = {
    "mixtral": LOCAL,
    "qwen2_moe": {**QWEN_ROUTED, **SHARED},
    "qwen3_moe": {**QWEN_ROUTED, "mlp_only_layers": [0]},
    "qwen3_vl_moe_text": QWEN_ROUTED,
    "deepseek_v2": {**WITH_LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {**WITH_LATENT, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "kimi_k2": {**WITH_LATENT, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v32": {**WITH_LATENT, **INDEX, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**WITH_LATENT, **INDEX, "first_k_dense_replace": 1},
    "glm4_moe": {**DEEPSEEK_ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "glm4v_moe_text": {**DEEPSEEK_ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "solar_open": {
        **DEEPSEEK_ROUTED,
        "intermediate_size": None,
        "n_shared_experts": 1,
        "head_dim": 8,
    },
    "dots1": {**DEEPSEEK_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 2, "head_dim": 8},
    "llama4_text": {
        "num_local_experts": 8,
        "head_dim": 8,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
    },
    "minimax": {**LOCAL, "head_dim": 8},
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "qwen3_next": {**QWEN_ROUTED, **STATE, **SHARED},
    "qwen3_5_moe_text": {**QWEN_ROUTED, **STATE, **SHARED, "intermediate_size": None},
    "qwen3_5_text": STATE,
    "falcon": {**UNKNOWN, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gptj": {**UNKNOWN, "rotary_dim": 4},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe_lite": {**WITH_LATENT, "n_shared_experts": 1},
    "phimoe": LOCAL,
    "ministral": {"head_dim": 8},
    "ministral3": {"head_dim": 8},
    "bloom": {**UNKNOWN, "max_position_embeddings": None},
    "gpt_oss": {**LOCAL, "head_dim": 8},
    "qwen3": {"head_dim": 16},
    "qwen3_vl_text": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "gemma4_text": GEMMA4,
    "nemotron_h": {
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "M-M*E-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 8,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 48,
        **ROUTED,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 48},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL,
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": UNKNOWN,
    "gpt_bigcode": UNKNOWN,
    "opt": {**UNKNOWN, "ffn_dim": 96, "word_embed_proj_dim": 64},
}


def small(model_type: str) -> dict[str, Any]:
    """Return the keys of a small model of a family, without its name."""
    wanted = {**SMALL, **ALSO.get(model_type, {})}
    return {key: value for key, value in wanted.items() if value is not None}
