"""Any config.json becomes a model spec, or is refused by the name of what cannot be expressed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import Exit, InputError
from minicluster.specs.model import ARCHITECTURE_KEYS
from minicluster.specs.parameters import parameters
from sizing import catalog
from sizing.catalog.huggingface.families import families, harmless
from sizing.catalog.huggingface.reader import model_from, read_config
from tests.sizing.catalog.small_models import small
from tests.sizing.scenarios import LLAMA

FAMILIES = families()


def read(config: dict[str, Any]) -> Any:  # noqa: ANN401  (fields of a spec, looked at freely)
    """Read a config as if it came from a file named config.json."""
    return model_from(config, name="m", source="dir", place="config.json")


def of_family(model_type: str) -> dict[str, Any]:
    """Return a small config of a family."""
    return {"model_type": model_type, **small(model_type)}


def compressed(bits: int, kind: str, ignore: list[str]) -> dict[str, Any]:
    """Return the quantisation that compressed-tensors writes."""
    groups = {"group_0": {"weights": {"num_bits": bits, "type": kind}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_read(model_type: str) -> None:
    model, family = read(of_family(model_type)), FAMILIES[model_type]
    assert (model.hidden_size, model.vocab_size) == (64, 200)
    assert (model.moe is not None) == (family.experts and model_type != "gemma4_text")
    assert (model.mla is not None) == family.latent_attention
    assert (model.linear.kind if model.linear else "") == family.linear


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("M-M*E-", (2, 1, 2, 1)),
        ("MM**", (2, 2, 0, 0)),
        ("M-*-", (1, 1, 2, 0)),
        ("ME*E", (1, 1, 0, 2)),
    ],
)
def test_layers_of_one_part_each(letters: str, expected: tuple[int, ...]) -> None:
    """A layer of Nemotron-H is a mixer or a feed-forward, and has one norm."""
    config = {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}
    model = read({**of_family("nemotron_h"), **config})
    assert model.linear is not None
    found = (model.linear.num_layers, model.num_full_layers, model.num_dense_layers)
    assert (*found, model.num_expert_layers) == expected
    assert parameters(model).norms == (len(letters) + 1) * 64


@pytest.mark.parametrize(
    ("model_type", "extra", "expected"),
    [
        ("mistral", {"sliding_window": 256}, (256, 4)),
        ("phi3", {"sliding_window": 262144}, (0, 0)),  # longer than the context: no window at all
        ("qwen2", {"sliding_window": 256, "max_window_layers": 3}, (0, 0)),
        ("qwen2", {"sliding_window": 256, "max_window_layers": 3, "use_sliding_window": True},
         (256, 1)),
        ("gemma3_text", {"sliding_window": 128, "num_hidden_layers": 12}, (128, 10)),
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
    outer: dict[str, Any] = {"model_type": "gemma3", "vision_config": {}, "text_config": config}
    assert [read(each).max_context_tokens for each in (config, outer)] == [expected] * 2


@pytest.mark.parametrize(
    ("model_type", "extra", "dtype"),
    [
        ("qwen3_5_text", {}, "fp32"),
        ("qwen3_next", {}, "bf16"),
        ("qwen3_next", {"mamba_ssm_dtype": "float32"}, "fp32"),
        ("nemotron_h", {}, "fp32"),
        ("nemotron_h", {"mamba_ssm_cache_dtype": "bfloat16"}, "bf16"),
        ("falcon_h1", {"torch_dtype": "float16"}, "fp16"),
    ],
)
def test_dtypes_of_states(model_type: str, extra: dict[str, Any], dtype: str) -> None:
    """As the config or its class says, else as vLLM: as activations are."""
    linear = read({**of_family(model_type), **extra}).linear
    assert linear is not None
    assert linear.state_dtype == dtype


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


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("quantised", "dtype", "attention", "blocks"),
    [
        ({"quant_method": "fp8"}, "fp8", True, True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, "fp8", True, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", True, False),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["layers.*.self_attn"]},
         "fp4", False, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", True, True),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8", True, True),
        ({"quant_method": "fp8", "ignored_layers": ["re:.*self_attn.*"],
          "modules_to_not_convert": ["lm_head"]}, "fp8", False, True),
        ({**GPTQ, "dynamic": {"-:.*attn.*": {}, "lm_head": {}, "-:.*visual.*": {}}},
         "int4", False, True),
        ({**GPTQ, "modules_in_block_to_quantize": None, "desc_act": True, "dynamic": None},
         "int4", True, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4", True, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", True, False),
        (compressed(8, "float", ["re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$"])
         | {"sparsity_config": {"format": "dense", "global_sparsity": 0.14}}, "fp8", True, False),
        (compressed(8, "float", ["lm_head", "model.layers.0.mlp.gate"]), "fp8", True, False),
        (compressed(8, "float", [f"model.layers.{layer}.self_attn" for layer in range(4)]),
         "fp8", False, False),
        (compressed(8, "float", [f"re:.*self_attn\\.{name}_proj$" for name in "qkvo"]),
         "fp8", False, False),
        ({"quant_method": "fp8", "modules_to_not_convert":
          ["model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.conv1d"]},
         "fp8", True, True),
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
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "group_size": 32}, "awq", 64),
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


FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
PER_HEAD = FP8_KV | {"strategy": "attn_head"}


@pytest.mark.parametrize(
    ("model_type", "quantised", "expected"),
    [
        ("qwen3", {**MODELOPT, "kv_cache_quant_algo": "FP8"}, "fp8"),
        ("qwen3", {**MODELOPT, "kv_cache_quant_algo": "fp8", "kv_cache_scheme": {}}, "fp8"),
        ("qwen3", {**MODELOPT, "kv_cache_quant_algo": None}, "bf16"),
        ("qwen3", {**MODELOPT, "kv_cache_scheme": FP8_KV}, "fp8"),
        ("deepseek_v3", {**MODELOPT, "kv_cache_scheme": FP8_KV}, "fp8"),
        ("qwen3", {**compressed(8, "float", []), "kv_cache_scheme": FP8_KV}, "fp8"),
        ("qwen3", {**compressed(8, "float", []), "kv_cache_scheme": PER_HEAD}, "fp8"),
        ("qwen3", {**compressed(8, "float", []), "kv_cache_scheme": None}, "bf16"),
        ("deepseek_v3", {**compressed(8, "float", []), "kv_cache_scheme": FP8_KV}, "bf16"),
        ("qwen3", {"quant_method": "fp8", "kv_cache_scheme": "static"}, "bf16"),  # AutoFP8's
    ],
)
def test_dtype_of_the_cache(model_type: str, quantised: dict[str, Any], expected: str) -> None:
    """As vLLM's `auto`: what the checkpoint declares, where vLLM reads it."""
    model = read({**of_family(model_type), "quantization_config": quantised})
    assert (model.dtype, model.kv_dtype) == ("bf16", expected)


