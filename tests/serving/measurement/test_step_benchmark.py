"""The grid gives back the step times of an endpoint whose step times are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from minicluster.contention import CpuTimes
from minicluster.errors import TargetFailed
from serving.measurement import step_benchmark
from serving.measurement.step_benchmark import Extent, GridPoint, TimedStream, TimingClient
from tests.serving.virtual_time import run

What = Callable[[TimingClient], Coroutine[None, None, object]]

SMALL = Extent(context_tokens=402, sequences=3, kv_tokens=10_000)
PREFILL_S = 0.0002
STEP_S = 0.02


@dataclass
class Endpoint:
    """One prompt at a time in prefill, then all sequences together, one token a step."""

    breaks_after: int | None = None
    """Tokens after which streams break off."""

    step_s: float = STEP_S
    hangs: bool = False
    """Never answer a prompt."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prefill(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self.turn:
            await asyncio.sleep(1e6 if self.hangs else PREFILL_S * len(body["prompt"]))
        return web.json_response({})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["ignore_eos"]  # an answer has the length that was asked for
        async with self.turn:
            await asyncio.sleep(PREFILL_S * len(body["prompt"]))
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for token in range(1, body["max_tokens"] + 1):
            if self.breaks_after is not None and token > self.breaks_after:
                break
            chunk = {"choices": [{"text": "x"}], "usage": {"completion_tokens": token}}
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(self.step_s)
        return answer


def against(endpoint: Endpoint, what: What) -> object:
    async def serve() -> object:
        app = web.Application()
        app.router.add_post("/internal/prefill", endpoint.prefill)
        app.router.add_post("/v1/completions", endpoint.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                return await what(
                    TimingClient(
                        session=session,
                        base_url=f"http://127.0.0.1:{port}",
                        model="m",
                        vocab_size=1000,
                        rng=np.random.default_rng(0),
                    )
                )
        finally:
            await runner.cleanup()

    return run(serve())


def clock_of(*others: float) -> Callable[[], CpuTimes]:
    """Return a processor clock by which each timing of a second loses that share to others."""
    busy_s = [0.0, *accumulate([*others, *[0.0] * 100])]
    ticks = chain.from_iterable((start, start + 1) for start in range(100))
    times = (CpuTimes(at_s=at, busy_s=busy_s[at], ours_s=0.0, cores=1) for at in ticks)
    return lambda: next(times)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_benchmark, "PREFILL_TOKENS", (50, 400))
    monkeypatch.setattr(step_benchmark, "PATH_TOKENS", (50,))
    monkeypatch.setattr(step_benchmark, "SERVICE_POINTS", ((200, 0.5), (200, 9.5)))


def timed(others: tuple[float, ...] = ()) -> tuple[list[GridPoint], list[str]]:
    """Time the grid against the endpoint; return the rows, and what was told."""
    told: list[str] = []
    points = against(
        Endpoint(),
        lambda watch: step_benchmark.time_grid(watch, SMALL, told.append, clock_of(*others)),
    )
    assert isinstance(points, tuple)
    return [*points], told


