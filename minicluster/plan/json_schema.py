"""The JSON Schema of a plan's file, made of the same dataclasses that it is read by."""

from __future__ import annotations

from typing import Any

from minicluster.config import json_schema
from minicluster.plan.document import (
    DERIVED,
    KEPT_AT_TOP,
    KEPT_OF_CALIBRATION,
    SCHEMA_VERSION,
    Plan,
)
from minicluster.plan.prediction import CalibrationNote, Cost

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def plan_schema() -> dict[str, Any]:
    """
    Return the JSON Schema of plan.json: its fields and their types, and no field beside them.

    Ignores:
        Limits of numbers, and fields that have to agree; `read_plan` checks them, too.
    """
    schema = json_schema(Plan)
    definitions = schema["$defs"]
    for cls in (Cost, CalibrationNote):
        own = json_schema(cls)
        definitions |= own.pop("$defs", {})
        definitions[cls.__name__] = own
    model = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    schema["properties"] |= {
        "schema_version": {"const": SCHEMA_VERSION},
        "model": model,
        "cost": {"$ref": "#/$defs/Cost"},
        "calibration": {"$ref": "#/$defs/CalibrationNote"},
    }
    schema["required"] += ["schema_version", *DERIVED]
    for top, inside in KEPT_AT_TOP.items():
        _move(schema, top, inside)
    for inside in KEPT_OF_CALIBRATION.values():
        _taken(schema, f"inputs.{inside}", optional=True)
    return {"$schema": DIALECT, **schema, "title": "A plan of `sizing plan -o`"}


def _move(schema: dict[str, Any], top: str, inside: str) -> None:
    """Move a field out of the inputs, to where the file says it."""
    moved = _taken(schema, f"inputs.{inside}")
    *tables, name = top.split(".")
    table = _table(schema, schema, tables)
    if name not in table["properties"]:
        table["properties"][name] = moved
        table.setdefault("required", []).append(name)


def _taken(schema: dict[str, Any], path: str, *, optional: bool = False) -> dict[str, Any]:
    """Take a field out of its table; one that is *optional* may still be there."""
    *tables, name = path.split(".")
    table = _table(schema, schema, tables)
    if name in table.get("required", ()):
        table["required"].remove(name)
    field: dict[str, Any] = table["properties"][name]
    if not optional:
        del table["properties"][name]
    return field


def _table(schema: dict[str, Any], table: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the schema of the table that names lead to, a number for any place of a list."""
    for name in names:
        inner = table["items"] if name.isdigit() else table["properties"][name]
        choices = [inner, *inner.get("anyOf", ())]
        table = next((each for each in choices if {"$ref", "items"} & each.keys()), inner)
        if "$ref" in table:
            table = schema["$defs"][table["$ref"].rpartition("/")[2]]
    return table
