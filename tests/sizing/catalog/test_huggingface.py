"""Any config.json becomes a model spec, or is refused by the name of what cannot be expressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import Exit, InputError
from minicluster.specs.model import ARCHITECTURE_KEYS
from sizing import catalog
from sizing.catalog.huggingface.families import FAMILIES
from sizing.catalog.huggingface.reader import model_from, read_config
from tests.sizing.scenarios import LLAMA

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


def compressed(bits: int, kind: str, ignore: list[str]) -> dict[str, Any]:
    """Return the quantisation that compressed-tensors writes."""
    groups = {"group_0": {"weights": {"num_bits": bits, "type": kind}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_read(model_type: str) -> None:
    model, family = read(of_family(model_type)), FAMILIES[model_type]
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (4, 64, 100)
    assert (model.moe is not None) == bool(family.experts)
    assert (model.mla is not None) == family.latent_attention
    assert model.head_dim == (12 if model.mla else family.defaults.get("head_dim", 8))
    assert model.num_window_layers == 0


def test_absent_keys_have_the_librarys_meaning() -> None:
    """No head_dim: hidden over heads; no KV heads: as many as heads; no dtype: bf16."""
    config = {k: v for k, v in LLAMA.items() if k not in {"num_key_value_heads", "torch_dtype"}}
    model = read(config)
    assert (model.head_dim, model.num_kv_heads, model.dtype) == (8, 8, "bf16")
    assert read({**LLAMA, "model_type": "gemma"}).tied_embeddings is False
    absent = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    assert read({**absent, "model_type": "gemma"}).tied_embeddings is True
    assert read({**LLAMA, "model_type": "qwen2"}).attention_bias is True


@pytest.mark.parametrize(
    ("model_type", "extra", "expected"),
    [
        ("mistral", {"sliding_window": 512}, (512, 4)),
        ("phi3", {"sliding_window": 262144}, (0, 0)),  # longer than the context: no window at all
        ("qwen2", {"sliding_window": 512, "max_window_layers": 3}, (0, 0)),
        ("qwen2", {"sliding_window": 512, "max_window_layers": 3, "use_sliding_window": True},
         (512, 1)),
        ("gemma3_text", {"sliding_window": 512, "num_hidden_layers": 12}, (512, 10)),
        ("gpt_oss",
         {"sliding_window": 128, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
         (128, 3)),
    ],
)  # fmt: skip
def test_windows(model_type: str, extra: dict[str, Any], expected: tuple[int, int]) -> None:
    """Each family's rule for sliding windows gives the window and the layers it covers."""
    model = read({**of_family(model_type), **extra})
    assert (model.window_tokens, model.num_window_layers) == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 4096),
        ({"rope_type": "default"}, 2048),
    ],
)
def test_rope_scaling_lengthens_the_context(rope: dict[str, Any], expected: int) -> None:
    """Also inside the text_config of a model with further modalities."""
    config = {**LLAMA, "rope_scaling": rope}
    outer = {"model_type": "gemma3", "vision_config": {}, "text_config": config}
    assert [read(each).max_context_tokens for each in (config, outer)] == [expected] * 2


def test_experts_alone_may_be_quantised() -> None:
    left_out = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]  # fmt: skip
    quantised = compressed(4, "int", left_out)
    model = read({**of_family("kimi_k2"), "quantization_config": quantised})
    assert model.weight_dtype == "int4"
    assert (model.attention_dtype, model.dense_dtype, model.shared_dtype) == ("bf16",) * 3


def test_modules_left_out_by_layer() -> None:
    config = {**of_family("deepseek_v3"), "first_k_dense_replace": 2}
    left_out = ["model.layers.0*", "model.layers.1.mlp.up_proj", "model.layers.4.eh_proj"]
    quantised = {"quant_method": "fp8", "modules_to_not_convert": left_out}
    model = read({**config, "quantization_config": quantised})
    assert (model.dense_dtype, model.attention_dtype, model.shared_dtype) == ("bf16", "fp8", "fp8")
    quantised = {"quant_method": "fp8", "modules_to_not_convert": left_out[:1]}
    with pytest.raises(InputError, match=r"layers\.0"):
        read({**config, "quantization_config": quantised})


