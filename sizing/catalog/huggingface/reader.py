"""A Hugging Face `config.json` as a model spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.config import read_json
from minicluster.errors import InputError
from minicluster.specs.model import (
    DraftSpec,
    ModelSpec,
    MoeSpec,
    architecture,
    architecture_hash,
    language_model,
    mtp_layers,
)
from sizing.catalog.huggingface.families import FAMILIES, Family
from sizing.catalog.huggingface.layers import (
    Keys,
    read_dense_size,
    read_experts,
    read_index,
    read_latent,
    read_layers,
    read_linear,
)
from sizing.catalog.huggingface.quantization import Quantization, quantization

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LONGEST = 1e6
"""Largest factor of RoPE scaling that is read; a larger one is a mistake."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read_config(path: Path) -> dict[str, object]:
    """
    Read a `config.json`, given itself or the directory it is in.

    A `hf_quant_config.json` beside it (NVIDIA's checkpoints) becomes its `quantization_config`.

    Raises:
        InputError: no such file, not JSON, not an object.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file, "a Hugging Face config.json")
    beside = file.with_name("hf_quant_config.json")
    if beside.exists() and "quantization_config" not in language_model(config):
        raw = _read_object(beside, "the quantisation of the model beside it")
        inner = raw.get("quantization")
        quantised = inner if isinstance(inner, dict) else {}
        config["quantization_config"] = {**quantised, "producer": raw.get("producer")}
    return config


def _read_object(file: Path, expectation: str) -> dict[str, object]:
    raw = read_json(file, expectation)
    if not isinstance(raw, dict):
        raise InputError(str(file), type(raw).__name__, "a JSON object")
    return raw


def model_from(config: Mapping[str, object], *, name: str, source: str, place: str) -> ModelSpec:
    """
    Turn a config into a model spec.

    Args:
        config: parsed `config.json`; with a `text_config`, that part is read.
        name: becomes the spec's id.
        source: where a server loads the model from.

    Raises:
        InputError: an unknown `model_type`, a key missing or of the wrong type, or an
            architecture that a model spec cannot express.

    Ignores:
        Towers for images or sound beside a `text_config`: they are idle in text traffic, but
        their weights are missing from the memory.
    """
    values = architecture(config)
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        way_out = "name the family with the same layers, or add it to huggingface/families.py"
        raise InputError(f"{place}: model_type", model_type, f"one of {known}", way_out)
    # The common names of keys win where a family's own stand beside them.
    common = {ours: values[theirs] for ours, theirs in family.renamed.items() if theirs in values}
    keys = Keys({**common, **values}, family.defaults, place)
    try:
        return _spec(language_model(config), keys, family, (name, source))
    except InputError as error:
        if error.place.startswith(place):
            raise
        raise error.inside(place) from None


def _spec(
    config: Mapping[str, object], keys: Keys, family: Family, names: tuple[str, str]
) -> ModelSpec:
    context = _context(config, keys)
    layers = read_layers(keys, family, context)
    dtype = _dtype(config, keys.place)
    mla = read_latent(keys, family)
    moe = read_experts(keys, family)
    quantised = _quantization(config, dtype, keys, moe)
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    predicting = mtp_layers(config)
    return ModelSpec(
        id=names[0],
        source=names[1],
        config_hash=architecture_hash(config),
        num_layers=keys.count("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads if mla else _kv_heads(keys, heads),
        head_dim=(
            mla.qk_nope_head_dim + mla.qk_rope_head_dim
            if mla
            else keys.count("head_dim", hidden // max(heads, 1))
        ),
        ffn_size=read_dense_size(keys, family, moe),
        gated_mlp=family.gated_mlp,
        vocab_size=keys.count("vocab_size"),
        max_context_tokens=context,
        tied_embeddings=keys.flag("tie_word_embeddings"),
        parallel_attention=keys.flag("parallel_attn"),
        attention_bias=keys.flag("attention_bias"),
        gated_attention=keys.flag("attn_output_gate"),
        window_tokens=layers.window_tokens,
        chunked_window=layers.chunked,
        num_window_layers=layers.num_windowed,
        dtype=dtype,
        weight_dtype=quantised.weight_dtype,
        weight_group=quantised.group,
        weight_format=quantised.method,
        block_scaled=family.fp8_blocks if quantised.blocks is None else quantised.blocks,
        attention_quantised=quantised.attention,
        dense_quantised=quantised.dense,
        shared_quantised=quantised.shared,
        kv_dtype=dtype,
        query_norm=family.query_norm,
        moe=moe,
        mla=mla,
        index=read_index(keys, mla),
        linear=read_linear(keys, family, layers.num_linear),
        draft=DraftSpec(method="mtp", num_layers=predicting) if predicting else None,
    )


def _kv_heads(keys: Keys, heads: int) -> int:
    """Return the key and value heads; Falcon's first decoder had one or as many as heads."""
    if keys.has("multi_query") and not keys.flag("new_decoder_architecture"):
        return 1 if keys.flag("multi_query") else heads
    return keys.count("num_key_value_heads", heads)


def _context(config: Mapping[str, object], keys: Keys) -> int:
    """
    Find the longest sequence the model takes.

    Source:
        vLLM 0.29, config/model.py: RoPE scaling multiplies the length that the model was trained
        on, unless its type is one whose config already says the product.
    """
    tokens = keys.count("max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("factor") is None:
        return tokens
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("default", "llama3", "longrope", "su"):
        return tokens
    trained = rope.get("original_max_position_embeddings", tokens) if kind == "yarn" else tokens
    factor = rope["factor"]
    if (
        not isinstance(trained, int)
        or not isinstance(factor, int | float)
        or not 0 < factor < LONGEST
    ):
        raise InputError(f"{keys.place}: rope_scaling", rope, "a factor and whole lengths")
    return int(trained * factor)


def _dtype(config: Mapping[str, object], place: str) -> str:
    """Find the dtype of what is not quantised; bf16 where the config is silent."""
    named = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    dtype = DTYPES.get(str(named))
    if dtype is None:
        raise InputError(f"{place}: torch_dtype", named, "one of " + ", ".join(DTYPES))
    return dtype


def _quantization(
    config: Mapping[str, object], dtype: str, keys: Keys, moe: MoeSpec | None
) -> Quantization:
    """Read how the weights are quantised; as `dtype` where they are not."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if raw is None:
        return Quantization(weight_dtype=dtype)
    if not isinstance(raw, dict):
        raise InputError(f"{keys.place}: quantization_config", raw, "an object")
    layers = keys.count("num_hidden_layers")
    return quantization(
        raw,
        num_layers=layers,
        num_dense_layers=moe.num_dense_layers if moe else layers,
        place=keys.place,
    )
