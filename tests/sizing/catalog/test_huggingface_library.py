"""The reader against transformers, which writes what it reads: models without weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minicluster.specs.parameters import num_parameters
from sizing.catalog.huggingface.families import FAMILIES
from sizing.catalog.huggingface.reader import model_from

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
INDEX = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 16, "n_shared_experts": 1}
STATE = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
UNKNOWN = {"intermediate_size": None, "num_key_value_heads": None}
"""Keys that a family does not have; the library would carry them along unread."""
ALSO: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**ROUTED, "num_experts": 8, "mlp_only_layers": [0]},
    "deepseek_v2": {**ROUTED, **LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {**ROUTED, **LATENT, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "deepseek_v32": {**ROUTED, **LATENT, **INDEX, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**ROUTED, **LATENT, **INDEX, "first_k_dense_replace": 1},
    "glm4_moe": {**ROUTED, "n_routed_experts": 8, "first_k_dense_replace": 1, "head_dim": 8},
    "llama4_text": {
        "num_local_experts": 8,
        "head_dim": 8,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
    },
    "minimax": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3_next": {**ROUTED, **STATE, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_5_moe_text": {
        **ROUTED,
        **STATE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_5_text": STATE,
    "falcon": {**UNKNOWN, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gptj": {**UNKNOWN, "rotary_dim": 4},
    "bloom": UNKNOWN,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
}
UNCOUNTED = ("q_norm", "k_norm", "_a_layernorm", "feedforward_layernorm", "shared_expert_gate",
             "sinks", "o_proj.bias", "router.bias", "_proj_bias", "fc_in.bias", "fc_out.bias",
             "lm_head.bias", "dense.bias", "h_to_4h.bias", "4h_to_h.bias", "layernorm.bias",
             "ln_f.bias", "ln_1.bias", "ln_attn.bias", "ln_mlp.bias", "word_embeddings_layernorm",
             "linear_attn.norm", "A_log", "dt_bias", "self_attn.norm")  # fmt: skip
"""What the docstring of `parameters` says it ignores."""
TWO_NORMS = {"gptj": 4 * 64}
"""GPT-J has one norm a layer, of which we count two."""
ELSEWHERE = {"kimi_k2", "Yi", "qwen3_vl_text", "qwen3_vl_moe_text"}
"""Families that the library has under another name, or only inside a model of images."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - ELSEWHERE))
def test_parameters_agree_with_the_library(model_type: str) -> None:
    """A config written by the library is counted as the library builds it, ignored parts apart."""
    import torch  # noqa: PLC0415  (seconds, and only here)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    wanted = {**SMALL, **ALSO.get(model_type, {})}
    given = {key: value for key, value in wanted.items() if value is not None}
    config = AutoConfig.for_model(model_type, **given)
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
    assert num_parameters(read) == counted + TWO_NORMS.get(model_type, 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and getattr(config, "sliding_window", None):
        windowed = kinds.count("sliding_attention")
        assert read.num_window_layers == (windowed if config.sliding_window < 512 else 0)
