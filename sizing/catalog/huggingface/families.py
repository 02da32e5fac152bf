"""Known values of `model_type`, what each implies, and which keys of a config shape nothing."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sizing.catalog import folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one `model_type` names; `configs/huggingface/families.toml` has the meanings."""

    library: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    fixed: dict[str, object] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    gated_mlp: bool = True
    experts: bool = False
    expert_ffn: str = "moe_intermediate_size"
    dense_ffn: str = "intermediate_size"
    shared_ffn: str = "shared_expert_intermediate_size"
    latent_attention: bool = False
    linear: str = ""
    layers: str = ""
    position_rows: int | None = None
    query_norm: str = ""
    fp8_blocks: bool = False
    defaults: dict[str, object] = field(default_factory=dict)


class Library(NamedTuple):
    """What the library says of a model_type: other names of keys, defaults, classes of models."""

    renamed: Mapping[str, str]
    defaults: Mapping[str, object]
    architectures: tuple[str, ...]


def families() -> dict[str, Family]:
    """Return the families by their `model_type`."""
    return _families(_home() / "families.toml")


def refused() -> dict[str, str]:
    """Return why families that are known cannot be sized, by their `model_type`."""
    return dict(_read(_home() / "families.toml")["refused"])


def library(model_type: str) -> Library:
    """Return what transformers' configuration class of a family of ours says."""
    rows = _read(_home() / "library.json")["families"]
    return Library(**rows[families()[model_type].library or model_type])


def shapes_nothing(key: str) -> bool:
    """Say whether a key changes neither parameters, nor work, nor cache of a language model."""
    return harmless(key) or key in _read(_home() / "library.json")["generation"]


def harmless(key: str) -> bool:
    """Say whether a key is one of `configs/huggingface/harmless.toml`."""
    return _patterns(_home() / "harmless.toml").fullmatch(key) is not None


def _home() -> Path:
    return folder.configs() / "huggingface"


@cache
def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)


@cache
def _families(path: Path) -> dict[str, Family]:
    return {name: Family(**row) for name, row in _read(path)["families"].items()}


@cache
def _patterns(path: Path) -> re.Pattern[str]:
    return re.compile("|".join(name for table in _read(path).values() for name in table["names"]))
