"""Simulated ranks of a group take the time that `sizing` simulates, request by request."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.step_seconds import PlannedStep
from serving.simulated.clock import EngineClock
from serving.simulated.engine import EngineDied, SimulatedEngine
from serving.simulated.gang import GangIncompleteError, join_gang
from serving.simulated.group import Group, Lockstep
from sizing.simulation.outcome import simulate
from sizing.simulation.system import Path, SimulatedPool, System
from tests.serving.virtual_time import run as run_virtual

from .test_simulated_engine import LIMITS, STEP, either_lora, load, mixed, split

BY_BATCH = PlannedStep(
    replace(STEP.spec, stream_s=1e-3, per_sequence_s=2e-3, per_context_token_s=0.0)
)
"""The slowest rank stays the slowest until a batch changes: `sizing` looks no further (Q11)."""

PATH = Path(request_s=0.0, transfer_base_s=8.1234567e-3, transfer_per_token_s=1e-8)
"""
Little time on NICs: `sizing` gives a source's NIC to the pull that begins first, and a simulated
source to the one that was agreed on first. No whole number of steps, and no two pulls as long as
each other: ranks begin pulls at one moment, and of those that end at one either may be first.
"""

NIC_S = 2e-5
"""Tolerance: twice the time of the longest prompt on a NIC; a step takes 250 times as long."""

RANKS = 3

Groups = Callable[[], Awaitable[Sequence[Group]]]
"""Makes what each rank of a group is given."""


async def in_one_process() -> list[Group]:
    return [Lockstep(RANKS)] * RANKS


async def by_sockets() -> list[Group]:
    gang = uuid.uuid4().hex
    return await asyncio.gather(*(join_gang(gang, rank, RANKS) for rank in range(RANKS)))


either_way = pytest.mark.parametrize("groups", [in_one_process, by_sockets])


@asynccontextmanager
async def ranks(
    limits: EngineLimits,
    step: PlannedStep,
    slowdown: float,
    *,
    prefill_only: bool = False,
    groups: Groups = in_one_process,
    lora: LoraLimits | None = None,
) -> AsyncIterator[list[SimulatedEngine]]:
    """Have one group, which fails in the end."""
    engines = [
        SimulatedEngine(
            limits,
            step,
            EngineClock(slowdown),
            prefill_only=prefill_only,
            group=group,
            lora=lora,
        )
        for group in await groups()
    ]
    try:
        yield engines
    finally:
        engines[0].fail()
        await asyncio.sleep(1.0)
        assert all(engine.died for engine in engines)


@either_way
@given(
    seed=st.integers(0, 1000),
    slowdown=st.sampled_from([1.0, 50.0]),
    kv_blocks=st.sampled_from([120, 900]),
    lora=either_lora,
)
def test_a_group_takes_the_time_that_is_simulated(
    groups: Groups, seed: int, slowdown: float, kv_blocks: int, lora: LoraLimits | None
) -> None:
    """With too few blocks as well, where requests are preempted, and too few slots for adapters."""
    arrivals, limits = load(60.0, 40, seed, lora), replace(LIMITS, kv_blocks=kv_blocks)
    pool = SimulatedPool(replicas=RANKS, limits=limits, step=BY_BATCH, group=RANKS, lora=lora)
    system = System(decode=pool, path=Path(), decode_policy="round-robin")
    expected = simulate(system, arrivals, seed=0)

    async def run() -> np.ndarray:
        async with ranks(limits, BY_BATCH, slowdown, groups=groups, lora=lora) as engines:
            return await mixed(arrivals, engines)

    times = run_virtual(run())

    assert times[:, 0] - arrivals.due_s == pytest.approx(expected.ttft_s, rel=1e-6)
    assert times[:, 1] - arrivals.due_s == pytest.approx(expected.e2e_s, rel=1e-6)


def test_a_rank_that_becomes_the_slowest_makes_little_difference() -> None:
    """Simulated engines compare ranks at every step, `sizing` once a stretch."""
    arrivals = load(60.0, 200, 3)
    pool = SimulatedPool(replicas=RANKS, limits=LIMITS, step=STEP, group=RANKS)
    system = System(decode=pool, path=Path(), decode_policy="round-robin")
    expected = simulate(system, arrivals, seed=0)

    async def run() -> np.ndarray:
        async with ranks(LIMITS, STEP, 1.0) as engines:
            return await mixed(arrivals, engines)

    times = run_virtual(run())

    found_s = times[:, 1] - arrivals.due_s
    assert found_s.mean() == pytest.approx(expected.e2e_s.mean(), rel=0.01)


@given(seed=st.integers(0, 1000), slowdown=st.sampled_from([1.0, 20.0]))
def test_split_groups_take_the_time_that_is_simulated(seed: int, slowdown: float) -> None:
    """
    Each request by the ranks that the simulation chose for it.

    Without adapters: of pulls that end at one moment, the first would decide whose copies come
    first.
    """
    arrivals = load(40.0, 40, seed)
    pool = SimulatedPool(replicas=RANKS, limits=LIMITS, step=BY_BATCH, group=RANKS)
    expected = simulate(System(decode=pool, prefill=pool, path=PATH), arrivals, seed=0)
    routes = list(zip(expected.prefill_of.tolist(), expected.decode_of.tolist(), strict=True))

    async def run() -> np.ndarray:
        async with (
            ranks(LIMITS, BY_BATCH, slowdown, prefill_only=True) as prefill,
            ranks(LIMITS, BY_BATCH, slowdown) as decode,
        ):
            return await split(arrivals, prefill, decode, routes, PATH)

    times = run_virtual(run())

    assert times[:, 0] - arrivals.due_s == pytest.approx(expected.ttft_s, abs=NIC_S)
    assert times[:, 1] - arrivals.due_s == pytest.approx(expected.e2e_s, abs=NIC_S)


@either_way
@pytest.mark.parametrize("dead", range(RANKS))
def test_a_dead_rank_fails_its_group(groups: Groups, dead: int) -> None:
    async def run() -> None:
        async with ranks(LIMITS, STEP, 1.0, groups=groups) as engines:
            sequence = engines[(dead + 1) % RANKS].add(100, (), 20)
            await sequence.more_than(2)
            engines[dead].fail()
            with pytest.raises(EngineDied):
                await sequence.more_than(19)

    run_virtual(run())


@either_way
@pytest.mark.parametrize("frozen", range(RANKS))
def test_a_frozen_rank_holds_its_group(groups: Groups, frozen: int) -> None:
    async def e2e_s(frozen_s: float) -> float:
        async with ranks(LIMITS, STEP, 2.0, groups=groups) as engines:
            sequence = engines[0].add(100, (), 20)
            await sequence.more_than(5)
            engines[frozen].freeze(frozen_s)
            await sequence.more_than(19)
            return asyncio.get_running_loop().time()

    assert run_virtual(e2e_s(7.0)) == pytest.approx(run_virtual(e2e_s(0.0)) + 7.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_does_not_start_without_all_ranks(rank: int) -> None:
    """A rank on another machine is one that never comes."""
    with pytest.raises(GangIncompleteError, match="share one machine"):
        run_virtual(join_gang(uuid.uuid4().hex, rank, 2))


def test_ranks_of_another_user_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either end asks the kernel whose process the other end is."""
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
    gang = uuid.uuid4().hex

    async def run() -> list[Group | BaseException]:
        joining = (join_gang(gang, rank, 2) for rank in range(2))
        return await asyncio.gather(*joining, return_exceptions=True)

    assert all(isinstance(each, GangIncompleteError) for each in run_virtual(run()))


ENDS_AT_ONCE = """
import asyncio, sys
from serving.simulated.gang import join_gang
asyncio.run(join_gang(sys.argv[1], int(sys.argv[2]), 2))
"""


@pytest.mark.parametrize("ended", [0, 1])
def test_a_process_that_ends_fails_its_group(ended: int) -> None:
    """Whichever rank it is, and though it says nothing."""

    async def run() -> None:
        gang = uuid.uuid4().hex
        command = (sys.executable, "-c", ENDS_AT_ONCE, gang, str(ended))
        other = await asyncio.create_subprocess_exec(*command)
        group = await join_gang(gang, 1 - ended, 2)
        engine = SimulatedEngine(LIMITS, STEP, EngineClock(1.0), group=group)
        with pytest.raises(EngineDied):
            await engine.add(100, (), 20).more_than(19)
        assert await other.wait() == 0

    asyncio.run(run())