@pytest.mark.parametrize("kv_tokens", [10_000, 600])
def test_timed_sequences_fit_into_the_kv_cache_together(kv_tokens: int) -> None:
    """Those of a batch end before a full cache would preempt one; alone, at the context's end."""
    extent = replace(SMALL, kv_tokens=kv_tokens)
    timings = [step.run.keywords for step in step_benchmark.grid(extent) if "batch" in step.name]  # type: ignore[attr-defined]
    ends = {timing["batch"]: timing["context"] + timing["limit_tokens"] for timing in timings}
    assert ends == {1: 402, 3: min(402, kv_tokens // 3)}


async def decode_of(client: TimingClient, batch: int, *, limit_tokens: int) -> object:
    """Time a decode step of short sequences."""
    extent = {"batch": batch, "context": 16, "limit_tokens": limit_tokens}
    return await step_benchmark.time_decode(client, (), **extent)


@pytest.mark.usefixtures("small")
def test_every_point_of_the_grid_is_timed() -> None:
    """Each length and batch once, alone and in service; steps near what the endpoint takes."""
    points, told = timed()

    assert [(p.phase, p.tokens) for p in points if not p.other_busy_fraction] == [
        ("prefill", 50),
        ("prefill", 400),
        *[("decode", 0)] * 4,
        ("request", 50),
        ("path", 50),
    ]
    short, long = points[:2]
    # Sleeping takes at least as long as asked; a busy machine makes it longer, never shorter.
    assert long.seconds >= 400 * PREFILL_S
    assert long.seconds > short.seconds
    steps = [p.seconds for p in points if p.phase == "decode"]
    assert min(steps) > 0.8 * STEP_S
    few, many = (p for p in points if p.phase == "prefill" and p.other_busy_fraction)
    # Little's law: a prompt every 40 ms, each with one gap of 20 ms in decode, or with nineteen.
    assert few.other_batch == pytest.approx(1 * STEP_S / few.seconds, rel=0.3)
    assert many.other_batch == pytest.approx(19 * STEP_S / many.seconds, rel=0.3)
    assert few.other_busy_fraction < 0.8 < many.other_busy_fraction <= 1.0
    assert told[0] == "warm-up"
    assert told[-1].startswith("measuring 9 of 9: path with 50 tokens (")
    assert "about" in told[-1]


@pytest.mark.usefixtures("small")
def test_a_disturbed_point_is_timed_once_more() -> None:
    """The less disturbed of two timings counts, with what others took then; others stay one."""
    points, _ = timed((0.0, 0.4, 0.3, 0.0, 0.5, 0.6))

    assert [p.others_fraction for p in points[:4]] == pytest.approx([0.0, 0.3, 0.0, 0.5])


def test_a_slow_machine_has_time() -> None:
    """Steps are counted until there are eight, however long they take."""
    slow = Endpoint(step_s=0.4)
    points = against(slow, lambda watch: decode_of(watch, 2, limit_tokens=480))
    assert isinstance(points, tuple)
    assert points[0].repeats >= 8
    assert points[0].seconds == pytest.approx(0.4, rel=0.1)


def test_streams_that_end_early_end_the_window() -> None:
    """What they brought is counted, and nothing is waited for."""
    points = against(Endpoint(), lambda to: decode_of(to, 2, limit_tokens=4))
    assert isinstance(points, tuple)
    assert 0 < points[0].repeats <= 4


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("endpoint", "what", "says"),
    [
        (
            Endpoint(hangs=True),
            lambda watch: step_benchmark.time_grid(watch, SMALL, lambda _: None, clock_of()),
            "prefill of 50 tokens, alone did not end within 60 s",
        ),
        (Endpoint(breaks_after=3), lambda watch: watch.stream(4, 8), "3 of 8 tokens"),
        (Endpoint(), lambda to: replace(to, base_url=f"{to.base_url}/lost").prefill(3), "404"),
    ],
    ids=["hangs", "breaks off", "an error answer"],
)
def test_what_cannot_be_timed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint, what: What, says: str
) -> None:
    """A point after ten times what it should take, and a minute; too few tokens; no such route."""
    monkeypatch.setattr(step_benchmark, "WARM_UP_TOKENS", 10_000_000)
    with pytest.raises(TargetFailed, match=says):
        against(endpoint, what)


def test_tokens_between_counts_by_total() -> None:
    """A chunk that carries several tokens counts for all of them."""
    stream = TimedStream(stamps=[(1.0, 1), (2.0, 4), (3.0, 5)])

    assert stream.tokens_between(1.0, 3.0) == 4
    assert stream.tokens_between(0.0, 1.5) == 1
    assert stream.tokens_between(2.0, 2.5) == 0
