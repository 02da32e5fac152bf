"""Every key of a scenario with type, unit, default and limits, read off the dataclasses."""

from __future__ import annotations

import types
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from minicluster.specs.checks import attribute_docs
from minicluster.specs.scenario import LIMITS, ScenarioSpec
from minicluster.specs.workload import Lengths

UNITS = (
    ("_usd_per_gpu_hour", "US dollars per GPU and hour"),
    ("_usd_per_hour", "US dollars per hour"),
    ("_usd_per_kwh", "US dollars per kWh"),
    ("_power_w", "watts"),
    ("_w_per_gpu", "watts per GPU"),
    ("requests_per_s", "requests per second"),
    ("_per_s", "per second"),
    ("_tokens", "tokens"),
    *((name, "tokens") for name in ("mean", "low", "high", "median")),
    ("_fraction", "share, 0 to 1"),
    ("_s", "seconds"),
    ("_bytes", "bytes"),
    ("_utilization", "share, 0 to 1"),
    ("max_num_seqs", "sequences"),
    ("block_size", "tokens"),
    ("max_gpus", "GPUs"),
    ("gpus_per_node", "GPUs"),
)
"""Units by how a name ends: names carry their unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioKey:
    """
    One key of a scenario file.

    Attributes:
        key: dotted key, its table first.
        unit: unit; "" for names and lists.
        default: value where the file does not have the key.
        minimum, maximum: least and largest value accepted; `None`: no limit.
    """

    key: str
    type: str
    unit: str
    required: bool
    default: object
    minimum: float | None
    maximum: float | None
    meaning: str


def scenario_keys() -> tuple[ScenarioKey, ...]:
    """List every key of a scenario, table by table, in the order of the dataclasses."""
    return tuple(_keys(ScenarioSpec, ""))


def _keys(cls: type, prefix: str) -> list[ScenarioKey]:
    hints, meanings = get_type_hints(cls), attribute_docs(cls)
    keys = []
    for spec in fields(cls):
        key, hint = prefix + spec.name, hints[spec.name]
        if is_dataclass(hint) and isinstance(hint, type) and hint is not Lengths:
            keys += _keys(hint, f"{key}.")
            continue
        whole = key.replace("workload.classes.slo.", "slo.").replace(".classes.", ".")
        low, high = LIMITS.get(whole) or LIMITS.get(f"{whole}.max_tokens") or (None, None)
        choices = spec.metadata.get("choices")
        keys.append(
            ScenarioKey(
                key=key,
                type=_type_name(hint),
                unit=next((text for end, text in UNITS if spec.name.endswith(end)), ""),
                required=spec.default is MISSING and spec.default_factory is MISSING,
                default=_default(spec),
                minimum=low,
                maximum=high,
                meaning=meanings.get(spec.name, "")
                + (f" One of {', '.join(choices)}." if choices else ""),
            )
        )
        inner = Lengths if hint in {Lengths, Lengths | None} else _table_of_list(hint)
        keys += _keys(inner, f"{key}.") if inner else []
    return keys


def _table_of_list(hint: object) -> type | None:
    of = get_args(hint)[0] if get_origin(hint) is tuple else None
    return of if isinstance(of, type) and is_dataclass(of) else None


def _default(spec: Field[Any]) -> object:
    if spec.default is not MISSING:
        return spec.default
    return None if spec.default_factory is MISSING else spec.default_factory()


def _type_name(hint: object) -> str:
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(_type_name(part) for part in get_args(hint) if part is not type(None))
    if hint is Lengths:
        return "integer or table"
    if get_origin(hint) is dict:
        return f"table of {_type_name(get_args(hint)[1])}"
    if _table_of_list(hint):
        return "list of tables"
    if get_args(hint):
        return f"list of {_type_name(get_args(hint)[0])}"
    names = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return names[hint] if isinstance(hint, type) else str(hint)
