"""Times a running prefill/decode pair over a small grid, the other pool idle and busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from serving.stopwatch import Stopwatch

PREFILL_TOKENS = (16, 48, 224, 352, 512)
"""Prompt lengths; none lies within those of the demo's load, so its prediction interpolates."""

PREFILL_PROMPTS = 16
PREFILL_AT_ONCE = 4
DECODE_BATCHES = (1, 2, 4, 8)
DECODE_CONTEXTS = (16, 384)
DECODE_TOKENS = 56
PATH_TOKENS = (16, 48, 224, 512)
PATH_REPEATS = 7

BUSY_PROMPT = 224
BUSY_BATCH = 2
BUSY_OUTPUT = 160
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
    for busy in (False, True):
        beside = "the other pool busy" if busy else "alone"
        for tokens in PREFILL_TOKENS:
            say(f"prefill of {tokens} tokens, {beside}")
            async with _decoding(watch) if busy else _nothing():
                timings.append(await _prefill(watch, tokens))
            timings[-1] = replace(timings[-1], other_busy_fraction=float(busy))
        for batch in DECODE_BATCHES:
            for context in DECODE_CONTEXTS:
                say(f"decode batch {batch} at {context} tokens, {beside}")
                timings.append(await _decode(watch, batch, context, busy=busy))
    for tokens in PATH_TOKENS:
        say(f"path with {tokens} tokens")
        alone = [await watch.prefill(tokens) for _ in range(PATH_REPEATS)]
        timings.append(_idle("request", tokens, alone))
        whole = [(await watch.stream(tokens, 2)).ttft_s for _ in range(PATH_REPEATS)]
        timings.append(_idle("path", tokens, whole))
    return tuple(timings)


async def _warm_up(watch: Stopwatch) -> None:
    """Run every shape once: first calls allocate, connect and compile."""
    await watch.together(max(DECODE_BATCHES), 32, 16)
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


async def _decode(watch: Stopwatch, batch: int, context: int, *, busy: bool) -> GridPoint:
    """Seconds a step takes while exactly *batch* sequences are decoded."""
    running = asyncio.gather(
        *(watch.stream(context, DECODE_TOKENS + 8 * batch) for _ in range(batch))
    )
    async with _prefilling(watch) if busy else _nothing():
        streams = await running
    start = max(stream.stamps[0][0] for stream in streams)
    end = min(stream.stamps[-1][0] for stream in streams)
    tokens = sum(stream.tokens_between(start, end) for stream in streams)
    return GridPoint(
        phase="decode",
        batch=batch,
        context=context + DECODE_TOKENS / 2,
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
    """Keep the prefill pool busy."""

    async def client() -> None:
        while True:
            await watch.prefill(BUSY_PROMPT)

    async with _background(client, 2):
        yield


@contextlib.asynccontextmanager
async def _decoding(watch: Stopwatch) -> AsyncIterator[None]:
    """Keep the decode pool busy."""

    async def client() -> None:
        while True:
            await watch.stream(BUSY_PROMPT // 14, BUSY_OUTPUT)

    async with _background(client, BUSY_BATCH):
        yield


@contextlib.asynccontextmanager
async def _background(client: Callable[[], Awaitable[None]], count: int) -> AsyncIterator[None]:
    """Run *count* clients while the block runs; their failures are the block's."""
    tasks = [asyncio.ensure_future(client()) for _ in range(count)]
    await asyncio.sleep(LEAD_S)
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    """Leave the other pool alone."""
    yield
