"""What a checkpoint's `quantization_config` does to its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4"}
BITS_METHODS = ("gptq", "awq")
NAMED_FORMATS = {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "fp4", "MXFP4": "fp4"}
NUMBERS = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}

NEVER_QUANTISED = re.compile(
    r"lm_head|embed|norm|router|vision|visual|projector|(^|\.)(shared_expert_)?gate(\.|\*|$)"
)
"""Modules whose absence from the quantised ones is what the sizer assumes anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Dtype of the quantised weights, and whether attention is among them."""

    weight_dtype: str
    attention: bool


def quantization(raw: Mapping[str, object], *, place: str) -> Quantization:
    """
    Read a `quantization_config`.

    Raises:
        InputError: a method, a format or an exception from it that the sizer cannot express.

    """
    place = f"{place}: quantization_config"
    return Quantization(
        weight_dtype=_weight_dtype(raw, place), attention=_attention_quantised(raw, place)
    )


def _weight_dtype(raw: Mapping[str, object], place: str) -> str:
    """Find the dtype of the quantised weights."""
    producer = raw.get("producer")
    made_by = producer.get("name") if isinstance(producer, dict) else None
    method = raw.get("quant_method", made_by)
    if method in FLOAT_METHODS:
        return FLOAT_METHODS[str(method)]
    if method in BITS_METHODS:
        bits = raw.get("bits", raw.get("w_bit"))
        if ("int", bits) in NUMBERS:
            return NUMBERS["int", int(str(bits))]
        raise InputError(f"{place}.bits", bits, "4 or 8")
    if method == "modelopt":
        algorithm = raw.get("quant_algo")
        if algorithm in NAMED_FORMATS:
            return NAMED_FORMATS[str(algorithm)]
        raise InputError(f"{place}.quant_algo", algorithm, "one of " + ", ".join(NAMED_FORMATS))
    if method == "compressed-tensors":
        return _compressed(raw, place)
    known = sorted([*FLOAT_METHODS, *BITS_METHODS, "modelopt", "compressed-tensors"])
    raise InputError(f"{place}.quant_method", method, "one of " + ", ".join(known))


def _compressed(raw: Mapping[str, object], place: str) -> str:
    """Find the one dtype of all groups of a compressed-tensors config."""
    groups = raw.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found.add((str(weights.get("type", "int")), weights.get("num_bits")))
    known = [NUMBERS[key] for key in NUMBERS if {key} == found]
    if not known:
        raise InputError(
            f"{place}.config_groups", sorted(map(str, found)), "weights of one 4 or 8 bit format"
        )
    return known[0]


def _attention_quantised(raw: Mapping[str, object], place: str) -> bool:
    """Say whether attention is quantised, refusing exceptions that cannot be expressed."""
    skipped = raw.get("modules_to_not_convert") or raw.get("ignore") or raw.get("exclude_modules")
    if not isinstance(skipped, list | None):
        raise InputError(f"{place}: modules left out", skipped, "a list of names")
    names = [str(name) for name in skipped or []]
    attention = [name for name in names if "attn" in name]
    others = [name for name in names if "attn" not in name and not NEVER_QUANTISED.search(name)]
    if others:
        raise InputError(
            f"{place}: modules left out",
            others[0],
            "attention, embeddings, head, routers, norms and towers only",
        )
    return not attention
