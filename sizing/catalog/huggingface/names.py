"""Hub ids of repackaged models: the original model, and the dtype it is quantised to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_WORDS = {
    "fp8": "fp8",
    "int8": "int8",
    "w8a8": "int8",
    "w8a16": "int8",
    "8bit": "int8",
    "int4": "int4",
    "w4a16": "int4",
    "4bit": "int4",
    "awq": "int4",
    "gptq": "int4",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "bf16": "bf16",
    "fp16": "fp16",
}
"""Words of hub ids that name the dtype of the weights."""

WORDS = {
    "instruct", "chat", "base", "hf", "it", "thinking", "dynamic", "static", "tensor", "pertensor",
    "channel", "block", "quantized", "bnb", "unsloth", "gguf", "marlin", "kv", "preview",
    "original", "turbo",
}  # fmt: skip
"""Words that change neither shapes nor dtype: how a model was tuned, packed or scaled."""

VENDORS = ("meta-", "nvidia-", "zai-")


class Repackaged(NamedTuple):
    """The catalog entry behind a hub id, and the dtype of its weights where the id names one."""

    key: str
    weight_dtype: str | None


def repackaged(name: str, known: Mapping[str, str]) -> Repackaged | None:
    """
    Find the model that a hub id repackages.

    Args:
        name: hub id of any organisation, or a name alone.
        known: hub ids and names of the catalog, each with the key of its entry.

    Returns:
        The entry and dtype; `None` if no entry's name is left when the words for tuning, packing
        and dtype are taken off both. Sizes and versions have to agree: Mistral-7B-v0.3 is not
        v0.1.

    Ignores:
        Which parts a quantiser left alone: those of the entry are taken. Words that name two
        dtypes: the last one counts.
    """
    words = _words(name)
    dtypes = [DTYPE_WORDS[word] for word in words if word in DTYPE_WORDS]
    wanted = _stem(words)
    for each, key in known.items():
        if wanted and _stem(_words(each)) == wanted:
            return Repackaged(key=key, weight_dtype=dtypes[-1] if dtypes else None)
    return None


def _words(name: str) -> list[str]:
    bare = name.rpartition("/")[2].lower()
    for vendor in VENDORS:
        bare = bare.removeprefix(vendor)
    return [word for word in re.split(r"[-_]|(?<=[a-z\d])\.(?=[a-z])", bare) if word]


def _stem(words: list[str]) -> tuple[str, ...]:
    """Take off the words that change no shape; group sizes and `per` belong to a dtype."""
    packed = any(word in DTYPE_WORDS or word in WORDS for word in words)
    return tuple(
        word
        for word in words
        if word not in DTYPE_WORDS
        and word not in WORDS
        and not (packed and (word == "per" or re.fullmatch(r"g\d+|gs\d+|128g", word)))
    )
