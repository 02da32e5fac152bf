"""The `quantization_config` of a checkpoint: dtype and scales of its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.model import Dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4"}
BITS_METHODS = ("gptq", "awq")
NAMED_FORMATS = {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "fp4", "MXFP4": "fp4"}
BITS = {"4": "int4", "8": "int8"}
KV_KEYS = {
    "modelopt": ("kv_cache_scheme", "kv_cache_quant_algo"),
    "compressed-tensors": ("kv_cache_scheme",),
}
"""Keys with the dtype of cached keys and values; of other methods vLLM reads none."""

COMPRESSED = {"float 8": "fp8", "float 4": "fp4", "int 8": "int8", "int 4": "int4"}

SILENT = re.compile(
    r"quant_method|producer|fmt|scale_fmt|activation_.*|dequantize|store_dtype|quantization_status"
    r"|.*version|format|checkpoint_format|global_compression_ratio|zero_point|has_zero_point|sym"
    r"|desc_act|damp.*|true_sequential|static_groups|pack_dtype|meta|backend|use_.*|.*exllama.*"
    r"|model_.*|dataset|tokenizer|batch_size|block_name_to_quantize|iters|n?samples|seqlen|lr"
    r"|module_name_preceding_first_block|cache_block_outputs|max_input_length|pad_token_id"
    r"|is_marlin_format|do_fuse|fuse_max_seq_len|modules_to_fuse|pre_quant_scale|quantizer"
    r"|autoround_.*|data_type|.*minmax.*|enable_.*|gradient_.*|low_.*_usage|not_use_.*|scale_dtype"
    r"|train_bs|packing_format|mse|hyb_act|act_group_aware|awq_block_size|smoothquant_.*"
)
"""Keys that say how weights were made, stored or multiplied: neither which they are nor of what."""

READ = {
    "bits", "w_bit", "group_size", "q_group_size", "weight_block_size", "quant_algo", "dynamic",
    "config_groups", "kv_cache_scheme", "kv_cache_quant_algo", "ignored_layers",
    "modules_to_not_convert", "ignore", "exclude_modules",
}  # fmt: skip

ROWS = -1
"""Group size of weights whose rows have a scale each."""

MX_GROUP = 32
"""Values that share a scale in the OCP microscaling formats."""

NEVER_QUANTISED = re.compile(
    r"lm_head|embed|norm|router|vision|visual|projector|multi_modal|score_correction"
    r"|indexer|conv1d|in_proj_(ba?|a)$"
    r"|(^|[.*])mtp|nextn|(^|[*.])(shared_expert_)?gate(\.|$)|\.gate\*"
)
"""Modules whose absence from the quantised ones is what the sizer assumes anyway."""

SHARED = re.compile(r"shared_expert")
DENSE = re.compile(r"mlp\.\(?(gate|up|gate_up|down)(_proj|\b)(?!.*experts)")
FEEDFORWARD = re.compile(r"layers?\.\d+(\*|\.\*|\.mlp(\*|\.\*|\.(gate|up|down|gate_up)_proj)?)?$")
"""A whole layer, its feed-forward, or a part of that."""

WHOLE = re.compile(r"^[\w.*-]*attn[.*]*$")
"""All of attention, of one layer or of all."""

PROJECTIONS = (
    {"q_proj", "k_proj", "v_proj", "o_proj"},
    {"qkv_proj", "o_proj"},
    {"in_proj_qkvz", "out_proj"},
    {"in_proj_qkv", "in_proj_z", "out_proj"},
    {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
)
"""Projections that are all of attention."""

NUMBERED = re.compile(r"layers?\.\d+\.")
"""Modules of one layer only, which no flag of a whole model can express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """
    Dtype of the quantised weights, and which parts beside routed experts are among them.

    Attributes:
        group: weights that share a scale, of blocks of fp8 one side; 0: as usual for the dtype.
        method: as the config names it.
        blocks: fp8 weights have a scale per block, and activations are scaled when they are
            multiplied; `None`: no fp8 weights.
        kv_dtype: dtype of cached keys and values; `None`: as activations.
    """

    weight_dtype: str
    group: int = 0
    method: str = ""
    attention: bool = True
    dense: bool = True
    shared: bool = True
    blocks: bool | None = None
    kv_dtype: Dtype | None = None


