"""Requests from a file: public traces of arrivals, logs, and the load test's own schedule."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minicluster.errors import Fault, InputError
from minicluster.files import write_atomically
from minicluster.workload.arrivals import CONTENT_TOKENS, Arrivals
from minicluster.workload.trace_options import UNITS_S, TraceReading
from minicluster.workload.trace_requests import KNOWN, ReadAs, RequestFile, TraceRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.workload.trace_formats import Format
    from minicluster.workload.trace_requests import Request

MAX_TOKENS = 100_000_000
"""Largest length of a prompt or an answer; a larger number in a trace is a mistake."""
RATES_PER_S = (10 / 3600, 100.0)
"""Mean rates between which a load lies; outside, its times likely have another unit."""
EPOCH_FROM_S = datetime(2015, 1, 1, tzinfo=UTC).timestamp()
"""Earliest time since 1970 of a request to a language model; the latest one is tomorrow."""
DAY_S = 86_400.0
LONGEST_S = 3650 * DAY_S
"""No trace is longer: a larger time counts from 1970, whatever the format's unit."""
BLOCKS = tuple(1 << power for power in range(3, 14))
"""Sizes of blocks, in tokens, that are looked for."""
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
AS_FOUND = TraceReading()

SKIP = "--skip-unanswered leaves such requests out"
GIVE_UNIT = (
    "give --time-unit s, ms, us or ns, or --format; `sizing traffic FILE -o TRACE` takes them, too,"
    " and writes a trace without doubt"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests of a file, the first at 0 seconds, and what the file was taken for."""

    arrivals: Arrivals
    file: ReadAs

    @property
    def skipped(self) -> int:
        """Number of lines, spans and requests that are in no arrival."""
        return sum(self.file.left_out.values())


def read_trace(
    path: Path, reading: TraceReading = AS_FOUND, *, skip_unanswered: bool = False
) -> Trace:
    """
    Read a trace in one of the formats of `minicluster.workload.trace_formats`, told by its keys.

    A log's lines come when an answer ends: they are sorted by arrival, and those without tokens
    (health checks, refused requests) are left out. A number is a time in the unit that its key
    says, or in that in which it lies between 2015 and tomorrow, counted from 1970; else in the
    unit of the format, where ids of blocks or the rate of the requests leave no doubt of it.

    Args:
        reading: what decides in place of the file.
        skip_unanswered: leave out requests that generated nothing instead of refusing them.

    Raises:
        InputError: no such file, another format, nothing in it, times of no certain unit, or a
            request that is malformed, goes back in time, has a length of 0, images, several
            answers or ids that do not fit its tokens, or waits for another; the message names
            file and line.
    """
    file = RequestFile(path=path, reading=reading)
    requests = file.read()
    if not requests:
        keys = f": its keys are {', '.join(file.keys[:12])}" if file.keys else ""
        raise InputError(f"{path}:1", Fault(f"is a trace without requests{keys}"), KNOWN)
    clock = _clock(requests[0], file.format, reading)
    rows = [each.row._replace(due_s=clock.due_s(each)) for each in requests]
    order = list(range(len(rows)))
    if not file.format.only_requests:
        order.sort(key=lambda at: rows[at].due_s)
    kept = [at for at in order if rows[at].output_tokens or not skip_unanswered]
    if len(kept) < len(order):
        file.left_out["requests without an answer"] += len(order) - len(kept)
    if not kept:
        found = Fault("is a trace without requests that were answered")
        raise InputError(str(path), found, "at least one")
    _check([rows[at] for at in kept], [requests[at] for at in kept])
    block = _block_tokens(requests, file.format, reading)
    _check_rate(path, [rows[at].due_s for at in kept], clock, file.format, block)
    numbers: dict[tuple[int, ...], int] = {}
    blocks = f", blocks of {block} tokens" if block else ""
    return Trace(
        arrivals=arrivals_of(
            [rows[at]._replace(content=_content(requests[at], block, numbers)) for at in kept]
        ),
        file=ReadAs(
            form=f"{file.format.title}: {clock.words}{blocks}",
            left_out=dict(file.left_out),
            unread=tuple(file.unread),
        ),
    )


def write_trace(arrivals: Arrivals, path: Path) -> None:
    """Write arrivals, none of which waits for another, as a trace that `read_trace` reads."""
    columns = arrivals.columns()
    lists = [c if isinstance(c, tuple) else c.tolist() for c in columns.values()]
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True))
    none = {"session": -1, "adapter": -1}
    texts = (json.dumps({k: v for k, v in row.items() if none.get(k) != v}) for row in rows)
    write_atomically(path, "\n".join(texts) + "\n")


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


def _check(rows: Sequence[TraceRow], requests: Sequence[Request]) -> None:
    """Refuse times that go back, and lengths that no request has."""
    before = rows[0].due_s
    for row, request in zip(rows, requests, strict=True):
        if row.due_s < before:
            expected = f"a time not before the line above, {before}"
            raise InputError(request.place, row.due_s, expected, "sort by time")
        before = row.due_s
        lengths = {"prompt tokens": row.input_tokens, "generated tokens": row.output_tokens}
        for name, tokens in lengths.items():
            if not 1 <= tokens <= MAX_TOKENS:
                way_out = SKIP if row.output_tokens == 0 else None
                expected = f"from 1 to {MAX_TOKENS:,}"
                raise InputError(f"{request.place}: {name}", tokens, expected, way_out)


class _Clock(NamedTuple):
    """
    How a file counts time.

    Attributes:
        unit: of numbers; empty: nothing says it; `None`: times are dates.
        said_by: option, key, epoch or format.
    """

    unit: str | None
    said_by: str

    @property
    def words(self) -> str:
        """The unit in words."""
        since = " since 1970" if self.said_by == "epoch" else ""
        return "dates" if self.unit is None else WORDS.get(self.unit, "numbers") + since

    def due_s(self, request: Request) -> float:
        """Return the arrival of a request in seconds."""
        place, said = request.place, Fault(f"is one whose {request.key} is {request.at}")
        number = _number(request.at)
        if (self.unit is None) != (number is None):
            kind = "a date and time" if self.unit is None else "a number"
            raise InputError(place, said, f"{kind}, as the times before")
        if number is None:
            found = _moment_s(place, said, str(request.at))
        else:
            found = number * UNITS_S[self.unit or "s"]
            if not isfinite(found):
                raise InputError(place, said, "a finite time")
            if self.said_by == "epoch" and _epoch_unit(number) != self.unit:
                raise InputError(place, said, f"{self.words}, as the times before")
        if self.said_by == "key" and request.unit != self.unit:
            raise InputError(place, said, f"{self.words}, as the keys before say")
        return found - request.took_s


def _clock(first: Request, form: Format, reading: TraceReading) -> _Clock:
    """Return how the times of a file are counted, by its first request."""
    number = _number(first.at)
    if number is None:
        if reading.time_unit:
            expected = f"no such option: times are dates, such as {first.at}"
            raise InputError("--time-unit", reading.time_unit, expected)
        return _Clock(None, "date")
    if reading.time_unit:
        return _Clock(reading.time_unit, "option")
    stated, since = first.unit or form.time_unit, _epoch_unit(number)
    if since is None or since == stated:
        said_by = "option" if reading.format else "format"
        return _Clock(stated or "", "epoch" if since else "key" if first.unit else said_by)
    if stated is None or (not first.unit and number * UNITS_S[stated] > LONGEST_S):
        return _Clock(since, "epoch")
    day = datetime.fromtimestamp(number * UNITS_S[since], UTC).date()
    raise InputError(
        f"{first.place}: {first.key}",
        f"{number}, {number * UNITS_S[stated] / DAY_S:,.1f} days in {WORDS[stated]},"
        f" or {day} in {WORDS[since]} since 1970",
        "times that can be read in one way",
        GIVE_UNIT,
    )


def _epoch_unit(number: float) -> str | None:
    """Return the unit in which a number is a time from 2015 to tomorrow, counted from 1970."""
    latest_s = time.time() + DAY_S
    return next((u for u, s in UNITS_S.items() if EPOCH_FROM_S <= number * s <= latest_s), None)


def _number(at: object) -> float | None:
    if isinstance(at, bool) or not isinstance(at, int | float | str):
        return None
    try:
        return float(at) if isinstance(at, str) else at
    except ValueError:
        return None


def _moment_s(place: str, said: str, text: str) -> float:
    """Read a date and time, of up to nine decimals, as seconds; without a zone it is UTC."""
    whole, _, rest = text.strip().partition(".")
    zone = rest.lstrip("0123456789")
    decimals = rest.removesuffix(zone)
    try:
        found = datetime.fromisoformat(whole + zone)
    except ValueError:
        expected = "a number, or a date and time as ISO 8601 writes them"
        raise InputError(place, said, expected) from None
    # A time without a zone must not depend on where we run.
    moment = found if found.tzinfo else found.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{decimals}") if decimals else 0.0)


def _check_rate(
    path: Path, due_s: Sequence[float], clock: _Clock, form: Format, block: int | None
) -> None:
    """
    Refuse times whose unit only the format says, unless the content confirms it.

    Ids that fit the format's blocks do, or keys that no other format has (`Format.sure`), as long
    as the rate is that of a load; without either, the rate must be none of a load in seconds.
    """
    span = due_s[-1] - due_s[0]
    if not span or (clock.unit and clock.said_by != "format") or clock.unit is None:
        return
    own = UNITS_S[clock.unit or "s"]
    rates = {unit: (len(due_s) - 1) / span * own / UNITS_S[unit] for unit in ("s", "ms")}
    likely = [unit for unit, rate in rates.items() if RATES_PER_S[0] <= rate <= RATES_PER_S[1]]
    sure = form.sure if block is None else block == form.block_tokens
    if clock.unit in likely and (sure or len(likely) == 1):
        return
    said = "; as ".join(
        f"{WORDS[unit]} {rate:,.4g} requests/s over {span / own * UNITS_S[unit]:,.4g} s"
        for unit, rate in rates.items()
    )
    expected = "times whose unit the file leaves no doubt of"
    raise InputError(f"{path}: times", Fault(f"are numbers: as {said}"), expected, GIVE_UNIT)


def _block_tokens(requests: Sequence[Request], form: Format, reading: TraceReading) -> int | None:
    """Return the tokens of the blocks that ids name, which all requests fit; `None`: no ids."""
    named = [each for each in requests if each.ids]
    if not named:
        return None
    block = reading.block_tokens or named[0].block_tokens or form.block_tokens
    misfit = next((each for each in named if not block or not _fits(each, block)), None)
    if block and misfit is None:
        if CONTENT_TOKENS % block and block % CONTENT_TOKENS:
            expected = f"a divisor or a multiple of {CONTENT_TOKENS}"
            raise InputError("--block-tokens", block, expected, "leave the ids out of the file")
        return block
    request = misfit or named[0]
    fitting = [size for size in BLOCKS if all(_fits(each, size) for each in named)]
    sizes = " or ".join(map(str, fitting)) or "no size"
    others = f"all ids of the file fit blocks of {sizes}"
    if 16 in fitting:  # noqa: PLR2004  (the blocks of Qwen-Bailian)
        others += ", as Qwen-Bailian's, whose times are seconds"
    raise InputError(
        f"{request.place}: hash_ids",
        Fault(f"are {len(request.ids)} ids for {request.row.input_tokens} tokens"),
        f"one for each block of {block} tokens" if block else "blocks of a known size",
        f"{others}: give --format, or --block-tokens and --time-unit",
    )


def _fits(request: Request, block: int) -> bool:
    """Say whether a prompt has as many blocks as ids; one without a whole block names nothing."""
    tokens, ids = request.row.input_tokens, len(request.ids)
    return ids == -(-tokens // block) or (tokens < block and ids <= 2)  # noqa: PLR2004


def _content(
    request: Request, block: int | None, numbers: dict[tuple[int, ...], int]
) -> tuple[int, ...]:
    """Return ids of the whole blocks of `CONTENT_TOKENS`: numbers of what they consist of."""
    if not request.ids or block is None:
        return request.row.content
    count = max(0, request.row.input_tokens) // CONTENT_TOKENS
    if block == CONTENT_TOKENS:
        return request.ids[:count]
    joined, parts = CONTENT_TOKENS // block, block // CONTENT_TOKENS
    pieces = (
        request.ids[at * joined : (at + 1) * joined]
        if joined
        else (request.ids[at // parts], at % parts)
        for at in range(count)
    )
    return tuple(numbers.setdefault(each, len(numbers)) for each in pieces)