@pytest.mark.parametrize(
    ("quantised", "dtype", "attention", "blocks"),
    [
        ({"quant_method": "fp8"}, "fp8", True, True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, "fp8", True, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", True, False),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["layers.*.self_attn"]},
         "fp4", False, True),
        ({"quant_method": "awq", "bits": 4}, "int4", True, True),
        ({"quant_method": "gptq", "bits": 8}, "int8", True, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4", True, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", True, False),
        (compressed(8, "float", ["lm_head", "model.layers.0.mlp.gate"]), "fp8", True, False),
        (None, "bf16", True, True),
    ],
)  # fmt: skip
def test_quantisation(
    quantised: dict[str, Any] | None, dtype: str, *, attention: bool, blocks: bool
) -> None:
    """The quantisation of published checkpoints gives the dtype and the scales of their weights."""
    model = read({**of_family("qwen3"), "quantization_config": quantised})
    assert (model.weight_dtype, model.attention_quantised) == (dtype, attention)
    assert model.block_scaled == blocks
    assert (model.dtype, model.kv_dtype) == ("bf16", "bf16")


BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


@pytest.mark.parametrize(
    ("quantised", "method", "group"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 128),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8", 64),
        ({"quant_method": "fp8"}, "fp8", 0),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8", 0),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": BLOCKS}}},
         "compressed-tensors", 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq", 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 0),
        ({"quant_method": "mxfp4"}, "mxfp4", 32),
        ({"quant_algo": "NVFP4", "group_size": 16, "producer": {"name": "modelopt"}},
         "modelopt", 16),
        (None, "", 0),
    ],
)  # fmt: skip
def test_what_shares_a_scale(quantised: dict[str, Any] | None, method: str, group: int) -> None:
    """The method and the blocks or groups decide how widely vLLM slices a checkpoint."""
    model = read({**of_family("qwen3"), "quantization_config": quantised})
    assert (model.weight_format, model.weight_group) == (method, group)