def quantization(
    raw: Mapping[str, object], *, num_layers: int, num_dense_layers: int, place: str
) -> Quantization:
    """
    Read a `quantization_config`.

    Args:
        num_layers: layers of the model; those beyond predict further tokens and are left out.
        num_dense_layers: first layers of those, with a dense feed-forward.

    Raises:
        InputError: a method, a format or an exception from it that the sizer cannot express.
    """
    place = f"{place}: quantization_config"
    names = [name for name in _left_out(raw, place) if _layer(name) < num_layers]
    names = [name for name in names if not NEVER_QUANTISED.search(name)]
    attention = [name for name in names if "attn" in name]
    others = [name for name in names if "attn" not in name]
    partly = [name for name in attention if not WHOLE.search(name)]
    parts = {_layer(name) for name in attention if name not in partly}
    for layer in {_layer(name) for name in partly}:
        found = {name.rsplit(".", 1)[-1] for name in partly if _layer(name) == layer}
        parts |= {layer for projections in PROJECTIONS if projections <= found}
    if attention and not ({-1} <= parts or set(range(num_layers)) <= parts):
        raise InputError(
            f"{place}: modules left out", attention[0], "all of attention, in every layer or none"
        )
    shared = [name for name in others if SHARED.search(name)]
    dense = [name for name in others if DENSE.search(name) and not NUMBERED.search(name)]
    first = [name for name in others if FEEDFORWARD.search(name) and _layer(name) >= 0]
    if {_layer(name) for name in first} == set(range(num_dense_layers)):
        dense += first
    unknown = [name for name in others if name not in (*shared, *dense)]
    if unknown:
        raise InputError(
            f"{place}: modules left out",
            unknown[0],
            "attention, dense feed-forwards, shared experts, embeddings, head, routers, norms and "
            "towers only",
        )
    dtype = _weight_dtype(raw, place)
    # `fp8` in transformers is that of DeepSeek-V3, blocks of 128 x 128, unless its scales of
    # activations are static; ModelOpt and compressed-tensors scale tensors or rows, or say blocks.
    block = _block(raw, place)
    whole = raw.get("quant_method") == "fp8" and raw.get("activation_scheme") != "static"
    blocks = whole or block > 0
    return Quantization(
        weight_dtype=dtype,
        group=block or _group(raw, place),
        method=str(raw.get("quant_method", "modelopt")),
        blocks=blocks if dtype == "fp8" else None,
        attention=not attention,
        dense=not dense,
        shared=not shared,
        kv_dtype=_kv_dtype(raw, place),
    )


def _left_out(raw: Mapping[str, object], place: str) -> list[str]:
    """
    Return the modules that are not quantised.

    Source:
        vLLM 0.29.0 `from_config`: `ignored_layers` comes first (fp8.py); negative patterns of
        GPTQ's `dynamic` skip modules (gptq_utils.py, `get_dynamic_override`).
    """
    for key, value in raw.items():
        empty = value is None or value is False or value in ("", [], {})
        empty |= isinstance(value, dict) and value.get("format") == "dense"  # sparsity_config
        if not (key in READ or SILENT.fullmatch(key) or empty):
            raise InputError(f"{place}.{key}", value, "no such key: what it does is unknown")
    groups = raw.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        if targets not in (None, ["Linear"]):
            raise InputError(f"{place}.config_groups: targets", targets, '["Linear"]: all layers')
    keys = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
    skipped = next(filter(None, map(raw.get, keys)), [])
    if not isinstance(skipped, list):
        raise InputError(f"{place}: modules left out", skipped, "a list of names")
    names, dynamic = list(map(str, skipped)), raw.get("dynamic") or {}
    for pattern, other in dynamic.items() if isinstance(dynamic, dict) else [(dynamic, True)]:
        if other or not isinstance(pattern, str):
            raise InputError(f"{place}.dynamic", pattern, "patterns of modules left out only, -:")
        names += [pattern.removeprefix("-:")] * pattern.startswith("-:")
    return [_plain(name) for name in names]


def _plain(name: str) -> str:
    """Return a name without the marks of a regular expression that say no more than a glob."""
    bare = name.removeprefix("re:").removeprefix("^").removesuffix("$")
    bare = re.sub(r"\.[*+]|\\d[*+]?|\[0-9\][*+]?", "*", bare)
    return bare.replace("\\.", ".")


