"""
A config reads as transformers 5.19.0 reads it, and is as long as vLLM 0.29.0 lets it be.

What the library writes of a config that it has read names every key; what we read of that, and of
the config itself, has to be one and the same.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minicluster.errors import InputError
from minicluster.specs.model import ARCHITECTURE_KEYS, ModelSpec
from sizing.catalog.huggingface.families import families, library, refused, shapes_nothing
from sizing.catalog.huggingface.reader import model_from
from tests.sizing.catalog.small_models import small

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = families()

REPOSITORY = Path(__file__).parents[3]


def read(config: dict[str, Any]) -> ModelSpec:
    """Read a config, its fingerprint and its draft head apart."""
    model = model_from(config, name="m", source="m", place="config.json")
    return replace(model, config_hash="", draft=None)


def rewritten(model_type: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return what the library writes of a config, its own dtype apart."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  (seconds, and only here)

    kind = CONFIG_MAPPING[FAMILIES[model_type].library or model_type]
    config = kind(**json.loads(json.dumps(keys)))
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    written.pop("dtype", None)
    return {**written, "model_type": model_type}


def test_the_table_is_what_the_library_says() -> None:
    """`python scripts/huggingface.py` writes it."""
    found = importlib.util.spec_from_file_location("h", REPOSITORY / "scripts" / "huggingface.py")
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_a_class_is_sorted(model_type: str) -> None:
    """A key shapes nothing, or is read, or has to be as the class has it; no family is refused."""
    fixed = {"_remove_final_layer_norm", "use_double_wide_mlp"}
    also = {"expand", "position_embedding_type", "vocab_size_per_layer_input"}
    unsorted = {key for key in library(model_type).defaults if not shapes_nothing(key)}
    assert unsorted - ARCHITECTURE_KEYS - fixed <= also
    assert model_type not in refused()


CHANGES: list[dict[str, Any]] = [
    {},
    *({"num_hidden_layers": number} for number in (5, 7, 8)),
    {"sliding_window": 32},
    {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2},
    {"sliding_window": None},
    {"num_key_value_heads": None},
    {"full_attention_interval": 2, "num_hidden_layers": 5},
    {"sliding_window_pattern": 3, "sliding_window": 32, "num_hidden_layers": 7},
    {"interleave_moe_layer_step": 1},
    {"first_k_dense_replace": 3},
    {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    {"num_local_experts": 0},
    {"mamba_d_head": "auto"},
]


def changes(model_type: str) -> list[dict[str, Any]]:
    """Return small configs of a family: whole, without one of their keys, and with some changed."""
    keys = small(model_type)
    changed = [each for each in CHANGES if each.keys() <= known(model_type)]
    without = [{k: v for k, v in keys.items() if k != gone} for gone in keys]
    return [*({**keys, **each} for each in changed), *without]


def known(model_type: str) -> set[str]:
    """Return the keys of a family."""
    row = library(model_type)
    found = {*row.defaults, *row.renamed, *FAMILIES[model_type].also}
    # The library overlooks it, vLLM and we do not.
    return found - {"first_k_dense_replace"} if model_type == "glm4_moe_lite" else found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_are_the_librarys(model_type: str) -> None:
    """What the library fills in is what we take, or we refuse both and name a key."""
    compared = 0
    for keys in changes(model_type):
        try:
            written = rewritten(model_type, keys)
        except Exception:  # noqa: BLE001, S112  (the library itself has no such model)
            continue
        config = {**keys, "model_type": model_type}
        try:
            expected = read(written)
        except InputError as error:
            place = re.escape(error.place)
            with pytest.raises(InputError, match=f"^{place} is "):
                read(config)
            continue
        try:
            found = read(config)
        except InputError as error:
            # Where the library guesses, or overlooks one of two keys that differ, we do not.
            assert error.place.partition(": ")[2] in REFUSED_HERE, keys  # noqa: PT017
            continue
        assert found == expected, keys
        compared += 1
    assert compared > 3


REFUSED_HERE = {"num_key_value_heads", "hybrid_override_pattern", "first_k_dense_replace"}

LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED = {"original_max_position_embeddings": 256}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
ROPES: list[dict[str, Any]] = [
    {},
    *(
        {"rope_scaling": each}
        for each in (
            {"rope_type": "linear", "factor": 8.0},
            {"type": "linear", "factor": 4.0},
            {"rope_type": "linear", "factor": None},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, **TRAINED},
            {"type": "yarn", "factor": 4.0},
            {"rope_type": "llama3", "factor": 8.0, **LLAMA3, **TRAINED},
            {"rope_type": "longrope", "factor": 4.0, **LONG, **TRAINED},
            {"type": "su", "factor": 4.0, **LONG, **TRAINED},
            {"rope_type": "default", "factor": 4.0},
            {"type": "mrope", "mrope_section": [1, 1, 2]},
        )
    ),
    *(
        {"rope_parameters": {**each, **kind}}
        for each, kind in (
            ({"rope_type": "yarn", "factor": 4.0, **TRAINED, "rope_theta": 1e4}, {}),
            (BY_KIND, {"full_attention": {"rope_type": "linear", "factor": 8.0}}),
            (BY_KIND, {"full_attention": {"rope_type": "yarn", "factor": 4.0, **TRAINED}}),
        )
    ),
    {"seq_length": 100},
    {"model_max_length": 777},
]
NO_ROPE = {"bloom", "gpt2", "gpt_bigcode", "gptj", "opt"}
"""Families whose positions are no angles; the library scales them before it has read them."""


@cache
def engine() -> SimpleNamespace:
    """Import the parts of vLLM that find the longest sequence."""
    from vllm.config import model  # noqa: PLC0415  (seconds, and only here)
    from vllm.transformers_utils import config, model_arch_config_convertor  # noqa: PLC0415

    return SimpleNamespace(
        verify=model._get_and_verify_max_len,
        patch=config.patch_rope_parameters,
        convertor=model_arch_config_convertor.ModelArchConfigConvertorBase,
    )


def accepts(config: Any, tokens: int) -> bool:  # noqa: ANN401  (a config of transformers)
    """Say whether vLLM serves so long sequences."""
    found = engine().convertor(config, config).derive_max_model_len_and_key()
    arch = SimpleNamespace(derived_max_model_len_and_key=found)
    try:
        engine().verify(
            config, arch, None, tokens, disable_sliding_window=False, sliding_window=None
        )
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - NO_ROPE))
def test_the_longest_sequence_is_the_engines(model_type: str) -> None:
    """Whatever RoPE says, vLLM takes as many tokens as we read, and not one more."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415

    kind, compared = CONFIG_MAPPING[FAMILIES[model_type].library or model_type], 0
    for rope in ROPES:
        if model_type == "granitemoehybrid" and "full_attention" in rope.get("rope_parameters", ()):
            continue  # its former names of kinds of layers are not those of RoPE
        keys = {**small(model_type), **rope}
        try:
            config = kind(**json.loads(json.dumps(keys)))
            engine().patch(config)
            accepts(config, 1)
        except Exception:  # noqa: BLE001, S112  (the library itself refuses it)
            continue
        model = read({**keys, "model_type": model_type})
        assert accepts(config, model.max_context_tokens), rope
        assert not accepts(config, model.max_context_tokens + 1), rope
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model_type", ["nemotron_h", "falcon_h1", "bamba", "qwen3_5_text"])
def test_states_have_the_engines_shapes(model_type: str, tp: int) -> None:
    """Values of the convolution and of the recurrence, a layer and sequence, at each degree."""
    from vllm.model_executor.layers.mamba import mamba_utils  # noqa: PLC0415

    keys: dict[str, Any] = small(model_type) | {"linear_num_key_heads": 8}
    keys |= {"linear_num_value_heads": 16}
    for groups in (1, 8):
        keys["n_groups" if model_type == "nemotron_h" else "mamba_n_groups"] = groups
        config = {k: v for k, v in keys.items() if k in known(model_type)}
        linear = read({**config, "model_type": model_type}).linear
        assert linear is not None
        shapes = mamba_utils.MambaStateShapeCalculator
        common = {"tp_world_size": tp}
        if linear.kind == "delta":
            expected = shapes.gated_delta_net_state_shape(
                **common, num_k_heads=linear.num_key_heads, num_v_heads=linear.num_value_heads,
                head_k_dim=linear.key_head_dim, head_v_dim=linear.value_head_dim,
                conv_kernel_size=linear.conv_kernel,
            )  # fmt: skip
        else:
            expected = shapes.mamba2_state_shape(
                **common, num_heads=linear.num_value_heads, head_dim=linear.value_head_dim,
                intermediate_size=linear.num_value_heads * linear.value_head_dim,
                n_groups=linear.num_key_heads, state_size=linear.key_head_dim,
                conv_kernel=linear.conv_kernel,
            )  # fmt: skip
        (length, width), (heads, rows, columns) = expected
        assert linear.convolution_values(tp=tp) == length * width
        assert linear.recurrent_values(tp=tp) == heads * rows * columns
