"""Simulated ranks of a group take the time that `sizing` simulates, request by request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.step_seconds import PlannedStep
from serving.simulated.engine import EngineClock, EngineDied, SimulatedEngine
from sizing.simulation.outcome import simulate_system
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


@asynccontextmanager
async def group(
    limits: EngineLimits,
    step: PlannedStep,
    slowdown: float,
    *,
    prefill_only: bool = False,
    lora: LoraLimits | None = None,
) -> AsyncIterator[SimulatedEngine]:
    """Have one group, which fails in the end."""
    clock = EngineClock(slowdown)
    engine = SimulatedEngine(limits, step, clock, prefill_only=prefill_only, ranks=RANKS, lora=lora)
    try:
        yield engine
    finally:
        engine.fail()
        await asyncio.sleep(1.0)


@given(
    seed=st.integers(0, 1000),
    slowdown=st.sampled_from([1.0, 50.0]),
    kv_blocks=st.sampled_from([120, 900]),
    lora=either_lora,
)
def test_a_group_takes_the_time_that_is_simulated(
    seed: int, slowdown: float, kv_blocks: int, lora: LoraLimits | None
) -> None:
    """With too few blocks as well, where requests are preempted, and too few slots for adapters."""
    arrivals, limits = load(60.0, 40, seed, lora), replace(LIMITS, kv_blocks=kv_blocks)
    pool = SimulatedPool(replicas=RANKS, limits=limits, step=BY_BATCH, group=RANKS, lora=lora)
    system = System(decode=pool, path=Path(), decode_policy="round-robin")
    expected = simulate_system(system, arrivals, seed=0)

    async def run() -> np.ndarray:
        async with group(limits, BY_BATCH, slowdown, lora=lora) as engine:
            return await mixed(arrivals, engine, RANKS)

    times = run_virtual(run())

    assert times[:, 0] - arrivals.due_s == pytest.approx(expected.ttft_s, rel=1e-6)
    assert times[:, 1] - arrivals.due_s == pytest.approx(expected.e2e_s, rel=1e-6)


def test_a_rank_that_becomes_the_slowest_makes_little_difference() -> None:
    """Simulated engines compare ranks at every step, `sizing` once a stretch."""
    arrivals = load(60.0, 200, 3)
    pool = SimulatedPool(replicas=RANKS, limits=LIMITS, step=STEP, group=RANKS)
    system = System(decode=pool, path=Path(), decode_policy="round-robin")
    expected = simulate_system(system, arrivals, seed=0)

    async def run() -> np.ndarray:
        async with group(LIMITS, STEP, 1.0) as engine:
            return await mixed(arrivals, engine, RANKS)

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
    expected = simulate_system(System(decode=pool, prefill=pool, path=PATH), arrivals, seed=0)
    routes = list(zip(expected.prefill_of.tolist(), expected.decode_of.tolist(), strict=True))

    async def run() -> np.ndarray:
        async with (
            group(LIMITS, BY_BATCH, slowdown, prefill_only=True) as prefill,
            group(LIMITS, BY_BATCH, slowdown) as decode,
        ):
            return await split(arrivals, prefill, decode, routes, PATH)

    times = run_virtual(run())

    assert times[:, 0] - arrivals.due_s == pytest.approx(expected.ttft_s, abs=NIC_S)
    assert times[:, 1] - arrivals.due_s == pytest.approx(expected.e2e_s, abs=NIC_S)


def test_a_dead_group_fails_the_requests_of_all_ranks() -> None:
    async def run() -> None:
        async with group(LIMITS, STEP, 1.0) as engine:
            sequences = [engine.add(100, (), 20, rank=rank) for rank in range(RANKS)]
            await sequences[1].more_than(2)
            engine.fail()
            for sequence in sequences:
                with pytest.raises(EngineDied):
                    await sequence.more_than(19)

    run_virtual(run())


def test_a_frozen_group_goes_on_where_it_stood() -> None:
    async def e2e_s(frozen_s: float) -> float:
        async with group(LIMITS, STEP, 2.0) as engine:
            sequence = engine.add(100, (), 20, rank=1)
            await sequence.more_than(5)
            engine.freeze(frozen_s)
            await sequence.more_than(19)
            return asyncio.get_running_loop().time()

    assert run_virtual(e2e_s(7.0)) == pytest.approx(run_virtual(e2e_s(0.0)) + 7.0)