def test_quantisation_in_a_file_beside(tmp_path: Path) -> None:
    """NVIDIA's checkpoints say it in hf_quant_config.json; it is not overlooked."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert read(read_config(tmp_path)).weight_dtype == "fp8"


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("mamba", {}, "model_type", "whose layers are modelled (no layer has attention"),
    ("bert", {}, "model_type", "known: Yi, arcee"),
    ("deepseek_v4", {}, "'deepseek_v4'", "compressed"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer",
     "before sparse"),
    ("qwen2", {"layer_types": ["full_attention", "deepseek_sparse_attention"] * 2},
     "layer_types[1]", "'deepseek_sparse_attention'; it has to be one of sliding"),
    ("llama", {"model_type": None}, "model_type", "is missing"),
    ("llama", {"hidden_size": "64"}, "hidden_size", "whole number"),
    ("llama", {"hidden_size": -64}, "hidden_size", "whole number"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
    ("llama", {"num_hidden_layers": 0}, "num_layers", "positive"),
    ("llama", {"vocab_size": None}, "vocab_size", "is missing"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", "divisor"),
    ("gemma3_text", {"num_key_value_heads": None}, "num_key_value_heads", "is missing"),
    ("llama", {"num_attention_heads": 0}, "num_heads", "positive"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
    ("llama", {"index_topk": 2048}, "index_topk", "no such key"),
    ("glm_moe_dsa", {"index_topk_freq": 4}, "index_topk_freq", "an index of its own"),
    ("glm_moe_dsa", {"indexer_types": ["shared"]}, "indexer_types", "full in every layer"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_int", "no such key"),
    ("qwen3_next", {"mamba_ssm_dtype": "int8"}, "mamba", "of float32"),
    ("minimax_m2", {"attn_type_list": [0, 1, 1, 1]}, "attn_type_list", "over all keys"),
    ("minimax", {"attn_type_list": [0, 1, 1, 1]}, "attn_type_list", "no such key"),
    ("llama", {"num_local_experts": 8}, "num_local_experts", "no such key"),
    ("llama", {"kv_lora_rank": 512}, "kv_lora_rank", "no such key"),
    ("llama", {"sliding_window": 512}, "sliding_window", "no such key"),
    ("llama", {"layer_types": ["linear_attention"] * 4}, "layer_types", "no such key"),
    ("olmo3", {"layer_types": ["full_attention"]}, "layer_types", "4 entries"),
    ("olmo3", {"layer_types": "full"}, "layer_types", "a list"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "rope_scaling",
     "a factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_scaling", "a factor"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling", "an object"),
    ("llama", {"text_config": [1]}, "text_config", "an object"),
    ("llama", {"torch_dtype": "float64"}, "torch_dtype", "bfloat16"),
    ("llama", {"quantization_config": "fp8"}, "quantization_config", "an object"),
    ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quant_method", "awq"),
    ("llama", {"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits", "one of 4, 8"),
    *(
        ("llama", {"quantization_config": {"quant_method": method, "bits": 4, **group}}, key,
         "whole number")
        for method, key, group in [
            ("awq", "group_size", {}), ("gptq", "group_size", {}),
            ("awq", "group_size", {"group_size": "128"}), ("gptq", "group_size", {"group_size": 0}),
            ("awq", "q_group_size", {"q_group_size": None, "group_size": 128}),
            ("gptq", "group_size", {"q_group_size": 128}),
        ]
    ),
    ("llama", {"quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 128}},
                          "b": {"weights": {"num_bits": 4, "group_size": 32}}}}},
     "config_groups", "one size of groups"),
    ("llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}},
     "blocks of weights", "two equal numbers"),
    ("llama", {"quantization_config": {"quant_method": "modelopt"}}, "quant_algo", "FP8"),
    *(
        ("llama", {"quantization_config": {**compressed(8, "float", []), "quant_algo": "FP8",
                                           "quant_method": method, key: scheme}}, key, "FP8")
        for method, key, scheme in [
            ("modelopt", "kv_cache_quant_algo", "NVFP4"), ("modelopt", "kv_cache_quant_algo", 8),
            ("modelopt", "kv_cache_scheme", {"num_bits": 4, "type": "float"}),
            ("modelopt", "kv_cache_scheme", {"num_bits": 8, "type": "float", "dynamic": True}),
            ("compressed-tensors", "kv_cache_scheme", {"num_bits": 8, "type": "int"}),
            ("compressed-tensors", "kv_cache_scheme",
             {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}),
        ]
    ),
    ("llama", {"quantization_config": compressed(8, "complex", [])}, "config_groups",
     "one of float 8"),
    ("llama", {"quantization_config": {"quant_method": "compressed-tensors"}}, "groups",
     "one format"),
    ("llama", {"quantization_config": {"quant_method": "fp8", "ignore": ["layers.0.mlp"]}},
     "0.mlp", "only"),
    *(
        ("qwen3", {"quantization_config": compressed(8, "float", names)}, "modules left out",
         "in every layer or none")
        for names in [
            ["model.layers.0.self_attn"], [f"model.layers.{i}.self_attn" for i in range(3)],
            ["re:.*self_attn.q_proj$"], [f"model.layers.{i}.self_attn.o_proj" for i in range(4)],
            ["re:.*layers\\.(0|1)\\.self_attn.*"],
        ]
    ),
    *(
        ("llama", {"quantization_config": {**GPTQ, key: value}}, f"quantization_config.{key}",
         "modules left out only" if key == "dynamic" else "no such key")
        for key, value in {
            "dynamic": {"+:.*layers\\.1[0-5]\\..*": {"bits": 8}},
            "modules_in_block_to_quantize": [["self_attn.q_proj"]], "lm_head": True,
            "sparsity_config": {"format": "sparse-24-bitmask"}, "quantized_layers": {"a": {}},
        }.items()
    ),
    ("llama", {"quantization_config": {
        **compressed(4, "int", []), "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "group_size": 128}, "targets": ["re:.*mlp.*"]}}}},
     "config_groups: targets", "Linear"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "sparse_step", "experts in"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers", "first"),
    ("ernie4_5_moe", {"moe_layer_end_index": 2}, "moe_layer_end_index", "the last layer"),
    ("gemma4_text", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input", "0:"),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers", "not modelled"),
    ("gemma4_text", {"layer_types": ["sliding_attention"] * 6}, "layer_types", "last layer"),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config", "the same"),
    ("gemma4_text", {"use_double_wide_mlp": True}, "use_double_wide_mlp", "false: nothing else"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional", "before them"),
    ("nemotron_h", {"hybrid_override_pattern": None}, "hybrid_override_pattern", "is missing"),
    ("nemotron_h", {"hybrid_override_pattern": "MXM*E-"}, "hybrid_override_pattern", "of M, *"),
    ("nemotron_h", {"hybrid_override_pattern": "M"}, "hybrid_override_pattern", "6 letters"),
    ("falcon_h1", {"mamba_d_head": 32}, "mamba_d_head", "128 / 8"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers", "4 entries"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim", "64, the hidden size"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "change", "named", "expectation"), BAD)
def test_refusals_name_the_key(
    model_type: str, change: dict[str, Any], named: str, expectation: str
) -> None:
    """What is wrong or cannot be expressed is refused by its key, on one line, exit code 2."""
    with pytest.raises(InputError) as refused:
        read({"model_type": model_type, **small(model_type), **change})
    assert refused.value.exit_code == Exit.BAD_INPUT
    line = str(refused.value)
    assert line.startswith("config.json")
    assert named in line
    assert expectation in line
    assert "\n" not in line


SHAPING: dict[str, object] = {
    "hybrid_override_pattern": "M-M*", "layers_block_type": ["mamba"] * 4, "ssm_state_size": 128,
    "mamba_num_heads": 16, "mamba_d_state": 16, "mamba_expand": 2, "conv_L_cache": 3,
    "attn_layer_period": 8, "ffn_config": {"ffn_hidden_size": 8}, "block_configs": [{"a": 1}],
    "moe_layer_freq": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "v_head_dim": 4, "index_topk": 8, "linear_num_key_heads": 2, "linear_attn_config": {"a": 1},
    "sliding_window": 8, "attention_chunk_size": 8, "layer_types": ["full_attention"] * 4,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "altup_num_inputs": 4,
    "laurel_rank": 8, "global_head_dim": 8, "swa_head_dim": 8, "per_layer_config": {"0": {}},
    "cross_attention_layers": [1], "num_mem_blocks": 2, "word_embed_proj_dim": 8, "ffn_dim": 8,
    "ffn_dim_multiplier": 2.0, "ffn_multipliers": [1.0], "num_nextn_layers": True, "compress": 1,
    "quantization": {"bits": 4, "group_size": 64}, "dual_chunk_attention_config": {"chunk": 8},
    "zero_expert_num": 2, "hc_mult": 4, "n_embd": 8, "parallel_attn": True, "d_model": 8,
    "position_embedding_type": "learned", "num_hidden_groups": 2, "share_attention": True,
    "experts_per_token": 4, "num_experts_per_token": 4, "shared_kv_token": 2, "media_layers": 4,
    "rotary_layers": 4, "rope_layers": 4, "fused_layers": 4, "fused_qkv_heads": 4, "alibi_x": 4,
    "mrope_heads": 4, "router_bias_size": 4, "mtp_x": 4, "vision_layers": 4, "train_layers": 4,
}  # fmt: skip
"""Keys of other families, and of none, that shape a model or may."""


@pytest.mark.parametrize("key", SHAPING)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm"])
def test_a_key_that_may_shape_is_refused(model_type: str, key: str) -> None:
    """Also inside the text_config of a model with further modalities."""
    if key in {"sliding_window", "layer_types"} and model_type == "qwen3":
        return
    config = {**of_family(model_type), key: SHAPING[key]}
    for each in (config, {"model_type": "outer", "text_config": config}):
        with pytest.raises(InputError, match=f"config.json: {key} is"):
            read(each)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"llama", "Yi"}))
def test_a_renamed_config_is_the_same_or_refused(model_type: str) -> None:
    """A model_type that was changed to llama never hides experts, states, latents or windows."""
    config, named = of_family(model_type), {**of_family(model_type), "model_type": "llama"}
    try:
        found = read(named)
    except InputError:
        return
    model = read(config)
    for part in ("moe", "mla", "index", "linear", "full_heads", "window_tokens"):
        assert getattr(found, part) == getattr(model, part), part


HARMLESS: dict[str, object] = {
    "_name_or_path": "x", "auto_map": {"AutoConfig": "x.Y"},
    "transformers_version": "4.51.0", "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": [1, 2], "pad_token_id": None, "use_cache": True, "pretraining_tp": 1,
    "unsloth_fixed": True, "unsloth_version": "2025.1", "rope_theta": 500000.0, "mscale": 0.7,
    "rope_scaling": None, "attn_implementation": "sdpa", "_attn_implementation": "eager",
    "attention_dropout": 0.1, "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.001, "output_router_logits": False,
    "temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_length": 20, "num_beams": 1,
    "id2label": {"0": "A"}, "label2id": {"A": 0}, "problem_type": None, "is_decoder": False,
    "is_encoder_decoder": False, "add_cross_attention": False, "tokenizer_class": "T",
    "chunk_size_feed_forward": 0, "torchscript": False, "_flash_attn_2_enabled": True,
    "partial_rotary_factor": 0.5, "rope_interleave": True, "resid_pdrop": 0.0, "n_groups": None,
    "num_local_experts": 0, "sliding_window": None, "kv_lora_rank": None, "mlp_only_layers": [],
    "image_token_id": 5, "vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 256,
    "mtp_num_hidden_layers": 0, "num_nextn_predict_layers": 0, "logits_scaling": 8.0,
    "attention_multiplier": 0.1, "layer_norm_eps": 1e-5, "task_specific_params": None,
    "finetuning_task": None, "gradient_checkpointing": False, "pruned_heads": {},
}  # fmt: skip
"""Keys of files on the hub that shape nothing, or say that there is none of it."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_harmless_keys_change_nothing(model_type: str) -> None:
    config = of_family(model_type)
    plain = read({**config, "rope_scaling": None})
    own = {key: value for key, value in HARMLESS.items() if key not in config}
    own = {key: value for key, value in own.items() if value is not None or key == "rope_scaling"}
    if model_type == "nemotron_h" or FAMILIES[model_type].experts:
        own.pop("num_local_experts", None)
    assert replace(read({**config, **own}), config_hash=plain.config_hash) == plain


