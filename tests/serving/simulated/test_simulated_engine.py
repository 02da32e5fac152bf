"""Simulated engines take the time that `sizing` simulates, request by request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.lora_slots import NO_ADAPTER
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.engine import EngineRules
from minicluster.specs.step import StepCoefficients
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.sources import RequestSource, drawn
from serving.simulated.engine import EngineClock, EngineDied, EngineLoad, Sequence, SimulatedEngine
from serving.simulated.kv_transfer import AgreedPull, KvLost, KvSink, KvSource
from sizing.simulation.outcome import simulate_system
from sizing.simulation.system import Path, SimulatedPool, System
from tests.serving.virtual_time import run as run_virtual

STEP = PlannedStep(
    StepCoefficients(
        base_s=3e-3,
        stream_s=7e-3,
        per_prefill_token_s=5e-5,
        per_sequence_s=3e-5,
        per_pair_s=1e-9,
        per_context_token_s=2e-8,
        max_tokens=8192,
        max_batch=256,
        max_context_tokens=8192,
        error_fraction=0.0,
    )
)
LIMITS = EngineLimits(max_num_seqs=32, max_num_batched_tokens=2048, kv_blocks=900, block_size=16)
PATH = Path(request_s=0.0, transfer_base_s=2e-3, transfer_per_token_s=1e-5)

LORA = LoraLimits(slots=2, load_s=0.0123)
ADAPTERS = 5
either_lora = st.sampled_from([None, LORA])

ONE_BY_ONE_S = 1e-8
"""Between prompts that end in one step, so that they reach decode in the order of their engines."""


def load(rate: float, count: int, seed: int, lora: LoraLimits | None = None) -> Arrivals:
    """Return requests, of adapters where there are slots."""
    workload = WorkloadSpec(
        requests_per_s=rate,
        input_tokens=Lengths(distribution="uniform", low=20, high=900),
        output_tokens=Lengths(distribution="uniform", low=1, high=60),
        lora_adapters=0 if lora is None else ADAPTERS,
    )
    return drawn(workload, RequestSource(), count=count, seed=seed)


def adapter_of(arrivals: Arrivals, at: int) -> int:
    return NO_ADAPTER if arrivals.adapter is None else int(arrivals.adapter[at])


async def follow(sequence: Sequence, clock: EngineClock) -> tuple[float, float, list[int]]:
    """Return when the first and the last token came, and how many there were each time."""
    seen, first_s = [0], 0.0
    while not sequence.done:
        seen.append(await sequence.more_than(seen[-1]))
        first_s = first_s or clock.now_s()
    return first_s, clock.now_s(), seen


class Pair:
    """A prefill and a decode engine, which pulls KV caches from it after a pause."""

    def __init__(
        self,
        slowdown: float = 1.0,
        limits: EngineLimits = LIMITS,
        lanes: int = 1,
        pause_s: Callable[[], float] = lambda: 0.0,
        lora: LoraLimits | None = None,
        ranks: int = 1,
    ) -> None:
        self.clock = EngineClock(slowdown)
        make = partial(
            *(SimulatedEngine, limits, STEP, self.clock), lanes=lanes, ranks=ranks, lora=lora
        )
        self.prefill, self.decode = make(prefill_only=True), make()
        self.source = KvSource(self.prefill, PATH)
        self._sink = KvSink(self.decode, self._fetch)
        self._pause_s = pause_s

    async def _fetch(self, place: Mapping[str, Any], start_in_s: float) -> AgreedPull:
        await asyncio.sleep(self._pause_s())
        return self.source.fetch(place["key"], start_in_s)

    async def prefilled(self, tokens: int, lease_s: float = 60.0) -> str:
        """Return the key of a prompt that prefill has computed."""
        prompt = self.prefill.add(tokens, (), 1)
        await prompt.more_than(0)
        return self.source.keep(prompt, lease_s)

    def pull(
        self, key: str, tokens: int, answer: int, adapter: int = NO_ADAPTER, rank: int = 0
    ) -> Sequence:
        return self._sink.add(tokens, (), answer, {"key": key}, adapter=adapter, rank=rank)

    def is_empty(self) -> bool:
        return self.prefill.num_requests == self.decode.num_requests == 0


async def mixed(arrivals: Arrivals, engine: SimulatedEngine, ranks: int = 1) -> np.ndarray:
    """Send requests to ranks in turn; return when each one's first and last token came."""

    async def send(at: int) -> tuple[float, float]:
        await engine.clock.sleep(float(arrivals.due_s[at]))
        lengths = int(arrivals.input_tokens[at]), (), int(arrivals.output_tokens[at])
        sequence = engine.add(*lengths, adapter=adapter_of(arrivals, at), rank=at % ranks)
        first_s, last_s, seen = await follow(sequence, engine.clock)
        assert seen == list(range(seen[-1] + 1)), "every token is seen when it comes"
        return first_s, last_s

    times = await asyncio.gather(*(send(at) for at in range(len(arrivals))))
    assert not engine.num_requests
    return np.array(times)


