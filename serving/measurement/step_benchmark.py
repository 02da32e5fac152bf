"""The step benchmark: a running prefill/decode pair over a small grid, alone and under load."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import numpy as np

from minicluster.contention import others_fraction
from minicluster.engine_model.planned_limits import planned_limits
from minicluster.errors import TargetFailed
from minicluster.http_client.sse import DONE, EventParser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from numpy.typing import NDArray

    from minicluster.contention import CpuTimes
    from minicluster.plan import Deployment


FIRST_ID = 300
"""First token id of prompts, beyond special tokens and single bytes."""

STREAMED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@dataclass(slots=True)
class TimedStream:
    """
    The times of one streamed completion, filled while it runs.

    Attributes:
        stamps: (monotonic time, tokens so far) of each chunk that brought tokens.
        started: set at the first token.
    """

    sent_s: float = 0.0
    stamps: list[tuple[float, int]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps[0][0] - self.sent_s

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self.stamps[-1][1] if self.stamps else 0

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens that arrived after *start_s* and not after *end_s*."""
        arrived = [tokens for at, tokens in self.stamps if at <= end_s]
        earlier = [tokens for at, tokens in self.stamps if at <= start_s]
        return max(arrived, default=0) - max(earlier, default=0)


@dataclass(frozen=True, slots=True)
class TimingClient:
    """
    A client that sends completions to one endpoint.

    Its prompts, ids below *vocab_size*, are all different, so that no prefix cache is hit.
    """

    session: aiohttp.ClientSession
    base_url: str
    model: str
    vocab_size: int
    rng: np.random.Generator

    async def stream(
        self, input_tokens: int, output_tokens: int, into: TimedStream | None = None
    ) -> TimedStream:
        """
        Stream one completion of exact lengths; *into* is filled meanwhile.

        Raises:
            TargetFailed: the endpoint answered an error, or ended the stream early.
        """
        url = f"{self.base_url}/v1/completions"
        body = self._body(input_tokens, output_tokens) | STREAMED
        stream = into or TimedStream()
        stream.sent_s = time.monotonic()
        async with self.session.post(url, json=body) as answer:
            await _check(answer)
            parser = EventParser()
            async for received in answer.content.iter_any():
                now = time.monotonic()
                for event in parser.feed(received):
                    tokens = 0 if event == DONE else _tokens(json.loads(event), url)
                    if tokens > stream.tokens:
                        stream.stamps.append((now, tokens))
                        stream.started.set()
        if stream.tokens != output_tokens:
            raise TargetFailed(f"{url} sent {stream.tokens} of {output_tokens} tokens")
        return stream

    async def prefill(self, input_tokens: int) -> float:
        """Return the seconds of one prompt through the prefill pool alone, there and back."""
        url = f"{self.base_url}/internal/prefill"
        sent = time.monotonic()
        async with self.session.post(url, json=self._body(input_tokens, 1)) as answer:
            await _check(answer)
            await answer.read()
        return time.monotonic() - sent

    def _body(self, input_tokens: int, output_tokens: int) -> dict[str, Any]:
        ids = self.rng.integers(FIRST_ID, self.vocab_size, size=input_tokens)
        return {
            "model": self.model,
            "prompt": ids.tolist(),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != HTTPStatus.OK:
        text = (await answer.text())[:300]
        raise TargetFailed(f"{answer.url} answered {answer.status}: {text}")


def _tokens(chunk: dict[str, Any], url: str) -> int:
    if "error" in chunk:
        raise TargetFailed(f"{url}: {chunk['error'].get('message', chunk['error'])}")
    return int((chunk.get("usage") or {}).get("completion_tokens") or 0)


PREFILL_TOKENS = (16, 48, 224, 512)
"""Prompt lengths; the demo's lie between them, so that its prediction interpolates. Beyond them
come twice as many each time, up to what the context of the engines takes."""

FAR = 1.5
"""How much longer than the last of them the longest prompt is, if it is timed, too."""

PREFILL_PROMPTS, LONG_PROMPTS = 12, 8
"""Prompts of a length, and of one beyond `PREFILL_TOKENS`."""

PREFILL_AT_ONCE = 4

DECODE_FACTOR = 4
"""Each decode batch is so many times as large as the one before."""

SHORT_CONTEXT, LONG_CONTEXT = 16, 0.375
"""Tokens of a short context, and a long one's share of the engines' longest: as many as follow
have room, and do not end while others begin."""

DECODE_WINDOW_S = 0.6

DECODE_STEPS = 8
"""Least length of the window in which steps are counted, in seconds and in steps."""

SERVICE_POINTS = ((48, 0.5), (48, 2.0), (224, 3.0))
"""Prompt tokens under load, also timed alone, and the sequences that decode then holds: few, so
that it never keeps prefill waiting."""

SERVICE_CLIENTS = 16
"""Clients under load; many more than decode holds, so that prefill always has the next prompt."""

PATH_TOKENS = (16, 224)

PATH_REPEATS = 4

PATH_PAUSE_S = 0.2
"""Pause before each request, as on an idle cluster: cold caches, sleeping threads."""

DISTURBED_FRACTION = 0.15
"""Share of the cores taken by other processes beyond which a point is timed once more."""

FIRST_LIMIT_S = 600.0
"""Limit of the warm-up, before the machine's speed is known."""

LIMIT_FACTOR = 10.0

LEAST_LIMIT_S = 60.0
"""Limit of a point, as a multiple of its time at the slowest speed measured, and at least 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One row of steps.csv, without machine and date."""

    phase: str
    tokens: int = 0
    batch: float = 0.0
    context: float = 0.0
    other_busy_fraction: float = 0.0
    other_batch: float = 0.0
    joins: float = 0.0
    others_fraction: float = 0.0
    repeats: int
    seconds: float


GridPoints = tuple[GridPoint, ...]


class GridStep(NamedTuple):
    """
    One point of the grid; limits and the time left are proportional to its *tokens*.

    It is given the rows before it.
    """

    name: str
    tokens: int
    run: Callable[[TimingClient, Sequence[GridPoint]], Awaitable[GridPoints]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """
    What the engines take, and the grid covers.

    Attributes:
        context_tokens: of the longest sequence.
        sequences: of the largest decode batch.
        kv_tokens: that the KV cache of decode holds.
    """

    context_tokens: int
    sequences: int
    kv_tokens: int

    @classmethod
    def of(cls, deployment: Deployment) -> Extent:
        """Return what the engines of a prefill and a decode pool take."""
        decode = deployment.pool("decode")
        return cls(
            context_tokens=deployment.engine.max_model_len,
            sequences=decode.max_num_seqs,
            kv_tokens=planned_limits(deployment, decode).max_tokens,
        )

    def sequence_tokens(self, batch: int) -> int:
        """Return the tokens of each of *batch* sequences that the KV cache holds together."""
        return min(self.context_tokens, self.kv_tokens // batch)

    @property
    def prefill_tokens(self) -> tuple[int, ...]:
        """Return the lengths of the prompts, ascending."""
        longest = self.context_tokens - 2  # a token of the answer, and one that is asked for
        lengths = [tokens for tokens in PREFILL_TOKENS if tokens <= longest]
        while lengths and 2 * lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        if max(lengths, default=0) > PREFILL_TOKENS[-1] and longest > FAR * lengths[-1]:
            lengths.append(longest)
        return tuple(lengths)

    @property
    def path_tokens(self) -> tuple[int, ...]:
        """Return the lengths of the prompts whose whole path is timed, ascending."""
        if self.context_tokens <= 2 * PREFILL_TOKENS[-1]:
            return PATH_TOKENS
        return (*PATH_TOKENS[:-1], self.context_tokens // 2)  # what a pull takes is beyond noise

    @property
    def decode_points(self) -> tuple[tuple[int, int], ...]:
        """Return batch and context: long ones of the smallest and the largest batch."""
        batches = [1]
        while batches[-1] * DECODE_FACTOR < self.sequences:
            batches.append(batches[-1] * DECODE_FACTOR)
        batches += [self.sequences] if self.sequences > 1 else []
        points = []
        for batch in batches:
            points.append((batch, SHORT_CONTEXT))
            if batch in {1, self.sequences}:
                points.append((batch, int(LONG_CONTEXT * self.sequence_tokens(batch))))
        return tuple(points)


def grid(extent: Extent) -> tuple[GridStep, ...]:
    """Return every point: each pool alone, both under load, and the idle path."""
    steps = []
    for tokens in extent.prefill_tokens:
        prompts = PREFILL_PROMPTS if tokens <= PREFILL_TOKENS[-1] else LONG_PROMPTS
        timing = partial(_prefill, tokens=tokens, prompts=prompts)
        name = f"prefill of {tokens} tokens, alone"
        steps.append(GridStep(name, prompts * tokens, timing))
    for batch, context in extent.decode_points:
        # In a cache without room for a window of short contexts sequences are preempted.
        limit = max(2 * DECODE_STEPS, extent.sequence_tokens(batch) - context)
        timing = partial(time_decode, batch=batch, context=context, limit_tokens=limit)
        name = f"decode batch {batch} at {context} tokens, alone"
        steps.append(GridStep(name, batch * (context + DECODE_STEPS), timing))
    for tokens, sequences in SERVICE_POINTS:
        timing = partial(_in_service, tokens=tokens, sequences=sequences)
        name = f"both pools, {tokens} tokens in and {sequences:g} sequences in decode"
        steps.append(GridStep(name, 2 * SERVICE_CLIENTS * (tokens + SERVICE_TOKENS), timing))
    for tokens in extent.path_tokens:
        timing = partial(_path, tokens=tokens)
        steps.append(GridStep(f"path with {tokens} tokens", 2 * PATH_REPEATS * tokens, timing))
    return tuple(steps)


async def time_grid(
    client: TimingClient,
    extent: Extent,
    report: Callable[[str], None],
    clock: Callable[[], CpuTimes],
) -> GridPoints:
    """
    Time every point of the grid; *report* receives a line for each.

    A point disturbed by other processes, as *clock* (processor time) shows, is timed once more, and
    the less disturbed time counts.

    Raises:
        TargetFailed: a request failed, or a point took much longer than the others.
    """
    steps = grid(extent)
    started = time.monotonic()
    report("warm-up")
    await _within(_warm_up(client), FIRST_LIMIT_S, "the warm-up")
    slowest = (time.monotonic() - started) / WARM_UP_TOKENS
    warm = time.monotonic()
    rows: list[GridPoint] = []
    for number, step in enumerate(steps, 1):
        spent = time.monotonic() - warm
        done = sum(point.tokens for point in steps[: number - 1])
        left_s = spent / done * sum(point.tokens for point in steps[number - 1 :]) if done else 0.0
        about = f", about {left_s:.0f} s left" if left_s else ""
        report(f"measuring {number} of {len(steps)}: {step.name} ({spent:.0f} s spent{about})")
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * slowest * step.tokens)
        timed, took_s = await _timed(client, step, rows, limit_s, clock)
        slowest = max(slowest, took_s / step.tokens)
        if timed[0].others_fraction > DISTURBED_FRACTION:
            again, _ = await _timed(client, step, rows, limit_s, clock)
            timed = min(timed, again, key=lambda rows: rows[0].others_fraction)
        rows += timed
    return tuple(rows)


async def _timed(
    client: TimingClient,
    step: GridStep,
    before: Sequence[GridPoint],
    limit_s: float,
    clock: Callable[[], CpuTimes],
) -> tuple[GridPoints, float]:
    start = clock()
    rows = await _within(step.run(client, before), limit_s, step.name)
    end = clock()
    others = others_fraction(start, end)
    return tuple(replace(row, others_fraction=others) for row in rows), end.at_s - start.at_s


async def _within(timing: Awaitable[GridPoints], limit_s: float, what: str) -> GridPoints:
    try:
        return await asyncio.wait_for(timing, limit_s)
    except TimeoutError:
        raise TargetFailed(f"{what} did not end within {limit_s:.0f} s") from None


async def _warm_up(client: TimingClient) -> GridPoints:
    await asyncio.gather(*(client.stream(32, 16) for _ in range(WARM_UP_STREAMS)))
    for tokens in PATH_TOKENS:
        await client.stream(tokens, 4)
    return ()


WARM_UP_STREAMS = 8

WARM_UP_TOKENS = WARM_UP_STREAMS * (32 + 16) + sum(PATH_TOKENS) + 4 * len(PATH_TOKENS)


async def _prefill(
    client: TimingClient, _before: Sequence[GridPoint], *, tokens: int, prompts: int
) -> GridPoints:
    done: list[float] = []

    async def run_client() -> None:
        for _ in range(prompts // PREFILL_AT_ONCE):
            await client.prefill(tokens)
            done.append(time.monotonic())

    await asyncio.gather(*(run_client() for _ in range(PREFILL_AT_ONCE)))
    # From the first completion to the last the pool was never without a prompt.
    ends = np.sort(done)
    repeats = len(ends) - 1
    seconds = float((ends[-1] - ends[0]) / repeats)
    return (GridPoint(phase="prefill", tokens=tokens, repeats=repeats, seconds=seconds),)


async def _in_service(
    client: TimingClient, before: Sequence[GridPoint], *, tokens: int, sequences: float
) -> GridPoints:
    """
    Time both pools at once, through the endpoint, at the capacity of prefill.

    Prefill always has a prompt; decode has about as many *sequences* as are wanted, because answers
    are as long as prompts and steps timed alone make them (Little's law).
    """
    answer = _answer_tokens(before, tokens=tokens, sequences=sequences)
    streams: list[TimedStream] = []

    async def run_client() -> None:
        for _ in range(2):
            streams.append(await client.stream(tokens, answer))  # noqa: PERF401  (one by one)

    await asyncio.gather(*(run_client() for _ in range(SERVICE_CLIENTS)))
    firsts = np.sort([stream.stamps[0][0] for stream in streams])
    # The last requests have no successors: the pools are saturated for the first ones only.
    start, end = firsts[0], firsts[len(firsts) * 3 // 4]
    repeats = len(firsts) * 3 // 4
    spans = np.array([(stream.stamps[0][0], stream.stamps[-1][0]) for stream in streams])
    clipped = np.clip(spans, start, end)
    held = float(np.sum(clipped[:, 1] - clipped[:, 0]) / (end - start))
    stamps = np.array([at for timed in streams for at, _ in timed.stamps[1:] if start < at <= end])
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


SERVICE_TOKENS = 35
"""Most tokens of an answer under load."""


def _answer_tokens(before: Sequence[GridPoint], *, tokens: int, sequences: float) -> int:
    prompts = [(row.tokens, row.seconds) for row in before if row.phase == "prefill"]
    steps = [row.seconds for row in before if row.phase == "decode"]
    prompt_s = float(np.interp(tokens, *np.transpose(sorted(prompts)))) if prompts else 0.0
    step_s = steps[0] if steps else np.inf
    return int(np.clip(round(1 + sequences * prompt_s / step_s), 2, SERVICE_TOKENS))


def _covered(spans: NDArray[np.float64]) -> float:
    covered_s, until_s = 0.0, -np.inf
    for start, end in spans[np.argsort(spans[:, 0])]:
        covered_s += max(0.0, end - max(start, until_s))
        until_s = max(until_s, end)
    return float(covered_s)


async def time_decode(
    client: TimingClient,
    _before: Sequence[GridPoint],
    *,
    batch: int,
    context: int,
    limit_tokens: int,
) -> GridPoints:
    """Time a decode step of exactly *batch* sequences, of streams that end by *limit_tokens*."""
    streams = [TimedStream() for _ in range(batch)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(client.stream(context, limit_tokens, stream))
                for stream in streams
            ]
            for stream in streams:
                await stream.started.wait()
            start = end = time.monotonic()
            read = sum(stream.tokens for stream in streams) / batch
            tokens = 0
            while end < start + DECODE_WINDOW_S or tokens < DECODE_STEPS * batch:
                await asyncio.sleep(DECODE_WINDOW_S / 4)
                end = time.monotonic()
                tokens = sum(stream.tokens_between(start, end) for stream in streams)
                if all(task.done() for task in tasks):
                    break
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return (
        GridPoint(
            phase="decode",
            batch=batch,
            context=context + read + tokens / batch / 2,
            repeats=tokens // batch,
            seconds=(end - start) * batch / tokens,
        ),
    )


async def _path(client: TimingClient, _before: Sequence[GridPoint], *, tokens: int) -> GridPoints:
    prefill_only: list[float] = []
    whole: list[float] = []
    for _ in range(PATH_REPEATS):
        await asyncio.sleep(PATH_PAUSE_S)
        prefill_only.append(await client.prefill(tokens))
        await asyncio.sleep(PATH_PAUSE_S)
        whole.append((await client.stream(tokens, 2)).ttft_s)
    return tuple(
        GridPoint(
            phase=phase, tokens=tokens, repeats=PATH_REPEATS, seconds=float(np.median(seconds))
        )
        for phase, seconds in (("request", prefill_only), ("path", whole))
    )
