"""Requests from a file: public traces of arrivals, and the load test's own schedule."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minicluster.errors import InputError
from minicluster.workload.arrivals import CONTENT_TOKENS, Arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

MS = 1e-3
FORMATS = (
    "an Azure LLM trace (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT"
    " (Timestamp,Model,Request tokens,Response tokens,…), Mooncake (JSON lines with timestamp,"
    " input_length, output_length) or a schedule.jsonl of `loadtest run`"
)
MAX_TOKENS = 100_000_000
"""Largest length of a prompt or an answer; a larger number in a trace is a mistake."""
MAX_SESSIONS = 1 << 31
"""Bound of the numbers of conversations; a larger one is a mistake."""
SKIP = "--skip-unanswered leaves such requests out"


class TraceRow(NamedTuple):
    """
    One line.

    Attributes:
        content: ids of the prompt's whole blocks.
        prefix_tokens: of the prompt, in the prefix cache.
        session: conversation; -1: none.
    """

    due_s: float
    input_tokens: int
    output_tokens: int
    content: tuple[int, ...] = ()
    prefix_tokens: int = 0
    session: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests of a file, the first at 0 seconds, and how many without an answer were left out."""

    arrivals: Arrivals
    skipped: int


def read_trace(path: Path, *, skip_unanswered: bool = False) -> Trace:
    """
    Read a trace in one of four formats, told apart by its first line.

    Args:
        skip_unanswered: leave out requests that generated nothing instead of refusing them.

    Raises:
        InputError: no such file, another format, nothing in it, or a line that is malformed, goes
            back in time, has a length of 0, or waits for another; the message names file and
            line.

    Source:
        Azure/AzurePublicDataset (2023 and 2024 LLM inference traces), kvcache-ai/Mooncake
        (FAST25 release), HPMLL/BurstGPT: their published headers.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(str(path), error.strerror, "a trace that can be read") from None
    except UnicodeDecodeError:
        raise InputError(str(path), "binary data", FORMATS) from None
    rows: list[TraceRow] = []
    skipped = 0
    for number, row in _rows(path, lines):
        place = f"{path}:{number}"
        if rows and row.due_s < rows[-1].due_s:
            latest = f"a time not before the line above, {rows[-1].due_s}"
            raise InputError(place, row.due_s, latest, "sort by time")
        if row.output_tokens == 0 and skip_unanswered:
            skipped += 1
            continue
        _check_lengths(place, row)
        rows.append(row)
    if not rows:
        raise InputError(str(path), "a trace without requests", "at least one request")
    return Trace(arrivals=arrivals_of(rows), skipped=skipped)


def arrivals_of(rows: Sequence[TraceRow]) -> Arrivals:
    """Return the arrivals of at least one row, in the order of time, the first at 0 seconds."""
    due, inputs, outputs, content, prefix, session = zip(*rows, strict=True)
    return Arrivals(
        due_s=np.array(due, dtype=np.float64) - due[0],
        input_tokens=np.array(inputs, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        content=content if any(content) else None,
        prefix_tokens=np.array(prefix, dtype=np.int64) if any(prefix) else None,
        session=np.array(session, dtype=np.int64) if max(session) >= 0 else None,
    )


def _check_lengths(place: str, row: TraceRow) -> None:
    lengths = {"prompt tokens": row.input_tokens, "generated tokens": row.output_tokens}
    for name, tokens in lengths.items():
        if not 1 <= tokens <= MAX_TOKENS:
            way_out = SKIP if row.output_tokens == 0 else None
            raise InputError(f"{place}: {name}", tokens, f"from 1 to {MAX_TOKENS:,}", way_out)


def _rows(path: Path, lines: list[str]) -> Iterator[tuple[int, TraceRow]]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        records: Iterable[tuple[int, Any]] = _json_lines(path, lines)
        parse: Callable[[Any], TraceRow] = _from_schedule if '"due_s"' in first else _from_mooncake
    else:
        reader = csv.DictReader(lines, skipinitialspace=True)
        records = ((reader.line_num, record) for record in reader)
        parse = _csv_format(path, first)
    for number, record in records:
        try:
            row = parse(record)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError(f"{path}:{number}", lines[number - 1][:80], FORMATS) from None
        except InputError as error:
            raise error.inside(f"{path}:{number}") from None
        if not isfinite(row.due_s):
            raise InputError(f"{path}:{number}", row.due_s, "a finite time")
        yield number, row


def _csv_format(path: Path, first: str) -> Callable[[dict[str, str]], TraceRow]:
    names = {name.strip() for name in first.split(",")}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return _from_azure
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        return _from_burstgpt
    found = first[:80] if first else "an empty file"
    raise InputError(f"{path}:1", found, FORMATS)


def _json_lines(path: Path, lines: list[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}", str(error), "one JSON object") from None


def _from_azure(record: dict[str, str]) -> TraceRow:
    """Read a line of the Azure trace; its times have up to seven decimals."""
    whole, _, rest = record["TIMESTAMP"].strip().partition(".")
    zone = rest.lstrip("0123456789")
    decimals = rest.removesuffix(zone)
    # A time without a zone must not depend on where we run.
    moment = datetime.fromisoformat(whole + (zone or "+00:00")).timestamp()
    seconds = moment + (float(f"0.{decimals}") if decimals else 0.0)
    return TraceRow(seconds, int(record["ContextTokens"]), int(record["GeneratedTokens"]))


def _from_burstgpt(record: dict[str, str]) -> TraceRow:
    """Read a line of BurstGPT: seconds."""
    tokens = record["Request tokens"], record["Response tokens"]
    return TraceRow(float(record["Timestamp"]), int(tokens[0]), int(tokens[1]))


def _from_mooncake(record: dict[str, Any]) -> TraceRow:
    """Read a line of Mooncake: milliseconds; the last id is of a block that may not be full."""
    input_tokens, output_tokens = _whole(record["input_length"]), _whole(record["output_length"])
    ids = record.get("hash_ids", [])
    if not isinstance(ids, list):
        raise TypeError(ids)
    content = tuple(map(_whole, ids[: max(0, input_tokens) // CONTENT_TOKENS]))
    return TraceRow(float(record["timestamp"]) * MS, input_tokens, output_tokens, content)


def _from_schedule(record: dict[str, Any]) -> TraceRow:
    input_tokens, output_tokens = _whole(record["input_tokens"]), _whole(record["output_tokens"])
    if record.get("previous") is not None:
        expected = "null: when a request comes that waits for an answer, no schedule can say"
        way_out = "draw the requests anew: --users or --turns, and --seed, in place of the file"
        raise InputError("previous", record["previous"], expected, way_out)
    ids = record.get("content", [])
    if not isinstance(ids, list) or len(ids) * CONTENT_TOKENS > max(0, input_tokens):
        raise TypeError(ids)
    prefix = _whole(record.get("prefix_tokens", 0))
    session = -1 if record.get("session") is None else _whole(record["session"])
    if not 0 <= prefix <= max(0, input_tokens) or not -1 <= session < MAX_SESSIONS:
        raise ValueError(prefix, session)
    content = tuple(map(_whole, ids))
    return TraceRow(float(record["due_s"]), input_tokens, output_tokens, content, prefix, session)


def _whole(value: object) -> int:
    """Return a JSON integer, and nothing that only looks like one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value