CLASSES = [
    ("llama", ["NemotronForCausalLM"]), ("llama", ["ArceeForCausalLM"]),
    ("llama", ["PhiForCausalLM"]), ("llama", ["CohereForCausalLM"]), ("llama", "LlamaForCausalLM"),
    ("qwen2", ["Qwen2MoeForCausalLM"]), ("gemma", ["Gemma2ForCausalLM"]),
    ("mistral", ["MixtralForCausalLM"]), ("deepseek_v3", ["DeepseekV4ForCausalLM"]),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "named"), CLASSES)
def test_a_class_of_another_family_is_refused(model_type: str, named: object) -> None:
    """Also inside the text_config of a model with further modalities, whose own may be any."""
    config = {**of_family(model_type), "architectures": named}
    own = f"config.json: architectures is .*{model_type}"
    for each in (config, {"model_type": "llava", "text_config": config}):
        with pytest.raises(InputError, match=own):
            read(each)


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", None), ("llama", []), ("llama", ["LlamaForCausalLM"]),
        ("llama", ["X", "LLaMAForCausalLM"]), ("gpt2", ["GPT2LMHeadModel"]),
        ("phimoe", ["PhiMoEForCausalLM"]), ("mimo", ["MiMoForCausalLM"]),
        ("kimi_k2", ["DeepseekV3ForCausalLM"]), ("Yi", ["LlamaForCausalLM"]),
        ("qwen2_5_vl", ["Qwen2_5_VLForConditionalGeneration"]),
        ("qwen3_5_text", ["Qwen3_5ForConditionalGeneration"]),
    ],
)  # fmt: skip
def test_classes_of_the_family_are_read(model_type: str, named: object) -> None:
    config = of_family(model_type)
    outer = {"model_type": "x", "architectures": ["XForConditionalGeneration"]}
    for each in ({**config, "architectures": named}, {**outer, "text_config": config}):
        assert replace(read(each), config_hash="") == replace(read(config), config_hash="")