def test_quantisation_in_a_file_beside(tmp_path: Path) -> None:
    """NVIDIA's checkpoints say it in hf_quant_config.json; it is not overlooked."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert read(read_config(tmp_path)).weight_dtype == "fp8"


SPARSE = {"model_type": "glm_moe_dsa", **EXPERTS, **LATENT, "index_topk": 8}
BAD = [
    ({"model_type": "mamba"}, "model_type", "one of Yi, bloom"),
    ({"model_type": "deepseek_v4"}, "'deepseek_v4'", "add it to huggingface/families.py"),
    (
        {
            "model_type": "glm4_moe_lite",
            **EXPERTS,
            **LATENT,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
        "mlp_layer",
        "before sparse",
    ),
    (
        {"layer_types": ["full_attention", "deepseek_sparse_attention"] * 2},
        "layer_types[1]",
        "'deepseek_sparse_attention'; expected one of sliding",
    ),
    ({"model_type": None}, "model_type", "is missing"),
    ({"hidden_size": "64"}, "hidden_size", "whole number"),
    ({"hidden_size": -64}, "hidden_size", "whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
    ({"num_hidden_layers": 0}, "num_layers", "positive"),
    ({"vocab_size": None}, "vocab_size", "is missing"),
    ({"num_key_value_heads": 3}, "num_kv_heads", "divisor"),
    ({"num_attention_heads": 0}, "num_heads", "positive"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
    ({"index_topk": 2048}, "index_topk", "only latent attention"),
    ({**SPARSE, "index_topk_freq": 4}, "index_topk_freq", "an index of its own"),
    ({**SPARSE, "indexer_types": ["shared"]}, "indexer_types", "full in every layer"),
    ({"model_type": "minimax_m2", **EXPERTS, "shared_intermediate_size": 8}, "shared_int", "kind"),
    ({"model_type": "qwen3_next", **EXPERTS, "mamba_ssm_dtype": "int8"}, "mamba", "of float32"),
    ({"num_local_experts": 8}, "num_local_experts", "no experts"),
    ({"kv_lora_rank": 512}, "kv_lora_rank", "no latent attention"),
    ({"sliding_window": 512}, "sliding_window", "which layers"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types", "sliding_attention"),
    ({"sliding_window": 512, "layer_types": ["full_attention"]}, "layer_types", "4 entries"),
    ({"layer_types": "full"}, "layer_types", "a list"),
    ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "rope_scaling", "a factor"),
    ({"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_scaling", "a factor"),
    ({"torch_dtype": "float64"}, "torch_dtype", "bfloat16"),
    ({"quantization_config": "fp8"}, "quantization_config", "an object"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quant_method", "awq"),
    ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits", "one of 4, 8"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}},
     "blocks of weights", "two equal numbers"),
    ({"quantization_config": {"quant_method": "modelopt"}}, "quant_algo", "FP8"),
    ({"quantization_config": compressed(8, "complex", [])}, "config_groups", "one of float 8"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "groups", "one format"),
    ({"quantization_config": {"quant_method": "fp8", "ignore": ["layers.0.mlp"]}}, "0.mlp", "only"),
    ({"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 2}, "sparse_step", "experts in"),
    ({"model_type": "qwen3_moe", "moe_intermediate_size": 8}, "num_experts", "is missing"),
    ({"model_type": "mixtral"}, "num_local_experts", "is missing"),
    ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [3]}, "mlp_only_layers", "first"),
]


@pytest.mark.parametrize(("change", "named", "expectation"), BAD)
def test_refusals_name_the_key(change: dict[str, Any], named: str, expectation: str) -> None:
    """What is wrong or cannot be expressed is refused by its key, on one line, exit code 2."""
    with pytest.raises(InputError) as refused:
        read({**LLAMA, **change})
    assert refused.value.exit_code == Exit.BAD_INPUT
    line = str(refused.value)
    assert line.startswith("config.json")
    assert named in line
    assert expectation in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("content", "expectation"),
    [("{", "valid JSON"), ("[]", "a JSON object"), ("\x80", "binary data")],
)
def test_files_that_are_no_config(tmp_path: Path, content: str, expectation: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=expectation) as refused:
        read_config(tmp_path)
    assert str(file) in str(refused.value)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is 'No such file"):
        catalog.find_model(str(tmp_path))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
ANY_KEY = st.sampled_from([*sorted(ARCHITECTURE_KEYS), "torch_dtype", "rope_scaling", "text_config",
                           "quantization_config"])  # fmt: skip
QUANTISED_KEY = st.sampled_from(
    ["quant_method", "bits", "w_bit", "quant_algo", "config_groups", "ignore", "producer"]
)
METHODS = st.sampled_from(["fp8", "awq", "modelopt", "compressed-tensors"])


@given(
    model_type=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(ANY_KEY, JSON_VALUES, max_size=4),
    quantised=st.none() | st.dictionaries(QUANTISED_KEY, JSON_VALUES | METHODS),
)
def test_nonsense_is_refused_not_crashed_on(
    model_type: str, changes: dict[str, Any], quantised: dict[str, Any] | None
) -> None:
    """Whatever JSON stands under a key, the answer is a model or one refusal that says where."""
    config = {**of_family(model_type), **changes}
    if quantised is not None:
        config["quantization_config"] = {"quant_method": "compressed-tensors", **quantised}
    try:
        read(config)
    except InputError as error:
        assert str(error).startswith("config.json")  # noqa: PT017
