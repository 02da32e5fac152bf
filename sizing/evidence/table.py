"""The CSV of measured rows: one entry a line, readable or refused."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from sizing.evidence.row import REQUIRED, SECONDS, MeasuredRow, row_from

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A line that is no usable row."""

    id: str
    source: str
    reason: str


def read_rows(path: Path) -> tuple[MeasuredRow | RefusedRow, ...]:
    """
    Read measured rows, every line of the file in order.

    Args:
        path: CSV with the columns of the measurement schema (docs/validation.md).

    Returns:
        A row per line, or why the line is none.

    Raises:
        InputError: no such file, not text, no line, a column missing that every row needs, or
            one in another unit.

    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            _check(reader.fieldnames or (), path)
            entries = tuple(_entry(cells, f"{path}:{reader.line_num}") for cells in reader)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a CSV of measured rows") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), str(error), "a CSV of measured rows in UTF-8") from None
    if not entries:
        raise InputError(str(path), "a header alone", "a line for each measurement")
    return entries


def _check(columns: Sequence[str], path: Path) -> None:
    """Refuse a table without a column that every row needs, or with one in another unit."""
    for name in REQUIRED:
        if name not in columns:
            raise InputError(f"{path}: {name}", None, "a column of that name")
    for name in SECONDS:
        for column in columns:
            if name not in columns and column.rpartition("_")[0] == name.rpartition("_")[0]:
                raise InputError(f"{path}: column", column, f"{name}: this schema knows seconds")


def _entry(raw: dict[str | None, object], place: str) -> MeasuredRow | RefusedRow:
    """Read one line; a short one has empty cells, a long one is refused."""
    cells = {key: str(value or "").strip() for key, value in raw.items() if key is not None}
    try:
        return row_from(cells, place, surplus=raw.get(None))
    except InputError as error:
        return RefusedRow(id=cells["id"], source=cells.get("source", ""), reason=str(error))
