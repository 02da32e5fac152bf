"""The reader against transformers, which writes what it reads: models without weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sizing.huggingface.families import FAMILIES
from sizing.huggingface.reader import model_from
from sizing.specs.parameters import num_parameters

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
LATENT = {
    "n_routed_experts": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
ALSO: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**ROUTED, "num_experts": 8, "mlp_only_layers": [0]},
    "deepseek_v2": {**ROUTED, **LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {**ROUTED, **LATENT, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
}
UNCOUNTED = ("q_norm", "k_norm", "_a_layernorm", "feedforward_layernorm", "shared_expert_gate",
             "sinks", "o_proj.bias", "router.bias", "_proj_bias")  # fmt: skip
"""What the docstring of `parameters` says it ignores."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"kimi_k2"}))
def test_parameters_agree_with_the_library(model_type: str) -> None:
    """A config written by the library is counted as the library builds it, ignored parts apart."""
    import torch  # noqa: PLC0415  (seconds, and only here)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.for_model(model_type, **{**SMALL, **ALSO.get(model_type, {})})
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    counted = sum(
        values.numel()
        for name, values in built.named_parameters()
        if not any(part in name for part in UNCOUNTED)
    )
    read = model_from(
        json.loads(config.to_json_string()), name="m", source="m", place="config.json"
    )
    assert num_parameters(read) == counted
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and getattr(config, "sliding_window", None):
        windowed = kinds.count("sliding_attention")
        assert read.num_window_layers == (windowed if config.sliding_window < 512 else 0)
