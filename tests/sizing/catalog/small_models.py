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
        "moe_latent_size": 24,
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


GEMMA_4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
}
NEMOTRON_SUPER = "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME"
NEMOTRON_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
REAL: list[tuple[str, float, dict[str, Any]]] = [
    ("nemotron_h", 31.6e9, {
        "hybrid_override_pattern": NEMOTRON_NANO, "hidden_size": 2688, "intermediate_size": 1856,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "vocab_size": 131_072,
    }),
    ("nemotron_h", 56e9, {
        "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
        "hidden_size": 8192, "intermediate_size": 32_768, "mamba_num_heads": 256,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 256, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 131_072,
    }),
    ("nemotron_h", 120.7e9, {
        "hybrid_override_pattern": NEMOTRON_SUPER, "hidden_size": 4096, "intermediate_size": 2688,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688,
        "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
        "vocab_size": 131_072,
    }),
    ("gemma4_text", 25.2e9, {
        **GEMMA_4, "num_hidden_layers": 30, "hidden_size": 2816, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }),
    ("gemma4_text", 30.7e9, {
        **GEMMA_4, "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21_504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    }),
    ("falcon_h1", 33.6e9, {
        "num_hidden_layers": 72, "hidden_size": 5120, "intermediate_size": 21_504,
        "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
        "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_d_state": 256,
        "mamba_n_groups": 2, "vocab_size": 261_120, "tie_word_embeddings": False,
    }),
    ("granitemoehybrid", 32.2e9, {
        "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 768,
        "shared_intermediate_size": 1536, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "vocab_size": 100_352,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4, "tie_word_embeddings": True,
    }),
    ("bamba", 9.8e9, {"attn_layer_indices": [9, 18, 27]}),
    ("gpt2", 124.4e6, {}),
    ("opt", 125.2e6, {}),
    ("olmo2", 7.3e9, {"vocab_size": 100_352}),
    ("smollm3", 3.1e9, {}),
    ("phi", 1.4e9, {}),
    ("cohere2", 8e9, {
        "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    ("seed_oss", 36.2e9, {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27_648,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    }),
    ("dots1", 142e9, {
        "n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "hidden_size": 4096, "moe_intermediate_size": 1408,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    }),
]  # fmt: skip
"""Published models: their family, total of parameters (of the text alone), and shapes."""