async def split(
    arrivals: Arrivals,
    prefill: SimulatedEngine,
    decode: SimulatedEngine,
    routes: Iterable[tuple[int, int]],
    path: Path = PATH,
) -> np.ndarray:
    """Send each request through one rank of each engine, as `mixed`."""
    kept = KvSource(prefill, path)

    async def fetch(place: Mapping[str, Any], start_in_s: float) -> AgreedPull:
        return kept.fetch(place["key"], start_in_s)

    pulls = KvSink(decode, fetch)

    async def send(at: int, source: int, sink: int) -> tuple[float, float]:
        tokens, clock = int(arrivals.input_tokens[at]), decode.clock
        adapter = adapter_of(arrivals, at)
        await clock.sleep(float(arrivals.due_s[at]))
        prompt = prefill.add(tokens, (), 1, adapter=adapter, rank=source)
        await prompt.more_than(0)
        await clock.sleep(source * ONE_BY_ONE_S)
        place = {"key": kept.keep(prompt, 60.0)}
        answer = int(arrivals.output_tokens[at])
        sequence = pulls.add(tokens, (), answer, place, adapter=adapter, rank=sink)
        return (await follow(sequence, clock))[:2]

    sent = zip(range(len(arrivals)), routes, strict=False)
    times = await asyncio.gather(*(send(at, *route) for at, route in sent))
    assert not prefill.num_requests + decode.num_requests
    return np.array(times)


@given(
    seed=st.integers(0, 1000),
    slowdown=st.sampled_from([1.0, 3.7, 50.0]),
    kv_blocks=st.sampled_from([120, 900]),
    lora=either_lora,
)
def test_an_engine_takes_the_time_that_is_simulated(
    seed: int, slowdown: float, kv_blocks: int, lora: LoraLimits | None
) -> None:
    """With too few blocks as well, where requests are preempted, and too few slots for adapters."""
    arrivals, limits = load(30.0, 40, seed, lora), replace(LIMITS, kv_blocks=kv_blocks)
    pool = SimulatedPool(replicas=1, limits=limits, step=STEP, lora=lora)
    expected = simulate_system(System(decode=pool, path=Path()), arrivals, seed=0)

    async def run() -> np.ndarray:
        engine = SimulatedEngine(limits, STEP, EngineClock(slowdown), lora=lora)
        return await mixed(arrivals, engine)

    times = run_virtual(run())

    assert times[:, 0] - arrivals.due_s == pytest.approx(expected.ttft_s, rel=1e-6)
    assert times[:, 1] - arrivals.due_s == pytest.approx(expected.e2e_s, rel=1e-6)


@given(seed=st.integers(0, 1000), slowdown=st.sampled_from([1.0, 20.0]), lora=either_lora)
def test_split_engines_take_the_time_that_is_simulated(
    seed: int, slowdown: float, lora: LoraLimits | None
) -> None:
    arrivals = load(20.0, 40, seed, lora)
    pool = SimulatedPool(replicas=1, limits=LIMITS, step=STEP, lora=lora)
    expected = simulate_system(System(decode=pool, prefill=pool, path=PATH), arrivals, seed=0)

    async def run() -> np.ndarray:
        pair = Pair(slowdown, lora=lora)
        return await split(arrivals, pair.prefill, pair.decode, repeat((0, 0)))

    times = run_virtual(run())

    assert times[:, 0] - arrivals.due_s == pytest.approx(expected.ttft_s, rel=1e-6)
    assert times[:, 1] - arrivals.due_s == pytest.approx(expected.e2e_s, rel=1e-6)


