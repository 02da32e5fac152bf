"""Small config.json files, and how the tests read them."""

from __future__ import annotations

from typing import Any

from sizing.catalog.huggingface.families import FAMILIES
from sizing.catalog.huggingface.reader import model_from

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def read(config: dict[str, Any]) -> Any:  # noqa: ANN401  (fields of a spec, looked at freely)
    """Read a config as if it came from a file named config.json."""
    return model_from(config, name="m", source="dir", place="config.json")


def of_family(model_type: str) -> dict[str, Any]:
    """Return the smallest config of a family."""
    family = FAMILIES[model_type]
    extra = (EXPERTS if family.experts else {}) | (LATENT if family.latent_attention else {})
    return {**LLAMA, "model_type": model_type, **extra}
