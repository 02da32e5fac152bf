"""Known values of `model_type`, and what each implies that its config does not say."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    Models that one `model_type` names.

    Attributes:
        renamed: keys of this family by the key that we read in their place.
        gated_mlp: three matrices in a feed-forward instead of two.
        experts: key that counts routed experts on the hub; "" for dense models.
        expert_ffn: key with the intermediate size of one expert.
        dense_ffn: key with the intermediate size of a dense feed-forward.
        latent_attention: multi-head latent attention (DeepSeek).
        linear: kind of linear attention in layers of that type: `delta`, `lightning` or "".
        windows: which layers a sliding window covers where `layer_types` does not say:
            `none`, `all`, `above` max_window_layers, `pattern` all but every n-th.
        fp8_blocks: its publishers' fp8 checkpoints are scaled in blocks (`ModelSpec.block_scaled`).
        query_norm: `head` or `all`, whatever the config says (`ModelSpec.query_norm`).
        defaults: what the library assumes for absent keys.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    gated_mlp: bool = True
    experts: str = ""
    expert_ffn: str = "moe_intermediate_size"
    dense_ffn: str = "intermediate_size"
    latent_attention: bool = False
    linear: str = ""
    windows: str = "none"
    query_norm: str = ""
    fp8_blocks: bool = False
    defaults: dict[str, object] = field(default_factory=dict)


EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Keys that count routed experts: transformers 5 writes other ones than the hub has."""

QWEN = {"use_sliding_window": False}
GEMMA: dict[str, object] = {"tie_word_embeddings": True, "head_dim": 256}
DEEPSEEK = Family(experts="n_routed_experts", latent_attention=True, fp8_blocks=True)
LLAMA = Family()
GLM = Family(defaults={"attention_bias": True, "head_dim": 128})
QWEN3 = Family(
    windows="above", query_norm="head", fp8_blocks=True, defaults={**QWEN, "head_dim": 128}
)
QWEN3_MOE = Family(experts="num_experts", query_norm="head", fp8_blocks=True, defaults={**QWEN})
GPT2_KEYS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
NEXT: dict[str, object] = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN_NEXT = Family(
    linear="delta", experts="num_experts", query_norm="head", fp8_blocks=True, defaults=NEXT
)

FAMILIES = {
    "llama": LLAMA,
    "Yi": LLAMA,
    "mistral": Family(windows="all"),
    "ministral3": Family(windows="all"),
    "mixtral": Family(experts="num_local_experts", expert_ffn="intermediate_size", windows="all"),
    "qwen2": Family(windows="above", defaults={**QWEN, "attention_bias": True}),
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3,
    "qwen2_moe": Family(experts="num_experts", defaults={**QWEN, "attention_bias": True}),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe_text": QWEN3_MOE,
    "qwen3_next": QWEN_NEXT,
    "qwen3_5_moe_text": QWEN_NEXT,
    "qwen3_5_text": Family(linear="delta", query_norm="head", fp8_blocks=True, defaults=NEXT),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "glm": GLM,
    "glm4": GLM,
    "glm4_moe": Family(experts="n_routed_experts", fp8_blocks=True),
    "glm4_moe_lite": DEEPSEEK,
    "llama4_text": Family(
        experts="num_local_experts",
        expert_ffn="intermediate_size",
        dense_ffn="intermediate_size_mlp",
        defaults={
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "n_shared_experts": 1,
        },
    ),
    "minimax": Family(
        experts="num_local_experts", expert_ffn="intermediate_size", linear="lightning"
    ),
    "minimax_m2": Family(
        experts="num_local_experts",
        expert_ffn="intermediate_size",
        query_norm="all",
        fp8_blocks=True,
    ),
    "gpt_oss": Family(
        experts="num_local_experts",
        expert_ffn="intermediate_size",
        windows="pattern",
        defaults={"attention_bias": True, "sliding_window_pattern": 2},
    ),
    "gptj": Family(renamed=GPT2_KEYS, gated_mlp=False, defaults={"parallel_attn": True}),
    "falcon": Family(
        renamed={"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
        gated_mlp=False,
        defaults={
            "parallel_attn": True,
            "multi_query": True,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
    "bloom": Family(
        renamed={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embed",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        gated_mlp=False,
        # Positions have no table; 2,048 is what vLLM takes for a config that names no length.
        defaults={
            "max_position_embeddings": 2048,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Family(windows="all"),
    "phimoe": Family(experts="num_local_experts", expert_ffn="intermediate_size", windows="all"),
    "gemma": Family(defaults=GEMMA),
    "gemma2": Family(windows="pattern", defaults={**GEMMA, "sliding_window_pattern": 2}),
    "gemma3_text": Family(
        windows="pattern",
        query_norm="head",
        defaults={
            **GEMMA,
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
    ),
}
"""Source of the defaults: the configuration classes of transformers 5.19.0."""
