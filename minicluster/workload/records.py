"""Records of a file that others wrote: JSON lines, JSON documents and CSV."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError
from minicluster.files import SURPLUS, read_table, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BETWEEN = re.compile(r"[\s,\[\]]*")  # what may stand between the objects of a list, or of lines
OTLP_SCALARS = {"intValue", "doubleValue", "stringValue", "boolValue",
                "int_value", "double_value", "string_value", "bool_value"}  # fmt: skip
LISTS = {"resourceSpans", "resource_spans", "scopeSpans", "scope_spans",
         "instrumentationLibrarySpans", "spans", "data"}  # fmt: skip
"""Keys of lists of records: of OTLP as JSON in both spellings, of Jaeger, of paged answers."""


def begins_as_json(text: str) -> bool:
    """Say whether a text is JSON, and no table."""
    return text.lstrip()[:1] in {"{", "["}


def read_records(path: Path, expectation: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Yield the records of a file, each with file and line; those in `LISTS` of a document, too.

    The file holds JSON objects, one a line, in a list, or after one another; or CSV with a header.

    Raises InputError: no objects, a list that is cut off, or a line of another length than the
    header's.
    """
    text = read_text(path, expectation)
    documents = _objects(path, text) if begins_as_json(text) else _table(path, text, expectation)
    for place, document in documents:
        try:
            for record in _unnested(document):
                yield place, record
        except (TypeError, AttributeError, RecursionError):
            raise InputError(place, str(document)[:80], expectation) from None


def _objects(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder, expected = json.JSONDecoder(), "JSON objects, one a line or a list of them"
    line, end = 1, 0
    while True:
        between = BETWEEN.match(text, end)
        at = between.end() if between else end
        line += text.count("\n", end, at)
        place = f"{path}:{line}"
        if at == len(text):
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise InputError(place, getattr(error, "msg", str(error)), expected) from None
        if not isinstance(value, dict):
            raise InputError(place, text[at:end][:80], expected)
        yield place, value
        line += text.count("\n", at, end)
    if text.lstrip().startswith("[") and not text.rstrip().endswith("]"):
        raise InputError(place, Fault("is a list that is cut off"), f"{expected}, whole")


def _table(path: Path, text: str, expectation: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not text.strip():
        raise InputError(f"{path}:1", Fault("is an empty file"), expectation)
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    for place, cells in read_table(path, expectation, (), delimiter):
        if SURPLUS in cells or None in cells.values():
            fault = Fault("has other cells than the header")
            raise InputError(place, fault, f"one for each of {', '.join(cells)[:80]}")
        yield place, {name.strip(): cell for name, cell in cells.items()}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401  (JSON)
    """
    Yield what a record holds by dotted keys, attributes of OTLP likewise.

    A list is one value; the records in it stand below `key[]`.
    """
    if isinstance(value, list) and value and all(_is_attribute(item) for item in value):
        value = {item["key"]: item["value"] for item in value}
    if isinstance(value, dict) and len(value) == 1 and OTLP_SCALARS & value.keys():
        (value,) = value.values()
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else key)
        return
    yield path, value
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from flat(item, f"{path}[]")


def _unnested(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    key = next((key for key in LISTS & record.keys() if isinstance(record[key], list)), None)
    if key is None:
        if "resourceSpans" in record or not isinstance(record.get("attributes", {}), list | dict):
            raise TypeError(record)
        yield record
        return
    for inner in record[key]:
        yield from _unnested(inner)


def _is_attribute(value: object) -> bool:
    return isinstance(value, dict) and {"key", "value"} <= value.keys()
