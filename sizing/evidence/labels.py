"""Labels of measured rows: which are mended, and which are left out of errors and intervals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.files import read_table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COLUMNS = ("id", "kind", "evidence")
LAYOUT, DUPLICATE, AMBIGUOUS = "layout", "duplicate within file", "ambiguous label"
WIDTH = re.compile(r"\b(gpus|tp|pp|ep|dp)=(\d+)\b")
OTHER = re.compile(r"\btrain:(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLabel:
    """
    What is known of one row beyond its columns.

    Attributes:
        cells: that replace those of the row (kind `layout`).
        copies: ids of rows with the same measurement (kind `duplicate within file`).
        excluded: why the row is not scored (kind `ambiguous label`); empty: it is.
    """

    cells: dict[str, str]
    copies: frozenset[str] = frozenset()
    excluded: str = ""


def read_labels(path: Path) -> dict[str, RowLabel]:
    """
    Read the labels of rows, by id; a row may have several.

    Args:
        path: CSV with the columns id, kind and evidence. Evidence of a `layout` names the right
            widths (`is gpus=2 tp=2 ep=2: ...`), of a `duplicate within file` the other row
            (`train:ID`).

    Raises:
        InputError: no such file, a missing column, an unknown kind, or evidence that names nothing.
    """
    found: dict[str, RowLabel] = {}
    for place, line in read_table(path, "a CSV of labels", COLUMNS):
        label = _label(line, place)
        known = found.get(line["id"], RowLabel(cells={}))
        found[line["id"]] = RowLabel(
            cells={**known.cells, **label.cells},
            copies=known.copies | label.copies,
            excluded=known.excluded or label.excluded,
        )
    return found


def _label(line: Mapping[str, str], place: str) -> RowLabel:
    kind, evidence = line["kind"], line["evidence"] or ""
    if kind == AMBIGUOUS:
        return RowLabel(cells={}, excluded=AMBIGUOUS)
    if kind == DUPLICATE and (copies := OTHER.findall(evidence)):
        return RowLabel(cells={}, copies=frozenset(copies))
    if kind == LAYOUT and (cells := dict(WIDTH.findall(evidence))):
        return RowLabel(cells=cells)
    if kind in (LAYOUT, DUPLICATE):
        expected = "widths, such as tp=8 ep=8" if kind == LAYOUT else "the other row, as train:ID"
        raise InputError(f"{place}: evidence", evidence or None, expected)
    expected = f"one of {LAYOUT}, {DUPLICATE}, {AMBIGUOUS}"
    raise InputError(f"{place}: kind", kind or None, expected)
