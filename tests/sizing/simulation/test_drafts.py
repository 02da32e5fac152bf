"""Speculative decoding in the simulation: tokens, times and KV blocks of sequences with drafts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.replica import Replica
from minicluster.engine_model.request_table import RequestTable
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.specs.engine import EngineOptions
from minicluster.specs.step import StepCoefficients
from minicluster.workload.arrivals import Arrivals
from sizing.simulation.event_loop import EventLoop
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.system import Path, SimulatedPool, System

STEP_S = 0.01
STEP = StepCoefficients(
    base_s=STEP_S,
    stream_s=0.0,
    per_prefill_token_s=1e-5,
    per_sequence_s=1e-4,
    per_pair_s=0.0,
    per_context_token_s=0.0,
    max_tokens=10_000,
    max_batch=100,
    max_context_tokens=10_000,
    error_fraction=0.0,
)
LIMITS = EngineLimits(max_num_seqs=32, max_num_batched_tokens=1024, kv_blocks=4000, block_size=16)


def drafting(drafts: int, accepted: float, **changes: int) -> EngineLimits:
    options = EngineOptions(speculative_tokens=drafts, mean_accepted_tokens=accepted)
    return replace(LIMITS, options=options, **changes)


def system(limits: EngineLimits, *, split: bool = False) -> System:
    pool = SimulatedPool(replicas=1, limits=limits, step=PlannedStep(STEP))
    return System(decode=pool, prefill=pool if split else None, path=Path())


def requests(count: int, outputs: int | None = None) -> Arrivals:
    rng = np.random.default_rng(3)
    answers = rng.integers(1, 300, count) if outputs is None else np.full(count, outputs)
    return Arrivals(
        due_s=np.sort(rng.uniform(0, count / 20, count)),
        input_tokens=rng.integers(1, 500, count),
        output_tokens=answers.astype(np.int64),
    )


def run(limits: EngineLimits, *, split: bool = False, count: int = 60) -> Outcome:
    return simulate_system(system(limits, split=split), requests(count), seed=1)


@pytest.mark.parametrize("accepted", [0.0, 0.5, 1.7, 3.0])
@pytest.mark.parametrize("split", [False, True])
def test_a_lone_answer_takes_a_step_for_each_1_plus_a_tokens(
    accepted: float, *, split: bool
) -> None:
    """The prompt's step gives the first token, and of a pulled prompt the first decode step."""
    answer = 101
    found = simulate_system(system(drafting(3, accepted), split=split), requests(1, answer), seed=1)
    steps = (found.e2e_s - found.ttft_s)[0] / (STEP_S + 1e-4)
    assert steps == pytest.approx(round(steps))
    assert abs(steps - (answer - 1) / (1 + accepted)) < 1
    assert found.tpot_s[0] == pytest.approx(steps * (STEP_S + 1e-4) / (answer - 1))


def test_more_accepted_tokens_make_each_token_cheaper() -> None:
    """TPOT falls with the accepted drafts at the same step times, and so does the whole answer."""
    found = [run(drafting(4, accepted)) for accepted in (0.0, 0.3, 1.0, 1.5, 2.6, 4.0)]
    for name in ("tpot_s", "e2e_s"):
        means = [float(np.nanmean(getattr(each, name))) for each in found]
        assert means == sorted(means, reverse=True)
        assert means[0] > means[-1] * 2


@pytest.mark.parametrize("split", [False, True])
def test_drafts_that_are_never_accepted_change_no_token(*, split: bool) -> None:
    """With a = 0 and room for the drafts' blocks, every time is that without drafts, bit by bit."""
    for name in ("ttft_s", "tpot_s", "e2e_s", "stall_s"):
        plain, drafted = (
            getattr(run(limits, split=split), name) for limits in (LIMITS, drafting(3, 0.0))
        )
        np.testing.assert_array_equal(plain, drafted)


@pytest.mark.parametrize("accepted", [0.0, 0.7, 1.0, 2.4])
@pytest.mark.parametrize("blocks", [60, 90, 4000])
def test_every_token_comes_and_every_block_is_given_back(accepted: float, blocks: int) -> None:
    """Also where blocks are short and sequences lose theirs."""
    arrivals = requests(40)
    loop = EventLoop(system(drafting(3, accepted, kv_blocks=blocks)), arrivals, seed=1)
    loop.run()
    assert loop.decode[0].used_blocks == 0
    assert not loop.decode[0].batch
    assert loop.decode[0].context_tokens == 0
    assert all(math.isfinite(each) for each in loop.requests.finished_s)
    if blocks == 60:
        assert sum(loop.requests.num_preemptions)


@pytest.mark.parametrize("accepted", [0.6, 1.0, 2.0])
def test_steps_one_by_one_end_when_stretches_do(accepted: float) -> None:
    """A simulated engine, whose every stretch is a step, gives tokens as the simulation says."""
    finished = []
    for stepwise in (False, True):
        table = RequestTable([100, 37, 250], [64, 200, 5])
        replica = Replica(table, PlannedStep(STEP), drafting(2, accepted), stepwise=stepwise)
        for request in range(3):
            replica.add(request, 0.0)
        seen = [0, 0, 0]
        while replica.active:
            end_s, done = replica.end_s, set(replica.end_stretch())
            running = [request for request in replica.running if request not in done]
            for request in running:
                tokens = replica.num_generated(request)
                assert seen[request] <= tokens < table.max_tokens[request]
                seen[request] = tokens
            replica.start_stretch(end_s)
        finished.append(table.finished_s)
    assert finished[0] == pytest.approx(finished[1])


def test_a_sequence_holds_blocks_for_the_drafts_beyond_its_tokens() -> None:
    """As in vLLM: what is verified and what is drafted next, twice the drafts of a step."""
    used = []
    for limits in (LIMITS, drafting(8, 0.0)):
        replica = Replica(RequestTable([160], [3]), PlannedStep(STEP), limits, stepwise=True)
        replica.add(0, 0.0)
        replica.end_stretch()
        replica.start_stretch(replica.end_s)
        used.append(replica.used_blocks)
    assert used == [10, 11]


def test_limits_that_no_step_can_keep_are_refused() -> None:
    """Every running sequence takes its drafts from the token budget; none accepts more than all."""
    with pytest.raises(
        InputError, match=r"max_num_batched_tokens is 100; it has to be at least .*128"
    ):
        drafting(3, 1.0, max_num_batched_tokens=100)
    with pytest.raises(InputError, match=r"mean_accepted_tokens is 4.0; it has to be at most"):
        drafting(3, 4.0)
