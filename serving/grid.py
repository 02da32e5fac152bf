"""Times a running prefill/decode pair over a small grid, alone and as in service."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.stopwatch import Stream
from sizing.errors import TargetFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from numpy.typing import NDArray

    from serving.stopwatch import Stopwatch

PREFILL_TOKENS = (16, 48, 224, 352, 512)
"""Prompt lengths; none lies within those of the demo's load, so its prediction interpolates."""

PASSES = 2
"""Over the whole grid: machines drift by 10 % within a minute, and all points share that."""

PREFILL_PROMPTS = 12
PREFILL_AT_ONCE = 4
DECODE_BATCHES = (1, 2, 4, 8)
DECODE_CONTEXTS = (16, 384)
DECODE_LIMIT_TOKENS = 480
"""More than a stream makes before it is cut off."""
DECODE_WINDOW_S = 0.6
PATH_TOKENS = (16, 48, 224)
PATH_REPEATS = 6
PATH_PAUSE_S = 0.2
"""Before each: a request that finds nobody finds caches cold and threads asleep."""

SERVICE_TOKENS = (48, 176)
PROMPT_PER_ANSWER = (16, 5)
"""Prompt tokens per answer token in service: few sequences in decode at a time, and many."""
SERVICE_CLIENTS = 16
"""More than decode ever holds then, so that prefill always has the next prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One grid point; the columns of steps.csv that are measured here."""

    phase: str
    tokens: int = 0
    batch: float = 0.0
    context: float = 0.0
    other_busy_fraction: float = 0.0
    other_batch: float = 0.0
    joins: float = 0.0
    repeats: int
    seconds: float


