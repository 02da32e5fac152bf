"""Times a running prefill/decode pair over a small grid, the other pool idle and busy."""

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

    from serving.stopwatch import Stopwatch

PREFILL_TOKENS = (16, 48, 224, 352, 512)
"""Prompt lengths; none lies within those of the demo's load, so its prediction interpolates."""

PREFILL_PROMPTS = 16
PREFILL_AT_ONCE = 4
DECODE_BATCHES = (1, 2, 4, 8)
DECODE_CONTEXTS = (16, 384)
DECODE_LIMIT_TOKENS = 480
"""More than a stream makes before it is cut off."""
DECODE_WINDOW_S = 0.8
PATH_TOKENS = (16, 48, 224, 512)
PATH_REPEATS = 7

BUSY_PROMPT = 224
BUSY_CLIENTS = 3
PROMPT_PER_ANSWER = 16
"""Prompt tokens per answer token, so that prefill stays the slower pool."""
LEAD_S = 0.3
"""Head start of what keeps the other pool busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One grid point; the columns of steps.csv that are measured here."""

    phase: str
    tokens: int = 0
    batch: int = 0
    context: float = 0.0
    other_busy_fraction: float = 0.0
    repeats: int
    seconds: float


async def time_grid(watch: Stopwatch, tell: Callable[[str], None]) -> tuple[GridPoint, ...]:
    """
    Time every point of the grid; *tell* is called with what is being timed.

    Each pool is timed twice: alone, and while the other one works without a pause. The path is
    timed idle, one request at a time.
    """
    timings: list[GridPoint] = []
    number = itertools.count(1)
    total = 2 * (len(PREFILL_TOKENS) + len(DECODE_BATCHES) * len(DECODE_CONTEXTS)) + len(
        PATH_TOKENS
    )

    def say(what: str) -> None:
        tell(f"measuring {next(number)} of {total}: {what}")

    tell("warm-up")
    await _warm_up(watch)
    step_s = 0.0
    for busy in (False, True):
        beside = "the other pool busy" if busy else "alone"
        for tokens in PREFILL_TOKENS:
            say(f"prefill of {tokens} tokens, {beside}")
            point = await (
                _prefill_in_service(watch, tokens, step_s) if busy else _prefill(watch, tokens)
            )
            timings.append(point)
        for batch in DECODE_BATCHES:
            for context in DECODE_CONTEXTS:
                say(f"decode batch {batch} at {context} tokens, {beside}")
                timings.append(await _decode(watch, batch, context, busy=busy))
        step_s = next(point.seconds for point in timings if point.phase == "decode")
    for tokens in PATH_TOKENS:
        say(f"path with {tokens} tokens")
        alone = [await watch.prefill(tokens) for _ in range(PATH_REPEATS)]
        timings.append(_idle("request", tokens, alone))
        whole = [(await watch.stream(tokens, 2)).ttft_s for _ in range(PATH_REPEATS)]
        timings.append(_idle("path", tokens, whole))
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


async def _prefill_in_service(watch: Stopwatch, tokens: int, step_s: float) -> GridPoint:
    """
    The same through the front door: each prompt is handed over and decoded, as in service.

    Answers are as long as keeps decode busy and still leaves prefill the one that all wait for.
    How busy decode is follows from its tokens, at *step_s* each.
    """
    answer = max(2, tokens // PROMPT_PER_ANSWER)
    streams: list[Stream] = []

    async def client() -> None:
        for _ in range(PREFILL_PROMPTS // PREFILL_AT_ONCE):
            streams.append(await watch.stream(tokens, answer))  # noqa: PERF401  (one by one)

    await asyncio.gather(*(client() for _ in range(2 * PREFILL_AT_ONCE)))
    firsts = np.sort([stream.stamps[0][0] for stream in streams])
    # While the last ones are answered nobody follows them: only the first ones are saturated.
    firsts = firsts[: len(firsts) * 3 // 4]
    repeats = len(firsts) - 1
    seconds = float((firsts[-1] - firsts[0]) / repeats)
    return GridPoint(
        phase="prefill",
        tokens=tokens,
        other_busy_fraction=min(1.0, answer * step_s / seconds),
        repeats=repeats,
        seconds=seconds,
    )


async def _decode(watch: Stopwatch, batch: int, context: int, *, busy: bool) -> GridPoint:
    """Seconds a step takes while exactly *batch* sequences are decoded."""
    streams = [Stream() for _ in range(batch)]

    def client(stream: Stream) -> Coroutine[Any, Any, Any]:
        return watch.stream(context, DECODE_LIMIT_TOKENS, stream)

    async with _background([client(stream) for stream in streams]) as failed:
        begun: asyncio.Future[list[Any]] = asyncio.gather(*(s.begun.wait() for s in streams))
        await asyncio.wait([begun, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        async with _prefilling(watch) if busy else _nothing():
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
        other_busy_fraction=float(busy),
        repeats=tokens // batch,
        seconds=(end - start) * batch / tokens,
    )


def _idle(phase: str, tokens: int, seconds: list[float]) -> GridPoint:
    """Take the median of requests that met nobody."""
    return GridPoint(
        phase=phase, tokens=tokens, repeats=len(seconds), seconds=float(np.median(seconds))
    )


@contextlib.asynccontextmanager
async def _prefilling(watch: Stopwatch) -> AsyncIterator[None]:
    """Keep the prefill pool busy, through the front door as in service: the path costs too."""

    async def client() -> None:
        while True:
            await watch.stream(BUSY_PROMPT, 1)

    async with _background([client() for _ in range(BUSY_CLIENTS)]):
        await asyncio.sleep(LEAD_S)
        yield


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


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    """Leave the other pool alone."""
    yield