@pytest.mark.parametrize("act", ["relu2", "gelu", "swish"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "deepseek_v3", "granite"])
def test_activations_that_the_engine_refuses(model_type: str, act: str) -> None:
    """Its gated feed-forward knows silu alone; another may have two matrices."""
    with pytest.raises(InputError, match=r"hidden_act is .*has to be .?silu"):
        read({**of_family(model_type), "hidden_act": act})


def test_no_pattern_covers_a_key_that_shapes() -> None:
    """Biases of a feed-forward are fingerprinted, though nothing counts them."""
    assert {key for key in ARCHITECTURE_KEYS if harmless(key)} == {"mlp_bias", "model_type"}


PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "sliding_window_size": 4096,
               "cache_implementation": "hybrid"},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "embd_pdrop": 0.0},
    "minimax_m2": {"mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid",
                   "shared_intermediate_size": 0, "layernorm_mlp_beta": 1.0},
    "bloom": {"masked_softmax_fusion": True, "offset_alibi": 100, "skip_bias_add": True,
              "skip_bias_add_qkv": False, "attention_softmax_in_fp32": True},
    "gpt2": {"n_ctx": 1024, "n_positions": 1024, "summary_type": "cls_index"},
    "gptj": {"n_ctx": 2048, "n_positions": 2048, "rotary": True},
    "gpt_neox": {"norm_factor": 1, "rotary_pct": 0.25, "rotary_emb_base": 10000},
    "gpt_bigcode": {"n_ctx": 8192, "n_positions": 8192, "inference_runner": 0,
                    "pad_key_length": True, "pre_allocate_kv_cache": False,
                    "validate_runner_input": True},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "residual_dropout": 0.1},
    "smollm3": {"max_window_layers": 28, "use_sliding_window": False},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
    "falcon_h1": {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attn_layer_indices": None},
    "gpt_oss": {"num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0},
    "bamba": {"attn_rotary_emb": 64, "z_loss_coefficient": 0.0},
    "minimax": {"postnorm": True, "shared_moe_mode": "sigmoid", "shared_intermediate_size": 0},
    "qwen2_moe": {"moe_layer_freq": 1, "mlp_only_layers": []},
    "cohere2": {"order_of_interleaved_layers": "local_attn_first", "layer_switch": 4,
                "position_embedding_type": "rope_gptj", "use_embedding_sharing": True,
                "use_gated_activation": True, "use_parallel_block": True,
                "use_parallel_embedding": False, "rotary_pct": 1.0, "_sliding_window_pattern": 4},
    "hunyuan_v1_dense": {"attention_head_dim": 128, "head_dim": 128, "cla_share_factor": 2,
                         "use_cla": False, "use_mla": False, "num_experts": 1, "moe_topk": 1,
                         "dense_list": [4096, 0], "im_start_id": 5, "vit_type": None,
                         "pool_type": "last", "vit_patch": 1, "anyres_pooling_size": 2},
}  # fmt: skip
"""Keys that a family's published files have and its configuration class has not."""


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_keys_are_understood_in_one_sense(model_type: str) -> None:
    """They change nothing; those that might are refused with any other value."""
    config, family = of_family(model_type) | PUBLISHED[model_type], FAMILIES[model_type]
    meant = {key: value for key, value in config.items() if key not in family.also}
    meant = {key: meant[key] for key in meant if key not in {*family.fixed, *family.same}}
    assert replace(read(config), config_hash="") == replace(read(meant), config_hash="")
    for key in PUBLISHED[model_type].keys() & {*family.fixed, *family.same}:
        with pytest.raises(InputError, match=f"{key} is 77;.*nothing else is modelled"):
            read({**config, key: 77})


def test_a_key_of_a_tower_is_not_one_of_the_language_model() -> None:
    """Beside a text_config only what shapes a language model is looked at."""
    outer = {"model_type": "outer", "text_config": LLAMA, "spatial_merge_size": 2, "depths": [1]}
    assert read(outer).num_layers == 4
    with pytest.raises(InputError, match="n_routed_experts"):
        read({**outer, "n_routed_experts": 8})


@pytest.mark.parametrize(
    ("content", "expectation"),
    [("{", "is not JSON"), ("[]", "a JSON object"), ("\x80", "not text in UTF-8")],
)
def test_files_that_are_no_config(tmp_path: Path, content: str, expectation: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=expectation) as refused:
        read_config(tmp_path)
    assert str(file) in str(refused.value)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json does not exist"):
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
