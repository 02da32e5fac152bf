"""Any config.json becomes a model spec, or is refused by the name of what cannot be expressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from sizing import catalog
from sizing.catalog.huggingface.families import FAMILIES
from sizing.catalog.huggingface.reader import read_config
from tests.sizing.configs_read import LLAMA, of_family, read


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_read(model_type: str) -> None:
    model, family = read(of_family(model_type)), FAMILIES[model_type]
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (4, 64, 100)
    assert (model.moe is not None) == bool(family.experts)
    assert (model.mla is not None) == family.latent_attention
    assert model.num_window_layers == 0


@given(
    layers=st.integers(1, 200),
    heads=st.integers(1, 16),
    ratio=st.integers(1, 8),
    head_dim=st.integers(1, 256),
)
def test_shapes_pass_through(layers: int, heads: int, ratio: int, head_dim: int) -> None:
    config = {
        **LLAMA,
        "num_hidden_layers": layers,
        "num_attention_heads": heads * ratio,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
    }
    model = read(config)
    assert (model.num_layers, model.num_heads) == (layers, heads * ratio)
    assert (model.num_kv_heads, model.head_dim) == (heads, head_dim)


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
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("phi3", {"sliding_window": 262144}, (0, 0)),  # longer than the context: no window at all
        ("qwen2", {"sliding_window": 512, "max_window_layers": 3}, (0, 0)),
        (
            "qwen2",
            {"sliding_window": 512, "max_window_layers": 3, "use_sliding_window": True},
            (512, 1),
        ),
        ("gemma2", {"sliding_window": 512}, (512, 2)),
        ("gemma3_text", {"sliding_window": 512, "num_hidden_layers": 12}, (512, 10)),
        (
            "gpt_oss",
            {"sliding_window": 128, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            (128, 3),
        ),
    ],
)
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
    assert read({**LLAMA, "rope_scaling": rope}).max_context_tokens == expected


def test_nested_language_model() -> None:
    """A model with further modalities is read from its text_config."""
    outer = {"model_type": "gemma3", "vision_config": {}, "torch_dtype": "float16"}
    model = read({**outer, "text_config": {**LLAMA, "torch_dtype": None}})
    assert model.num_layers == 4


def test_side_by_side_and_plain() -> None:
    """GPT-J and Falcon: attention beside a plain feed-forward of 4 h; BLOOM: one by one."""
    gptj = read({"model_type": "gptj", "n_embd": 64, "n_head": 8, "n_layer": 4, "n_positions": 128,
                 "n_inner": None, "vocab_size": 100})  # fmt: skip
    assert (gptj.parallel_attention, gptj.gated_mlp, gptj.ffn_size) == (True, False, 256)
    assert (gptj.num_heads, gptj.num_kv_heads, gptj.max_context_tokens) == (8, 8, 128)
    falcon = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 8,
              "num_hidden_layers": 4, "vocab_size": 100}  # fmt: skip
    assert read(falcon).num_kv_heads == 1
    assert read({**falcon, "multi_query": False}).num_kv_heads == 8
    grouped = read({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2})
    assert (grouped.num_kv_heads, grouped.parallel_attention, grouped.ffn_size) == (2, True, 256)
    bloom = {"model_type": "bloom", "n_embed": 64, "n_head": 8, "n_layer": 4, "vocab_size": 100}
    assert read(bloom).parallel_attention is False
    assert (read(bloom).attention_bias, read(bloom).tied_embeddings) == (True, True)


def test_linear_chunked_and_sparse_attention() -> None:
    """Every fourth layer attends to everything; the others keep a state or see their chunk."""
    hybrid = read(of_family("qwen3_next"))
    assert (hybrid.num_linear_layers, hybrid.num_full_layers, hybrid.gated_attention) == (
        3,
        1,
        True,
    )
    assert (hybrid.linear.num_value_heads, hybrid.linear.state_dtype) == (32, "fp32")
    lightning = read(of_family("minimax")).linear
    assert (lightning.num_layers, lightning.delta_rule, lightning.key_head_dim) == (2, False, 8)
    scout = read({**of_family("llama4_text"), "attention_chunk_size": 512})
    assert (scout.window_tokens, scout.num_window_layers, scout.chunked_window) == (512, 3, True)
    assert (scout.moe.shared_ffn_size, scout.moe.num_dense_layers) == (128, 0)
    every_other = {**of_family("llama4_text"), "interleave_moe_layer_step": 2}
    maverick = read({**every_other, "intermediate_size_mlp": 256})
    assert (maverick.moe.num_dense_layers, maverick.ffn_size) == (2, 256)
    sparse = {**of_family("glm_moe_dsa"), "index_topk": 16, "index_n_heads": 2, "index_head_dim": 8}
    assert read(sparse).index.top_k == 16


def test_experts_alone_may_be_quantised() -> None:
    left_out = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": left_out}
    model = read({**of_family("kimi_k2"), "quantization_config": config})
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


def test_dense_layers_before_the_experts() -> None:
    deep = read({**of_family("deepseek_v3"), "first_k_dense_replace": 1, "n_shared_experts": 2})
    assert (deep.moe.num_dense_layers, deep.moe.shared_ffn_size, deep.ffn_size) == (1, 64, 128)
    assert deep.head_dim == 12
    qwen = read({**of_family("qwen2_moe"), "mlp_only_layers": [0, 1]})
    assert (qwen.moe.num_dense_layers, qwen.ffn_size) == (2, 128)
    assert read(of_family("qwen3_moe")).ffn_size == 0


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        ({"quant_method": "fp8"}, ("fp8", True)),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, ("fp8", True)),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
            ("fp4", False),
        ),
        ({"quant_method": "awq", "bits": 4}, ("int4", True)),
        ({"quant_method": "gptq", "bits": 8}, ("int8", True)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("fp4", True)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
                "ignore": ["lm_head", "model.layers.0.mlp.gate"],
            },
            ("fp8", True),
        ),
    ],
)
def test_quantisation(quantised: dict[str, Any], expected: tuple[str, bool]) -> None:
    """The quantisation of published checkpoints gives the dtype of their weights."""
    model = read({**LLAMA, "quantization_config": quantised})
    assert (model.weight_dtype, model.attention_quantised) == expected
    assert (model.dtype, model.kv_dtype) == ("bf16", "bf16")


def test_quantisation_in_a_file_beside(tmp_path: Path) -> None:
    """NVIDIA's checkpoints say it in hf_quant_config.json; it is not overlooked."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    assert read(read_config(tmp_path)).weight_dtype == "fp8"


def test_path_and_directory_give_the_same_model(tmp_path: Path) -> None:
    """A config may be named itself or by its directory, from which a server then loads."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    by_directory = catalog.find_model(str(tmp_path))
    by_file = catalog.find_model(str(tmp_path / "config.json"))
    assert by_directory.source == by_file.source == str(tmp_path)
    assert by_directory.config_hash == by_file.config_hash


@pytest.mark.parametrize(
    ("quantized", "blocks"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False),
        (None, True),
    ],
)
def test_scales_of_fp8(quantized: dict[str, Any] | None, blocks: bool) -> None:  # noqa: FBT001
    extra = {"quantization_config": quantized} if quantized else {}
    assert read({**of_family("qwen3"), **extra}).block_scaled is blocks
