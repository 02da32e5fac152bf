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
from sizing.catalog.huggingface.families import families
from sizing.catalog.huggingface.reader import model_from
from tests.sizing.catalog.small_models import REAL, small

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = families()

UNCOUNTED = ("q_norm", "k_norm", "_a_layernorm", "feedforward_layernorm", "shared_expert_gate",
             "sinks", "o_proj.bias", "router.bias", "_proj_bias", "fc_in.bias", "fc_out.bias",
             "lm_head.bias", "dense.bias", "h_to_4h.bias", "4h_to_h.bias", "layernorm.bias",
             "ln_f.bias", "ln_1.bias", "ln_attn.bias", "ln_mlp.bias", "word_embeddings_layernorm",
             "post_self_attn_layernorm", "post_mlp_layernorm", "model.norm.bias",
             "linear_attn.norm", "A_log", "dt_bias", "self_attn.norm", "mamba.D", "mixer.D",
             "conv1d.bias", "mamba.norm", "mixer.norm", "query_layernorm", "key_layernorm",
             "e_score_correction_bias", "router.scale", "per_expert_scale", "fc1.bias", "fc2.bias",
             "c_fc.bias", "c_proj.bias", "ln_2.bias", "final_layer_norm.bias", "out_proj.bias",
             "layer_norm.bias")  # fmt: skip
"""What the docstring of `parameters` says it ignores."""
ELSEWHERE = {
    "kimi_k2", "Yi", "mimo", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_vl", "qwen2_5_vl",
    "qwen2_vl_text", "qwen2_5_vl_text", "glm4v_moe_text",
}  # fmt: skip
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
    left = set(UNCOUNTED)
    if not any("input_layernorm" in name for name in sizes):
        left.discard("feedforward_layernorm")  # one of the two norms of a layer, not a further one
    counted = {n: size for n, size in sizes.items() if not any(part in n for part in left)}
    total, found = sum(counted.values()), parameters(model)
    assert sum(sizes.values()) == pytest.approx(total, rel=ignored)
    extra = found.total - total
    assert extra in {0, model.num_layers * model.hidden_size * model.parallel_attention}
    experts = sum(size for name, size in counted.items() if ".experts." in name)
    assert found.experts == experts
    active = total + extra - experts
    if model.moe is not None:
        active += experts * model.moe.experts_per_token // model.moe.num_experts
    looked_up = ("embed_pos", "wpe") if model.tied_embeddings else ("embed", "wte", "wpe")
    active -= sum(s for name, s in counted.items() if any(part in name for part in looked_up))
    assert num_active_parameters(model) == active


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - ELSEWHERE))
def test_small_models_agree_with_the_library(model_type: str) -> None:
    """
    Parameters are counted as the library builds them, and the cache of a prompt as it keeps it.

    The cache of Falcon is left out: the library repeats its shared heads. So is that of Gemma 4,
    which the library fills with windows in a way of its own. The states of linear
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


@pytest.mark.parametrize(("model_type", "published", "keys"), REAL)
def test_published_models_agree_with_the_library(
    model_type: str, published: float, keys: dict[str, Any]
) -> None:
    """At full size of further families, which the catalog does not have."""
    _, built, read = library_model(model_type, "meta", **keys)
    check_counts(read, built, ignored=4e-3)
    assert parameters(read).total == pytest.approx(published, rel=0.02)
