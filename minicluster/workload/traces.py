"""Requests from a file: public traces of arrivals, logs, and the load test's own schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import Fault, InputError
from minicluster.workload.arrivals import CONTENT_TOKENS, Arrivals, arrivals_of
from minicluster.workload.trace_options import AS_FOUND, TraceReading
from minicluster.workload.trace_requests import ReadAs, RequestFile
from minicluster.workload.trace_times import clock_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from minicluster.workload.trace_formats import Format
    from minicluster.workload.trace_times import Request

MAX_TOKENS = 100_000_000
"""Largest length of a prompt or an answer; a larger number in a trace is a mistake."""
BLOCKS = tuple(1 << power for power in range(3, 14))
"""Sizes of blocks, in tokens, that are looked for: ids of two or more blocks fit one of them."""
SKIP = "--skip-unanswered leaves such requests out"


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
    (health checks, refused requests) are left out. Units: see `trace_times.clock_of`.

    Args:
        reading: what decides in place of the file.
        skip_unanswered: leave out requests that generated nothing instead of refusing them.

    Raises InputError: no requests, times of no certain unit, or a request that is malformed, goes
    back in time, has a length of 0, images, several answers or ids that do not fit its tokens, or
    waits for another; the message names file and line.
    """
    file = RequestFile(path=path, skip_images=reading.skip_images)
    requests = file.read()
    form, block = file.format, _block_tokens(requests, file.format)
    fits = None if block is None else block == form.block_tokens
    clock = clock_of(requests, form, reading.time_unit, fits_blocks=fits)
    numbers: dict[tuple[int, ...], int] = {}
    rows = [(clock.due_s(request), request) for request in requests]
    if not form.only_requests:
        rows.sort(key=lambda row: row[0])
    kept = [row for row in rows if row[1].row.output_tokens or not skip_unanswered]
    file.left_out["requests without an answer"] += len(rows) - len(kept)
    if not kept:
        raise InputError(
            str(path), Fault("is a trace without requests that were answered"), "at least one"
        )
    _check(kept)
    requests_of = [
        replace(read.row, due_s=due_s, content=_content(read, block, numbers))
        for due_s, read in kept
    ]
    blocks = f", blocks of {block} tokens" if block else ""
    return Trace(
        arrivals=arrivals_of(requests_of),
        file=ReadAs(
            form=f"{form.title}: {clock}{blocks}",
            left_out=dict(file.left_out),
            unread=tuple(file.unread),
        ),
    )


def _check(rows: Sequence[tuple[float, Request]]) -> None:
    before = rows[0][0]
    for due_s, request in rows:
        if due_s < before:
            expected = f"a time not before the line above, {before}"
            raise InputError(request.place, due_s, expected, "sort by time")
        before = due_s
        for name, tokens in zip(("prompt", "generated"), request.tokens, strict=True):
            if not 1 <= tokens <= MAX_TOKENS:
                way_out = SKIP if request.row.output_tokens == 0 else None
                expected = f"from 1 to {MAX_TOKENS:,}"
                raise InputError(f"{request.place}: {name} tokens", tokens, expected, way_out)


def _block_tokens(requests: Sequence[Request], form: Format) -> int | None:
    """Return the tokens of the blocks that ids name, one for each begun block; `None`: no ids."""
    named = [
        (request.row.input_tokens, len(request.ids), request.place)
        for request in requests
        if request.ids
    ]
    if not named:
        return None
    own = form.block_tokens
    # A prompt without a whole block of the format names nothing that another one shares.
    stray = [(n, ids, at) for n, ids, at in named if not own or (n >= own and ids != -(-n // own))]
    if own and not stray:
        return own
    fitting = [size for size in BLOCKS if all(ids == -(-n // size) for n, ids, _ in named)]
    if len(fitting) == 1:
        return fitting[0]
    tokens, ids, place = stray[0]
    raise InputError(
        f"{place}: hash_ids",
        Fault(f"are {ids} ids for {tokens} tokens"),
        f"one for each begun block of one size, {BLOCKS[0]}, {BLOCKS[1]}, … or {BLOCKS[-1]} tokens",
        "leave the ids out of the file",
    )


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
    return tuple(numbers.setdefault(piece, len(numbers)) for piece in pieces)