def _weight_dtype(raw: Mapping[str, object], place: str) -> str:
    producer = raw.get("producer")
    made_by = producer.get("name") if isinstance(producer, dict) else None
    method = str(raw.get("quant_method", made_by))
    if method in FLOAT_METHODS:
        return FLOAT_METHODS[method]
    if method in BITS_METHODS:
        bits = raw.get("bits", raw.get("w_bit"))
        return _known(BITS, bits, f"{place}.bits")
    if method == "modelopt":
        return _known(NAMED_FORMATS, raw.get("quant_algo"), f"{place}.quant_algo")
    if method == "compressed-tensors":
        return _compressed(raw, place)
    known = sorted([*FLOAT_METHODS, *BITS_METHODS, "modelopt", "compressed-tensors"])
    raise InputError(f"{place}.quant_method", raw.get("quant_method"), "one of " + ", ".join(known))


def _kv_dtype(raw: Mapping[str, object], place: str) -> Dtype | None:
    """
    Find the dtype that cached keys and values get unless a user says otherwise.

    Source:
        vLLM 0.29.0 `get_kv_cache_quant_algo_string` (utils/torch_utils.py) for ModelOpt;
        attention/attention.py and `validate_kv_cache_scheme` (compressed_tensors.py).
    """
    method = str(raw.get("quant_method", "modelopt"))
    key = next((key for key in KV_KEYS.get(method, ()) if raw.get(key)), None)
    if key is None:
        return None
    scheme: object = raw[key]
    if isinstance(scheme, dict):
        static = method != "modelopt" or scheme.get("dynamic") is False
        scaled = method == "modelopt" or (
            scheme.get("strategy") in ("tensor", "attn_head") and scheme.get("symmetric") is True
        )
        fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) and static and scaled
    else:
        fp8 = method == "modelopt" and str(scheme).upper() == "FP8"
    if not fp8:
        raise InputError(f"{place}.{key}", scheme, "FP8 (8 bits, float), one scale a tensor")
    return "fp8"


def _group(raw: Mapping[str, object], place: str) -> int:
    """
    Return how many weights share a scale; 0 where the config does not say, or says whole rows.

    Source:
        vLLM 0.29.0 `from_config`: AWQ takes the first of its two keys that is there
        (auto_awq.py), GPTQ demands its only one (auto_gptq.py).
    """
    method = raw.get("quant_method")
    if method == "mxfp4":
        return MX_GROUP
    stated = "q_group_size" if method == "awq" and "q_group_size" in raw else "group_size"
    found = [raw.get(stated), *(each.get("group_size") for each in _weights(raw))]
    groups = {0}
    for size in found[:1] if method in BITS_METHODS else filter(None, found):
        if not isinstance(size, int) or isinstance(size, bool) or not (size > 0 or size == ROWS):
            expected = f"a whole number above 0, or {ROWS}: whole rows"
            raise InputError(f"{place}.{stated}", size, expected)
        groups.add(size)
    return max(groups)


def _block(raw: Mapping[str, object], place: str) -> int:
    """Return one side of the blocks of weights that share a scale; 0: there are none."""
    stated = [
        raw.get("weight_block_size"),
        *(each.get("block_structure") for each in _weights(raw)),
    ]
    for block in filter(None, stated):
        if not (isinstance(block, list) and len(block) == 2 and block[0] == block[1]):  # noqa: PLR2004
            raise InputError(f"{place}: blocks of weights", block, "two equal numbers, [128, 128]")
        side = block[0]
        if not isinstance(side, int) or side < 1:
            raise InputError(f"{place}: blocks of weights", block, "whole numbers above 0")
        return side
    return 0


def _known(table: Mapping[str, str], value: object, place: str) -> str:
    found = table.get(str(value))
    if found is None:
        raise InputError(place, value, "one of " + ", ".join(table))
    return found


def _compressed(raw: Mapping[str, object], place: str) -> str:
    """Find the one format of all groups of a compressed-tensors config."""
    groups, weights = raw.get("config_groups"), _weights(raw)
    found = {f"{each.get('type', 'int')} {each.get('num_bits')}" for each in weights}
    scaled = {str([each.get(key) for key in ("group_size", "block_structure")]) for each in weights}
    if len(found) != 1 or len(scaled) != 1:
        raise InputError(
            f"{place}.config_groups", sorted(found) or groups,
            "one format and one size of groups for all weights",
        )  # fmt: skip
    return _known(COMPRESSED, found.pop(), f"{place}.config_groups")


def _weights(raw: Mapping[str, object]) -> list[dict[str, object]]:
    groups = raw.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    found = (group.get("weights") for group in each if isinstance(group, dict))
    return [weights for weights in found if isinstance(weights, dict)]


def _layer(name: str) -> int:
    """Return the number of the layer that a module belongs to; -1 where it names none."""
    found = re.search(r"layers?\.(\d+)", name)
    return int(found[1]) if found else -1
