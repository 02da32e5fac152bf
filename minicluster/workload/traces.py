"""Requests from a file: public traces of arrivals, and the load test's own schedule."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minicluster.errors import InputError
from minicluster.files import read_text, write_atomically
from minicluster.workload.arrivals import CONTENT_TOKENS, Arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

MS = 1e-3
FORMATS = (
    "an Azure LLM trace (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT"
    " (Timestamp,Model,Request tokens,Response tokens,…), Mooncake (JSON lines with timestamp,"
    " input_length, output_length), a schedule.jsonl of `loadtest run`, an access log (JSON lines"
    " with time, prompt_tokens, output_tokens) or OpenTelemetry spans (OTLP as JSON)"
)
MAX_TOKENS = 100_000_000
"""Largest length of a prompt or an answer; a larger number in a trace is a mistake."""
MAX_SESSIONS = 1 << 31
"""Bound of the numbers of conversations; a larger one is a mistake."""
LOG_KEYS = {
    "time": ("time", "timestamp", "@timestamp", "ts"),
    "prompt": ("prompt_tokens", "input_tokens", "gen_ai.usage.input_tokens"),
    "answer": ("output_tokens", "completion_tokens", "gen_ai.usage.output_tokens"),
}
"""Names, in access logs and spans, of the time and of the tokens of a request."""

SKIP = "--skip-unanswered leaves such requests out"


class TraceRow(NamedTuple):
    """
    One line.

    Attributes:
        content: ids of the prompt's whole blocks.
        prefix_tokens: of the prompt, in the prefix cache.
        session: conversation; -1: none.
        adapter: LoRA adapter; -1: none.
    """

    due_s: float
    input_tokens: int
    output_tokens: int
    content: tuple[int, ...] = ()
    prefix_tokens: int = 0
    session: int = -1
    adapter: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """
    Requests of a file, the first at 0 seconds.

    Attributes:
        skipped: requests without an answer, and lines of a log that are no requests.
    """

    arrivals: Arrivals
    skipped: int


def read_trace(path: Path, *, skip_unanswered: bool = False) -> Trace:
    """
    Read a trace in one of six formats, told apart by its first line.

    Lines of logs come when an answer ends: they are sorted by arrival, and those without tokens
    (health checks, refused requests) are counted as skipped.

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
    lines = read_text(path, FORMATS).splitlines()
    rows: list[TraceRow] = []
    skipped = 0
    read = _logged(path, lines) if _is_log(lines) else _rows(path, lines)
    for number, row in read:
        if row is None:
            skipped += 1
            continue
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


def write_trace(arrivals: Arrivals, path: Path) -> None:
    """Write times and lengths of arrivals as a trace that `read_trace` reads."""
    columns = (arrivals.due_s.tolist(), arrivals.input_tokens.tolist(), arrivals.output_tokens)
    lines = [
        json.dumps({"due_s": round(due, 6), "input_tokens": n, "output_tokens": int(o)})
        for due, n, o in zip(*columns, strict=True)
    ]
    write_atomically(path, "\n".join(lines) + "\n")


def arrivals_of(rows: Sequence[TraceRow]) -> Arrivals:
    """Return the arrivals of at least one row, in the order of time, the first at 0 seconds."""
    due, inputs, outputs, content, prefix, session, adapter = zip(*rows, strict=True)
    return Arrivals(
        due_s=np.array(due, dtype=np.float64) - due[0],
        input_tokens=np.array(inputs, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        content=content if any(content) else None,
        prefix_tokens=np.array(prefix, dtype=np.int64) if any(prefix) else None,
        session=np.array(session, dtype=np.int64) if max(session) >= 0 else None,
        adapter=np.array(adapter, dtype=np.int64) if min(adapter) >= 0 else None,
    )


def _check_lengths(place: str, row: TraceRow) -> None:
    lengths = {"prompt tokens": row.input_tokens, "generated tokens": row.output_tokens}
    for name, tokens in lengths.items():
        if not 1 <= tokens <= MAX_TOKENS:
            way_out = SKIP if row.output_tokens == 0 else None
            raise InputError(f"{place}: {name}", tokens, f"from 1 to {MAX_TOKENS:,}", way_out)


def _is_log(lines: list[str]) -> bool:
    """Say whether the first line is a record of a log or of spans, and of no other format."""
    first = next((line for line in lines if line.strip()), "")
    others = ('"due_s"', '"input_length"')
    return first.lstrip().startswith("{") and not any(key in first for key in others)


def _logged(path: Path, lines: list[str]) -> Iterator[tuple[int, TraceRow | None]]:
    """Yield the requests of a log in the order of their arrival; `None`: a line without one."""
    whole = "\n".join(lines)
    records: Iterable[tuple[int, Any]]
    try:
        records = [(1, json.loads(whole))]  # spans may be one document over many lines
    except ValueError:
        records = _json_lines(path, lines)
    found: list[tuple[int, TraceRow]] = []
    for number, record in records:
        is_spans = isinstance(record, dict) and "resourceSpans" in record
        try:
            rows = [_from_log(each) for each in (_spans(record) if is_spans else [record])]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise InputError(f"{path}:{number}", str(record)[:80], FORMATS) from None
        for row in rows:
            if row is None:
                yield number, None
            elif not isfinite(row.due_s):
                raise InputError(f"{path}:{number}", row.due_s, "a finite time")
            else:
                found.append((number, row))
    yield from sorted(found, key=lambda pair: pair[1].due_s)


def _spans(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the spans of an OTLP document as records of a log: their begin and attributes."""
    found = []
    for resource in record["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                values = {each["key"]: each["value"] for each in span.get("attributes", ())}
                numbers = {key: int(v["intValue"]) for key, v in values.items() if "intValue" in v}
                found.append({"time": int(span["startTimeUnixNano"]) / 1e9, **numbers})
    return found


def _from_log(record: dict[str, Any]) -> TraceRow | None:
    """Read a line of an access log, whose time is the answer's end where it says `seconds`."""
    values = {
        name: next((record[key] for key in keys if record.get(key) is not None), None)
        for name, keys in LOG_KEYS.items()
    }
    if values["prompt"] is None or values["answer"] is None:
        return None
    when = values["time"]
    if when is None:
        raise KeyError("time")
    moment = float(when) if isinstance(when, int | float) else _moment_s(when)
    due_s = moment - float(record.get("seconds", 0.0))
    return TraceRow(due_s, _whole(values["prompt"]), _whole(values["answer"]))


def _rows(path: Path, lines: list[str]) -> Iterator[tuple[int, TraceRow | None]]:
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
    """Read a line of the Azure trace."""
    seconds = _moment_s(record["TIMESTAMP"])
    return TraceRow(seconds, int(record["ContextTokens"]), int(record["GeneratedTokens"]))


def _moment_s(text: str) -> float:
    """Read a date and time, of up to nine decimals, as seconds; without a zone it is UTC."""
    whole, _, rest = text.strip().partition(".")
    zone = rest.lstrip("0123456789")
    decimals = rest.removesuffix(zone)
    found = datetime.fromisoformat(whole + zone)
    # A time without a zone must not depend on where we run.
    moment = found if found.tzinfo else found.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{decimals}") if decimals else 0.0)


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
    adapter = -1 if record.get("adapter") is None else _whole(record["adapter"])
    content, due_s = tuple(map(_whole, ids)), float(record["due_s"])
    return TraceRow(due_s, input_tokens, output_tokens, content, prefix, session, adapter)


def _whole(value: object) -> int:
    """Return a JSON integer, and nothing that only looks like one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value