def test_equal_beginnings_are_computed_once() -> None:
    async def second_ttft_s(blocks: tuple[int, ...]) -> float:
        clock = EngineClock(1.0)
        engine = SimulatedEngine(LIMITS, STEP, clock)
        await engine.add(800, tuple(range(50)), 1).more_than(0)
        begun_s = clock.now_s()
        await engine.add(800, blocks, 1).more_than(0)
        return clock.now_s() - begun_s

    same = run_virtual(second_ttft_s(tuple(range(50))))
    other = run_virtual(second_ttft_s(tuple(range(50, 100))))

    assert other == pytest.approx(STEP.step_s([(800, 0)], 0, 0))
    assert same == pytest.approx(STEP.step_s([(16, 784)], 0, 0))


def test_requests_for_the_model_itself_wait_for_no_slot() -> None:
    """Nor for a copy: they are as fast as on an engine without slots, and take none."""

    async def ttft_s(adapter: int, lora: LoraLimits | None) -> float:
        engine = SimulatedEngine(LIMITS, STEP, EngineClock(1.0), lora=lora)
        holds = engine.add(100, (), 20, adapter=NO_ADAPTER if lora is None else 0)
        await holds.more_than(0)
        begun_s = engine.clock.now_s()
        await engine.add(100, (), 5, adapter=adapter).more_than(0)
        assert holds.done == (adapter > 0)
        return engine.clock.now_s() - begun_s

    one = replace(LORA, slots=1)
    alone_s = run_virtual(ttft_s(NO_ADAPTER, None))
    assert run_virtual(ttft_s(NO_ADAPTER, one)) == pytest.approx(alone_s)
    assert run_virtual(ttft_s(0, one)) == pytest.approx(alone_s)
    assert run_virtual(ttft_s(1, one)) > alone_s + LORA.load_s


@pytest.mark.parametrize("kv_reserved_fraction", [0.0, 1.0])
def test_an_aborted_request_gives_back_its_blocks(kv_reserved_fraction: float) -> None:
    """And those that were kept for its output, where an engine does so."""

    async def run() -> None:
        clock = EngineClock(1.0)
        limits = replace(
            LIMITS,
            kv_blocks=8,
            max_num_seqs=1,
            rules=EngineRules(kv_reserved_fraction=kv_reserved_fraction),
        )
        engine = SimulatedEngine(limits, STEP, clock)
        running, waiting = engine.add(100, (), 20), engine.add(100, (), 20)
        await running.more_than(3)
        engine.abort(waiting)
        engine.abort(running)
        third = engine.add(100, (), 20)
        assert await third.more_than(19) == 20
        assert engine.num_requests == 0

    run_virtual(run())


def test_a_frozen_engine_goes_on_where_it_stood() -> None:
    async def e2e_s(frozen_s: float) -> float:
        clock, loop = EngineClock(2.0), asyncio.get_running_loop()
        engine = SimulatedEngine(LIMITS, STEP, clock)
        sequence = engine.add(100, (), 20)
        await sequence.more_than(5)
        engine.freeze(frozen_s)
        await sequence.more_than(19)
        return loop.time()

    assert run_virtual(e2e_s(7.0)) == pytest.approx(run_virtual(e2e_s(0.0)) + 7.0)


def test_a_dead_engine_fails_what_it_has_and_takes_no_more() -> None:
    async def run() -> None:
        engine = SimulatedEngine(LIMITS, STEP, EngineClock(1.0))
        sequence = engine.add(100, (), 20)
        await sequence.more_than(2)
        engine.fail()
        with pytest.raises(EngineDied):
            await sequence.more_than(3)
        with pytest.raises(EngineDied):
            engine.add(100, (), 20)

    run_virtual(run())


def test_a_prompt_whose_kv_cache_is_lost_is_computed_by_decode() -> None:
    async def ttft_s(*, lost: bool) -> float:
        pair = Pair()
        pair.source.fail_next = int(lost)
        key = await pair.prefilled(500)
        begun_s = pair.clock.now_s()
        sequence = pair.pull(key, 500, 3)
        await sequence.more_than(0)
        found = pair.clock.now_s() - begun_s
        assert await sequence.more_than(2) == 3
        assert pair.is_empty()
        return found

    transfer_s = PATH.transfer_base_s + 500 * PATH.transfer_per_token_s
    assert run_virtual(ttft_s(lost=False)) == pytest.approx(transfer_s + STEP.step_s([], 1, 499))
    assert run_virtual(ttft_s(lost=True)) == pytest.approx(STEP.step_s([(500, 0)], 0, 0))


