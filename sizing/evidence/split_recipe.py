"""Settings of the split pools that a source served, by layout, load and users."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sizing.catalog import configs, model_family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sizing.evidence.row import Group, MeasuredRow

FILE = "validation/split_recipes.csv"
SOURCE = "inferencex"
"""Whose rows were measured with the recipes of the file."""
ROLES = ("prefill", "decode")
LAYOUT = ("replicas", "gpus", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """
    Settings of one attention rank of a pool; `None`: the engine's default.

    Attributes:
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: sequences of a step.
        kv_tokens: tokens that its KV cache is limited to.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_tokens: int | None = None


Key = tuple[str | int, ...]
"""Engine, GPU, family of the model, dtype of weights, lengths, users, layout of both pools."""
SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "kv_tokens")


def pool_settings(row: MeasuredRow) -> Mapping[str, PoolSettings]:
    """Return the settings of both pools by role; empty: no recipe is known for such a row."""
    if row.source != SOURCE or len(row.groups) == 1 or row.load != "closed":
        return {}
    load = (row.engine.lower(), row.gpu, model_family(row.model), row.weight_dtype)
    layout = tuple(number for group in row.groups for number in _layout(group))
    key: Key = (*load, row.isl, row.osl, int(row.amount), *layout)
    return _recipes().get(key, {})


def _layout(group: Group) -> tuple[int, int, int]:
    return group.replicas, group.slicing.gpus, group.slicing.dp


@cache
def _recipes() -> dict[Key, dict[str, PoolSettings]]:
    with (configs() / FILE).open(encoding="utf-8", newline="") as file:
        return dict(_entries(csv.DictReader(file)))


def _entries(
    lines: csv.DictReader[str],
) -> Iterator[tuple[Key, dict[str, PoolSettings]]]:
    """Read the recipes, each once for every number of users that it was run with."""
    for line in lines:
        load = (line["engine"], line["gpu"], model_family(line["model"]), line["weight_dtype"])
        lengths = int(line["isl"]), int(line["osl"])
        layout = tuple(int(line[f"{role}_{name}"]) for role in ROLES for name in LAYOUT)
        found = {role: _settings(line, role) for role in ROLES}
        for users in line["users"].split():
            yield (*load, *lengths, int(users), *layout), found


def _settings(line: Mapping[str, str], role: str) -> PoolSettings:
    cells = {name: line.get(f"{role}_{name}") for name in SETTINGS}
    return PoolSettings(**{name: int(cell) for name, cell in cells.items() if cell})
