"""A config.json that cannot be expressed is refused by the name of what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import Exit, InputError
from minicluster.specs.model import ARCHITECTURE_KEYS
from sizing import catalog
from sizing.catalog.huggingface.families import FAMILIES
from sizing.catalog.huggingface.reader import read_config
from tests.sizing.configs_read import EXPERTS, LATENT, LLAMA, of_family, read

BAD = [
    ({"model_type": "mamba"}, "model_type", "one of Yi, bloom"),
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
    (
        {"model_type": "glm_moe_dsa", **EXPERTS, **LATENT, "index_topk": 8, "index_topk_freq": 4},
        "index_topk_freq",
        "an index of its own",
    ),
    ({"model_type": "minimax_m2", **EXPERTS, "shared_intermediate_size": 8}, "shared_int", "kind"),
    (
        {"model_type": "qwen3_next", **EXPERTS, "mamba_ssm_dtype": "int8"},
        "mamba_ssm_dtype",
        "one of float32",
    ),
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
    ({"quantization_config": {"quant_method": "modelopt"}}, "quant_algo", "FP8"),
    (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        "config_groups",
        "one format",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "ignore": ["model.layers.0.mlp"]}},
        "model.layers.0.mlp",
        "only",
    ),
    (
        {"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 2},
        "decoder_sparse_step",
        "1: experts in every layer",
    ),
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
    ("content", "expectation"), [("{", "valid JSON"), ("[]", "a JSON object"), ("\x80", "JSON")]
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
ANY_KEY = st.sampled_from(
    [
        *sorted(ARCHITECTURE_KEYS),
        "torch_dtype",
        "rope_scaling",
        "text_config",
        "quantization_config",
    ]
)


def refusal(config: dict[str, Any]) -> str:
    """Return how a config is refused; only the place where it is read after all."""
    try:
        read(config)
    except InputError as error:
        return str(error)
    return "config.json"


@given(
    model_type=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(ANY_KEY, JSON_VALUES, max_size=4),
)
def test_nonsense_is_refused_not_crashed_on(model_type: str, changes: dict[str, Any]) -> None:
    """Whatever JSON stands under a key, the answer is a model or one refusal that says where."""
    assert refusal({**of_family(model_type), **changes}).startswith("config.json")


@given(
    changes=st.dictionaries(
        st.sampled_from(
            ["quant_method", "bits", "w_bit", "quant_algo", "config_groups", "ignore", "producer"]
        ),
        JSON_VALUES | st.sampled_from(["fp8", "awq", "modelopt", "compressed-tensors"]),
    )
)
def test_nonsense_in_the_quantisation(changes: dict[str, Any]) -> None:
    """The same holds inside a quantization_config."""
    quantised = {"quant_method": "compressed-tensors", **changes}
    assert refusal({**LLAMA, "quantization_config": quantised}).startswith("config.json")
