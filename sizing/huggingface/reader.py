"""A Hugging Face `config.json` as a model spec."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sizing.errors import InputError
from sizing.huggingface.families import EXPERT_KEYS, FAMILIES, Family
from sizing.huggingface.keys import Keys
from sizing.huggingface.quantization import Quantization, quantization
from sizing.specs.architecture import architecture, architecture_hash, language_model
from sizing.specs.model import MlaSpec, ModelSpec, MoeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LONGEST = 1e6
"""Factor of RoPE scaling that nobody means."""

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
    """Read a JSON object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(file), error.strerror, expectation) from None
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), str(error), "valid JSON") from None
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
        place: file, named in errors.

    Raises:
        InputError: an unknown `model_type`, a key missing or of the wrong type, or an
            architecture that a model spec cannot express.

    Ignores:
        Towers for images or sound beside a `text_config`: they are idle in text traffic, but
        their weights are missing from the memory. Multi-token-prediction layers.

    """
    values = architecture(config)
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise InputError(f"{place}: model_type", model_type, f"one of {known}")
    try:
        return _spec(
            language_model(config), Keys(values, family.defaults, place), family, (name, source)
        )
    except InputError as error:
        if error.place.startswith(place):
            raise
        raise InputError(
            f"{place}: {error.place}", error.value, error.expectation, error.way_out
        ) from None


def _spec(
    config: Mapping[str, object], keys: Keys, family: Family, names: tuple[str, str]
) -> ModelSpec:
    """Put the spec together."""
    for key in ("mlp_bias", "index_topk"):
        keys.refuse(key, "the sizer cannot express it yet")
    context = _context(config, keys)
    window, num_window_layers = _windows(keys, family, context)
    dtype = _dtype(config, keys.place)
    quantised = _quantization(config, dtype, keys.place)
    mla = _mla(keys, family)
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    return ModelSpec(
        id=names[0],
        source=names[1],
        config_hash=architecture_hash(config),
        num_layers=keys.count("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads if mla else keys.count("num_key_value_heads", heads),
        head_dim=(
            mla.qk_nope_head_dim + mla.qk_rope_head_dim
            if mla
            else keys.count("head_dim", hidden // max(heads, 1))
        ),
        ffn_size=_dense_ffn(keys, family),
        vocab_size=keys.count("vocab_size"),
        max_context_tokens=context,
        tied_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=keys.flag("attention_bias"),
        window_tokens=window,
        num_window_layers=num_window_layers,
        dtype=dtype,
        weight_dtype=quantised.weight_dtype,
        attention_quantised=quantised.attention,
        kv_dtype=dtype,
        moe=_moe(keys, family),
        mla=mla,
    )


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


def _windows(keys: Keys, family: Family, context: int) -> tuple[int, int]:
    """Find the sliding window and how many layers use it."""
    kinds = _layer_kinds(keys)
    window = keys.count("sliding_window", 0)
    if "use_sliding_window" in family.defaults and not keys.flag("use_sliding_window"):
        window = 0
    if not 0 < window < context:
        return 0, 0
    covered = kinds.count("sliding_attention") if kinds else _covered(keys, family)
    return (window, covered) if covered else (0, 0)


def _layer_kinds(keys: Keys) -> list[object]:
    """Return the kind of each layer; empty where the config leaves it to its family."""
    layers, kinds = keys.count("num_hidden_layers"), keys.sequence("layer_types")
    known = ("sliding_attention", "full_attention")
    if kinds and (len(kinds) != layers or any(kind not in known for kind in kinds)):
        raise keys.wrong(
            "layer_types", f"{layers} entries, each sliding_attention or full_attention"
        )
    return kinds


def _covered(keys: Keys, family: Family) -> int:
    """Count the layers that use the sliding window by the rule of the family."""
    layers = keys.count("num_hidden_layers")
    if family.windows == "above":
        return max(0, layers - keys.count("max_window_layers"))
    if family.windows == "pattern":
        return layers - layers // max(1, keys.count("sliding_window_pattern"))
    if family.windows == "all":
        return layers
    raise keys.wrong("sliding_window", "no such key: nothing says which layers use it")


def _moe(keys: Keys, family: Family) -> MoeSpec | None:
    """Read the experts, if there are any."""
    if not family.experts:
        for key in EXPERT_KEYS:
            keys.refuse(key, "models of this model_type have no experts")
        return None
    counts = next((key for key in EXPERT_KEYS if keys.has(key)), family.experts)
    if family.latent_attention and not keys.has(counts):
        return None
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        if keys.count(key, 1) != 1:
            raise keys.wrong(key, "1: experts in every layer after the dense ones")
    dense = keys.sequence("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise keys.wrong("mlp_only_layers", "the first layers only")
    size = keys.count(family.expert_ffn)
    num_shared = keys.count("n_shared_experts", 0)
    shared_size = keys.count("shared_expert_intermediate_size", num_shared * size)
    return MoeSpec(
        num_experts=keys.count(counts),
        experts_per_token=keys.count("num_experts_per_tok"),
        expert_ffn_size=size,
        num_shared_experts=num_shared or int(shared_size > 0),
        shared_ffn_size=shared_size,
        num_dense_layers=keys.count("first_k_dense_replace", len(dense)),
    )


def _dense_ffn(keys: Keys, family: Family) -> int:
    """Return the dense feed-forward's size; 0 where every layer has experts."""
    moe = _moe(keys, family)
    return 0 if moe and not moe.num_dense_layers else keys.count("intermediate_size")


def _mla(keys: Keys, family: Family) -> MlaSpec | None:
    """Read multi-head latent attention, if the family has it."""
    if not family.latent_attention:
        keys.refuse("kv_lora_rank", "models of this model_type have no latent attention")
        return None
    return MlaSpec(
        q_lora_rank=keys.count("q_lora_rank", 0),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )


def _dtype(config: Mapping[str, object], place: str) -> str:
    """Find the dtype of what is not quantised; bf16 where the config is silent."""
    named = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    dtype = DTYPES.get(str(named))
    if dtype is None:
        raise InputError(f"{place}: torch_dtype", named, "one of " + ", ".join(DTYPES))
    return dtype


def _quantization(config: Mapping[str, object], dtype: str, place: str) -> Quantization:
    """Read how the weights are quantised; as `dtype` where they are not."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if raw is None:
        return Quantization(weight_dtype=dtype, attention=True)
    if not isinstance(raw, dict):
        raise InputError(f"{place}: quantization_config", raw, "an object")
    return quantization(raw, place=place)
