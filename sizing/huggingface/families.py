"""Which `model_type`s can be read, and what each assumes that its config does not say."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    Models that one `model_type` names.

    Attributes:
        experts: key that counts routed experts on the hub; "" for dense models.
        expert_ffn: key with the intermediate size of one expert.
        latent_attention: multi-head latent attention (DeepSeek).
        windows: which layers a sliding window covers where `layer_types` does not say:
            `none`, `all`, `above` max_window_layers, `pattern` all but every n-th.
        defaults: what the library assumes for absent keys.
    """

    experts: str = ""
    expert_ffn: str = "moe_intermediate_size"
    latent_attention: bool = False
    windows: str = "none"
    defaults: dict[str, object] = field(default_factory=dict)


EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Keys that count routed experts: transformers 5 writes other ones than the hub has."""

QWEN = {"use_sliding_window": False}
GEMMA: dict[str, object] = {"tie_word_embeddings": True, "head_dim": 256}
DEEPSEEK = Family(experts="n_routed_experts", latent_attention=True)

FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "mixtral": Family(experts="num_local_experts", expert_ffn="intermediate_size", windows="all"),
    "qwen2": Family(windows="above", defaults={**QWEN, "attention_bias": True}),
    "qwen3": Family(windows="above", defaults={**QWEN, "head_dim": 128}),
    "qwen2_moe": Family(experts="num_experts", defaults={**QWEN, "attention_bias": True}),
    "qwen3_moe": Family(experts="num_experts", defaults={**QWEN}),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "gpt_oss": Family(
        experts="num_local_experts",
        expert_ffn="intermediate_size",
        windows="pattern",
        defaults={"attention_bias": True, "sliding_window_pattern": 2},
    ),
    "phi3": Family(windows="all"),
    "gemma": Family(defaults=GEMMA),
    "gemma2": Family(windows="pattern", defaults={**GEMMA, "sliding_window_pattern": 2}),
    "gemma3_text": Family(
        windows="pattern",
        defaults={
            **GEMMA,
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
    ),
}
"""Source of the defaults: the configuration classes of transformers 5.19.0."""
