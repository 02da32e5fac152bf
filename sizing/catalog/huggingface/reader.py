"""A Hugging Face `config.json` as a model spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minicluster.config import read_json
from minicluster.errors import InputError, written, wrong_kind
from minicluster.specs.checks import meant
from minicluster.specs.model import (
    ARCHITECTURE_KEYS,
    DraftSpec,
    ModelSpec,
    MoeSpec,
    architecture_hash,
    language_model,
    mtp_layers,
)
from sizing.catalog.huggingface.families import (
    Family,
    Library,
    families,
    library,
    refused,
    shapes_nothing,
)
from sizing.catalog.huggingface.layers import (
    Keys,
    read_dense_size,
    read_experts,
    read_full_heads,
    read_index,
    read_kinds,
    read_latent,
    read_layers,
    read_linear,
)
from sizing.catalog.huggingface.quantization import Quantization, quantization

if TYPE_CHECKING:
    from collections.abc import Iterator
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
        raise InputError(str(file), wrong_kind(raw), "a JSON object")
    return raw


def model_from(config: Mapping[str, object], *, name: str, source: str, place: str) -> ModelSpec:
    """
    Turn a config into a model spec.

    Args:
        config: parsed `config.json`; with a `text_config`, that part is read.
        name: becomes the spec's id.
        source: hub id or folder that a server loads.

    Raises:
        InputError: an unknown `model_type`, a key missing or of the wrong type, or an
            architecture that a model spec cannot express.

    Ignores:
        Towers for images or sound beside a `text_config`: they are idle in text traffic, but
        their weights are missing from the memory.
    """
    model_type = language_model(config).get("model_type")
    family = families().get(str(model_type))
    if family is None or not isinstance(model_type, str):
        expected = "a family of decoder-only text models whose layers are modelled"
        why = refused().get(str(model_type)) or _how_to_name(str(model_type))
        raise InputError(f"{place}: model_type", model_type, expected, why)
    row = library(model_type)
    given = dict(_understood(config, row, family, place))
    # The library gives a family's own key what stands under its other name.
    given |= {own: given[name] for name, own in row.renamed.items() if name in given}
    keys = Keys(
        given, {**row.defaults, **family.defaults}, place,
        {**row.renamed, **family.renamed},
    )  # fmt: skip
    try:
        return _spec(keys, family, (name, source, architecture_hash(config)))
    except InputError as error:
        if error.place.startswith(place):
            raise
        raise error.inside(place) from None


def _how_to_name(model_type: str) -> str:
    """Say which families are known, the one that was probably meant first."""
    near = meant(model_type, families())
    asked = f"did you mean {near}? " if near is not None else ""
    return (
        f"{asked}a model with the layers of a known family is planned as that: write its"
        f" model_type; known: {', '.join(sorted(families()))}"
    )


def _understood(
    config: Mapping[str, object], row: Library, family: Family, place: str
) -> Iterator[tuple[str, object]]:
    """
    Yield the keys that a family has, and those that shape nothing.

    Beside a `text_config` stand the keys of towers; only those that shape a language model as well
    are looked at there.

    Raises:
        InputError: another key that may shape the model, and says more than nothing.
    """
    keys, inner = language_model(config), config.get("text_config")
    text = config if inner is None else inner
    if not isinstance(text, Mapping):
        raise InputError(f"{place}: text_config", inner, "an object")
    _same_family(text, {*row.architectures, *family.architectures}, place)
    own = {*row.renamed.values(), *family.renamed.values()}
    said = {**row.defaults, **family.defaults, **keys}
    only = {**family.fixed, **{key: said.get(other) for key, other in family.same.items()}}
    known = {*row.defaults, *row.renamed, *own, *family.also, *only, *LENGTHS, TIED}
    odd = []
    for key, value in keys.items():
        shapes = key in ARCHITECTURE_KEYS
        if key in known or shapes_nothing(key):
            yield key, value
            free = shapes or key in family.also or shapes_nothing(key)
            fixed = only.get(key, value if free else row.defaults.get(key, value))
            if value not in (fixed, None if key in only else fixed):
                expected = f"{written(fixed)}: nothing else is modelled"
                raise InputError(f"{place}: {key}", value, expected)
        elif not (value in (None, [], {}) or (shapes and value in (False, 0))):
            odd += [key] * (key in text or shapes)
    if odd:
        model_type = keys.get("model_type")
        expected = f"no such key: {model_type} has none, so that what it shapes is not known"
        others = f"likewise {', '.join(odd[1:])}" if odd[1:] else None
        raise InputError(f"{place}: {odd[0]}", keys[odd[0]], expected, others)


def _same_family(config: Mapping[str, object], classes: set[str], place: str) -> None:
    """Refuse `architectures`, by which vLLM chooses a class, that are all another family's."""
    named = config.get("architectures")
    if named and not (isinstance(named, list) and classes & set(map(str, named))):
        expected = f"one of model_type {config.get('model_type')}: {', '.join(sorted(classes))}"
        raise InputError(f"{place}: architectures", named, expected)