def test_a_pull_that_is_cancelled_is_lost_as_any_other() -> None:
    """Its request is neither forgotten nor waits for ever: decode computes the prompt."""

    def cancelled() -> float:
        raise asyncio.CancelledError

    async def run() -> None:
        pair = Pair(pause_s=cancelled)
        sequence = pair.pull(await pair.prefilled(500, lease_s=3.0), 500, 3)
        assert await sequence.more_than(2) == 3
        assert sequence.kv_lost
        await pair.clock.sleep(3.0)
        assert pair.is_empty()

    run_virtual(run())


def test_a_kv_cache_that_is_not_fetched_is_dropped() -> None:
    async def run() -> None:
        pair = Pair()
        await pair.prefilled(500, lease_s=3.0)
        await pair.clock.sleep(2.9)
        assert pair.prefill.num_requests == 1
        await pair.clock.sleep(0.2)
        assert pair.prefill.num_requests == 0

    run_virtual(run())


def test_a_request_that_is_aborted_in_its_pull_ends_after_it() -> None:
    """The blocks still arrive; then they are free at both ends. None is fetched twice."""

    async def run() -> None:
        pair = Pair()
        key = await pair.prefilled(500)
        pulled = pair.pull(key, 500, 30)
        await pair.clock.sleep(1e-3)
        pair.decode.abort(pulled)
        assert not pulled.done
        with pytest.raises(KvLost):
            pair.source.fetch(key, 0.0)
        await pair.clock.sleep(1.0)
        assert pulled.done
        assert pulled.num_tokens <= 1
        assert pair.is_empty()

    run_virtual(run())


async def harassed(seed: int, kv_blocks: int, ranks: int) -> tuple[EngineLoad, EngineLoad]:
    """Return what two engines have inside after requests left, froze and lost KV caches."""
    rng = random.Random(seed)  # noqa: S311
    limits = replace(LIMITS, kv_blocks=kv_blocks, max_num_seqs=6)

    def pause_s() -> float:
        if rng.random() < 0.05:
            raise asyncio.CancelledError
        return rng.choice([0.0, 0.05])

    pair = Pair(limits=limits, lanes=2, pause_s=pause_s, lora=LORA, ranks=ranks)

    async def wait(engine: SimulatedEngine, sequence: Sequence, tokens: int) -> bool:
        """Wait for tokens as one that may leave; say whether it has stayed."""
        limit_s = rng.choice([0.0, 0.02, 0.1, 60.0, 60.0])
        try:
            async with asyncio.timeout(limit_s):
                while await sequence.more_than(sequence.num_tokens) < tokens:
                    pass
        except TimeoutError:
            engine.abort(sequence)
            return False
        return True

    async def send() -> None:
        await pair.clock.sleep(rng.uniform(0, 2))
        pair.source.fail_next += rng.random() < 0.2
        tokens, answer = rng.randint(1, 900), rng.randint(1, 60)
        adapter, rank = rng.randint(NO_ADAPTER, ADAPTERS), rng.randrange(ranks)
        blocks = tuple(range(tokens // 16))
        prompt = pair.prefill.add(tokens, blocks, 1, adapter=adapter, rank=rank)
        if await wait(pair.prefill, prompt, 1):
            key = pair.source.keep(prompt, lease_s=rng.choice([0.01, 5.0]))
            await wait(
                pair.decode, pair.pull(key, tokens, answer, adapter, rng.randrange(ranks)), answer
            )

    asyncio.get_running_loop().call_later(rng.uniform(0, 2), pair.prefill.freeze, 0.3)
    await asyncio.gather(*(send() for _ in range(40)))
    await pair.clock.sleep(60.0)
    return pair.prefill.load(), pair.decode.load()


@given(
    seed=st.integers(0, 10_000),
    kv_blocks=st.sampled_from([60, 120, 900]),
    ranks=st.sampled_from([1, 3]),
)
def test_nothing_stays_inside_however_requests_end(seed: int, kv_blocks: int, ranks: int) -> None:
    """They leave before, in and after steps and pulls; KV caches are lost, leases run out."""
    empty = EngineLoad(running=0, waiting=0, kv_blocks=0)
    assert run_virtual(harassed(seed, kv_blocks, ranks)) == (empty, empty)
