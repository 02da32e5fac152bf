"""
Counts of parameters and of KV cache against transformers, which builds the models.

The library writes the config that we read. Its models are small ones of every family, and those
of our catalog.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence, state_bytes
from minicluster.specs.model import ModelSpec, language_model
from minicluster.specs.parameters import num_active_parameters, parameters
from sizing import catalog
from sizing.catalog.huggingface.families import FAMILIES
from sizing.catalog.huggingface.reader import model_from

pytestmark = pytest.mark.filterwarnings("ignore")

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
WITH_LATENT = {
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
    "deepseek_v2": {**ROUTED, **WITH_LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {**ROUTED, **WITH_LATENT, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "deepseek_v32": {**ROUTED, **WITH_LATENT, **INDEX, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**ROUTED, **WITH_LATENT, **INDEX, "first_k_dense_replace": 1},
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
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe_lite": {**ROUTED, **WITH_LATENT, "n_shared_experts": 1},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ministral3": {"head_dim": 8},
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
             "post_self_attn_layernorm", "post_mlp_layernorm", "model.norm.bias",
             "linear_attn.norm", "A_log", "dt_bias", "self_attn.norm")  # fmt: skip
"""What the docstring of `parameters` says it ignores."""
ELSEWHERE = {"kimi_k2", "Yi", "qwen3_vl_text", "qwen3_vl_moe_text"}
"""Families that the library has under another name, or only inside a model of images."""
NAMED = {"kimi_k2": "deepseek_v3", "Yi": "llama"}
"""The library's names of families that have another one on the hub."""


def library_model(model_type: str, device: str, **given: object) -> tuple[Any, Any, ModelSpec]:
    """Return the library's config, its model on a device, and what we read of the config."""
    import torch  # noqa: PLC0415  (seconds, and only here)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.for_model(model_type, **given)
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string())
    return config, built, model_from(written, name="m", source="m", place="config.json")


def check_counts(model: ModelSpec, built: Any, *, ignored: float) -> None:  # noqa: ANN401
    """
    Totals, experts and active parameters agree, but for a named and small part.

    A layer of GPT-J has one norm, of which we count two.
    """
    sizes = {name: values.numel() for name, values in built.named_parameters()}
    counted = {n: size for n, size in sizes.items() if not any(part in n for part in UNCOUNTED)}
    total, found = sum(counted.values()), parameters(model)
    assert sum(sizes.values()) == pytest.approx(total, rel=ignored)
    extra = found.total - total
    assert extra in {0, model.num_layers * model.hidden_size * model.parallel_attention}
    experts = sum(size for name, size in counted.items() if ".experts." in name)
    assert found.experts == experts
    active = total + extra - experts
    if model.moe is not None:
        active += experts * model.moe.experts_per_token // model.moe.num_experts
    if not model.tied_embeddings:
        active -= sum(size for name, size in counted.items() if "embed" in name or "wte" in name)
    assert num_active_parameters(model) == active


def small(model_type: str) -> dict[str, Any]:
    """Return the keys of a small model of a family."""
    wanted = {**SMALL, **ALSO.get(model_type, {})}
    return {key: value for key, value in wanted.items() if value is not None}


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - ELSEWHERE))
def test_small_models_agree_with_the_library(model_type: str) -> None:
    """
    Parameters are counted as the library builds them, and the cache of a prompt as it keeps it.

    The cache of Falcon is left out: the library repeats its shared heads. The states of linear
    attention are elsewhere in the library, and the keys of an index are 8 bits with a scale in
    engines.
    """
    import torch  # noqa: PLC0415

    config, built, read = library_model(model_type, "cpu", **small(model_type))
    check_counts(read, built, ignored=0.2)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and getattr(config, "sliding_window", None):
        windowed = kinds.count("sliding_attention")
        assert read.num_window_layers == (windowed if config.sliding_window < 512 else 0)
    if model_type == "falcon":
        return
    prompt = torch.zeros(1, 8, dtype=torch.long)
    with torch.no_grad():
        cache = built.to(torch.bfloat16).eval()(prompt, use_cache=True).past_key_values
    kept = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    in_library = sum(each.numel() * each.element_size() for each in kept if each is not None)
    read = replace(read, dtype="bf16", kv_dtype="bf16", index=None, draft=None)
    assert kv_bytes_per_sequence(read, 8, block_size=1) - state_bytes(read) == in_library


@pytest.mark.parametrize("name", catalog.models())
def test_parameters_of_the_catalog_agree_with_the_library(name: str) -> None:
    """At full size, what is ignored is at most a thousandth."""
    keys = language_model(catalog.models()[name].config)
    given = {key: value for key, value in keys.items() if key != "quantization_config"}
    model_type = str(given.pop("model_type"))
    _, built, _ = library_model(NAMED.get(model_type, model_type), "meta", **given)
    check_counts(catalog.find_model(name), built, ignored=1.5e-3)