def _spec(keys: Keys, family: Family, names: tuple[str, str, str]) -> ModelSpec:
    config = keys.values
    kinds = read_kinds(keys, family)
    context = _context(keys, kinds)
    layers = read_layers(keys, family, kinds, context)
    dtype = _dtype(config, keys.place)
    mla = read_latent(keys, family)
    moe = read_experts(keys, family, layers)
    quantised = _quantization(keys, dtype, moe, len(layers.kinds))
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    predicting = mtp_layers(config)
    keys.only("word_embed_proj_dim", hidden, f"{hidden}, the hidden size")
    keys.only("use_bidirectional_attention", "vision", "false: tokens attend to those before them")
    return ModelSpec(
        id=names[0],
        source=names[1],
        config_hash=names[2],
        num_layers=len(layers.kinds),
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
        tied_embeddings=keys.flag(TIED),
        position_rows=_position_rows(keys, family),
        parallel_attention=keys.flag("parallel_attn"),
        attention_bias=keys.flag("attention_bias"),
        gated_attention=keys.flag("attn_output_gate"),
        full_heads=read_full_heads(keys, layers),
        window_tokens=layers.window_tokens,
        chunked_window=layers.chunked,
        num_window_layers=layers.num_windowed,
        attention_layers=layers.attention_layers,
        ffn_layers=layers.ffn_layers,
        dtype=dtype,
        weight_dtype=quantised.weight_dtype,
        weight_group=quantised.group,
        weight_format=quantised.method,
        block_scaled=family.fp8_blocks if quantised.blocks is None else quantised.blocks,
        attention_quantised=quantised.attention,
        dense_quantised=quantised.dense,
        shared_quantised=quantised.shared,
        # vLLM's latent attention looks at no scheme of compressed-tensors.
        kv_dtype=(not (mla and quantised.method == "compressed-tensors") and quantised.kv_dtype)
        or dtype,
        query_norm=family.query_norm,
        moe=moe,
        mla=mla,
        index=read_index(keys),
        linear=read_linear(keys, family, layers.num_linear, dtype),
        draft=DraftSpec(method="mtp", num_layers=predicting) if predicting else None,
    )


def _kv_heads(keys: Keys, heads: int) -> int:
    if keys.flag("multi_query") and not keys.flag("new_decoder_architecture"):
        return 1
    found = keys.count("num_key_value_heads", heads)
    if not found or heads % found:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    return found


def _position_rows(keys: Keys, family: Family) -> int:
    if family.position_rows is None:
        return 0
    return keys.count("max_position_embeddings") + family.position_rows


TIED = "tie_word_embeddings"
"""A key that is the outer one's where a language model is part of another."""

LENGTHS = (
    "max_position_embeddings", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys with the longest sequence; vLLM takes the smallest."""

USUAL_LENGTH = 2048
"""Longest sequence of a config that names none, in vLLM."""


def _context(keys: Keys, kinds: list[str]) -> int:
    """
    Find the longest sequence the model takes.

    Source:
        vLLM 0.29.0 `_get_and_verify_max_len` (config/model.py): RoPE scaling multiplies the length,
        yarn the one that the model was trained on, unless it is of a type whose config already says
        the product, or of Gemma 3. transformers 5.19.0 `convert_rope_params_to_dict` brings both
        spellings together; Phi-3 means longrope by yarn.
    """
    said = [keys.count(name) for name in LENGTHS if keys.has(name)]
    tokens: Any = min(said) if said else USUAL_LENGTH
    if keys.get("model_max_length"):
        tokens = keys.count("model_max_length")
    model_type = str(keys.get("model_type"))
    factor: Any = 1.0
    for place, rope in () if "gemma3" in model_type else _ropes(keys, kinds):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in ("su", "longrope", "llama3") or (kind == "yarn" and model_type == "phi3"):
            continue
        factor = rope.get("factor", factor) or 1.0
        if kind == "yarn":
            outer = keys.get("original_max_position_embeddings")
            tokens = outer or rope.get(
                "original_max_position_embeddings", keys.get("max_position_embeddings")
            )
        if not (_is_number(tokens) and _is_number(factor) and 0 < factor < LONGEST):
            raise InputError(f"{keys.place}: {place}", dict(rope), "a factor and whole lengths")
    return int(tokens * factor)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ropes(keys: Keys, kinds: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    place = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.get(place) or {}
    if not isinstance(rope, dict):
        raise keys.wrong(place, "an object")
    declared = {"layer_types"} & {*keys.defaults, *keys.names}
    if declared and any(kind in kinds for kind in rope):
        return [(place, each) for each in rope.values() if isinstance(each, dict)]
    return [(place, rope)]


def _dtype(config: Mapping[str, object], place: str) -> str:
    """Find the dtype of what is not quantised; bf16 where the config is silent."""
    named = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    dtype = DTYPES.get(str(named))
    if dtype is None:
        raise InputError(f"{place}: torch_dtype", named, "one of " + ", ".join(DTYPES))
    return dtype


def _quantization(keys: Keys, dtype: str, moe: MoeSpec | None, layers: int) -> Quantization:
    config = keys.values
    raw = config.get("quantization_config") or config.get("compression_config")
    if raw is None:
        return Quantization(weight_dtype=dtype)
    if not isinstance(raw, dict):
        raise InputError(f"{keys.place}: quantization_config", raw, "an object")
    return quantization(
        raw,
        num_layers=layers,
        num_dense_layers=moe.num_dense_layers if moe else layers,
        place=keys.place,
    )