async def time_grid(watch: Stopwatch, tell: Callable[[str], None]) -> tuple[GridPoint, ...]:
    """
    Time every point of the grid; *tell* is called with what is being timed.

    Each pool is timed alone, then both together as in service. The path is timed idle, one
    request at a time.
    """
    timings: list[GridPoint] = []
    number = itertools.count(1)
    total = PASSES * (
        len(PREFILL_TOKENS)
        + len(DECODE_BATCHES) * len(DECODE_CONTEXTS)
        + len(SERVICE_TOKENS) * len(PROMPT_PER_ANSWER)
        + len(PATH_TOKENS)
    )

    def say(what: str) -> None:
        tell(f"measuring {next(number)} of {total}: {what}")

    tell("warm-up")
    await _warm_up(watch)
    for _ in range(PASSES):
        for tokens in PREFILL_TOKENS:
            say(f"prefill of {tokens} tokens, alone")
            timings.append(await _prefill(watch, tokens))
        for batch, context in itertools.product(DECODE_BATCHES, DECODE_CONTEXTS):
            say(f"decode batch {batch} at {context} tokens, alone")
            timings.append(await _decode(watch, batch, context))
        for tokens, ratio in itertools.product(SERVICE_TOKENS, PROMPT_PER_ANSWER):
            say(f"both pools, {tokens} tokens in and {tokens // ratio} out")
            timings += await _in_service(watch, tokens, tokens // ratio)
        for tokens in PATH_TOKENS:
            say(f"path with {tokens} tokens")
            timings += await _path(watch, tokens)
    return tuple(timings)


async def _warm_up(watch: Stopwatch) -> None:
    """Run every shape once: first calls allocate, connect and compile."""
    await asyncio.gather(*(watch.stream(32, 16) for _ in range(max(DECODE_BATCHES))))
    for tokens in PATH_TOKENS:
        await watch.stream(tokens, 4)


async def _prefill(watch: Stopwatch, tokens: int) -> GridPoint:
    """Seconds a prompt takes in a prefill pool that always has the next one waiting."""
    done: list[float] = []

    async def client() -> None:
        for _ in range(PREFILL_PROMPTS // PREFILL_AT_ONCE):
            await watch.prefill(tokens)
            done.append(time.monotonic())

    await asyncio.gather(*(client() for _ in range(PREFILL_AT_ONCE)))
    # From the first completion to the last the pool was never without a prompt.
    ends = np.sort(done)
    repeats = len(ends) - 1
    return GridPoint(
        phase="prefill",
        tokens=tokens,
        repeats=repeats,
        seconds=float((ends[-1] - ends[0]) / repeats),
    )


async def _in_service(watch: Stopwatch, tokens: int, answer: int) -> tuple[GridPoint, GridPoint]:
    """
    Time both pools at once, through the front door.

    Prefill is never without a prompt, as at the top of what the system carries, and decode has as
    many sequences as that gives it.
    """
    streams: list[Stream] = []

    async def client() -> None:
        for _ in range(2):
            streams.append(await watch.stream(tokens, answer))  # noqa: PERF401  (one by one)

    await asyncio.gather(*(client() for _ in range(SERVICE_CLIENTS)))
    firsts = np.sort([stream.stamps[0][0] for stream in streams])
    # While the last ones are answered nobody follows them: only the first ones are saturated.
    start, end = firsts[0], firsts[len(firsts) * 3 // 4]
    repeats = len(firsts) * 3 // 4
    spans = np.array([(stream.stamps[0][0], stream.stamps[-1][0]) for stream in streams])
    clipped = np.clip(spans, start, end)
    held = float(np.sum(clipped[:, 1] - clipped[:, 0]) / (end - start))
    stamps = np.array([at for each in streams for at, _ in each.stamps[1:] if start < at <= end])
    beside = ((spans[:, 0] < stamps[:, None]) & (stamps[:, None] <= spans[:, 1])).sum(axis=1)
    prefill = GridPoint(
        phase="prefill",
        tokens=tokens,
        other_busy_fraction=_covered(clipped) / float(end - start),
        other_batch=held,
        repeats=repeats,
        seconds=float((end - start) / repeats),
    )
    decode = GridPoint(
        phase="decode",
        batch=float(beside.mean()),
        context=tokens + answer / 2,
        other_busy_fraction=1.0,
        joins=float(beside.mean()) / (answer - 1),
        repeats=len(stamps),
        seconds=held * float(end - start) / len(stamps),
    )
    return prefill, decode


def _covered(spans: NDArray[np.float64]) -> float:
    """Return the seconds in which at least one of *spans* is open."""
    covered_s, until_s = 0.0, -np.inf
    for start, end in spans[np.argsort(spans[:, 0])]:
        covered_s += max(0.0, end - max(start, until_s))
        until_s = max(until_s, end)
    return float(covered_s)


async def _decode(watch: Stopwatch, batch: int, context: int) -> GridPoint:
    """Seconds a step takes while exactly *batch* sequences are decoded."""
    streams = [Stream() for _ in range(batch)]

    def client(stream: Stream) -> Coroutine[Any, Any, Any]:
        return watch.stream(context, DECODE_LIMIT_TOKENS, stream)

    async with _background([client(stream) for stream in streams]) as failed:
        begun: asyncio.Future[list[Any]] = asyncio.gather(*(s.begun.wait() for s in streams))
        await asyncio.wait([begun, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        start = time.monotonic()
        read = sum(stream.tokens for stream in streams) / batch
        await asyncio.sleep(DECODE_WINDOW_S)
        end = time.monotonic()
    tokens = sum(stream.tokens_between(start, end) for stream in streams)
    if tokens < batch:
        raise TargetFailed(f"batch {batch} made {tokens} tokens in {DECODE_WINDOW_S} s")
    return GridPoint(
        phase="decode",
        batch=batch,
        context=context + read + tokens / batch / 2,
        repeats=tokens // batch,
        seconds=(end - start) * batch / tokens,
    )


async def _path(watch: Stopwatch, tokens: int) -> tuple[GridPoint, ...]:
    """Time requests that meet nobody: through the prefill pool alone, and through both."""
    alone: list[float] = []
    whole: list[float] = []
    for _ in range(PATH_REPEATS):
        await asyncio.sleep(PATH_PAUSE_S)
        alone.append(await watch.prefill(tokens))
        await asyncio.sleep(PATH_PAUSE_S)
        whole.append((await watch.stream(tokens, 2)).ttft_s)
    return tuple(
        GridPoint(
            phase=phase, tokens=tokens, repeats=PATH_REPEATS, seconds=float(np.median(seconds))
        )
        for phase, seconds in (("request", alone), ("path", whole))
    )


@contextlib.asynccontextmanager
async def _background(
    clients: list[Coroutine[Any, Any, Any]],
) -> AsyncIterator[asyncio.Future[list[Any]]]:
    """Run *clients* while the block runs; if one fails, so does the block, at its end."""
    together = asyncio.gather(*clients)
    try:
        yield together
        if together.done():
            together.result()
    finally:
        together.cancel()
        with contextlib.suppress(asyncio.CancelledError, TargetFailed, OSError):
            await together
