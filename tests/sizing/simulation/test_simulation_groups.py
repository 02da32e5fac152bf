"""Groups of data-parallel ranks: a step waits for the slowest rank (docs/model.md, eq. Q11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.sources import RequestSource, drawn
from sizing.simulation.outcome import simulate_system
from sizing.simulation.system import Path, SimulatedPool, System
from tests import plans

STEP = PlannedStep(replace(plans.STEP, base_s=4e-3, per_sequence_s=1e-3, per_context_token_s=1e-7))
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048, kv_blocks=20_000, block_size=16)


def pool(ranks: int, group: int) -> SimulatedPool:
    return SimulatedPool(replicas=ranks, limits=LIMITS, step=STEP, group=group)


def mixed(ranks: int, group: int) -> System:
    return System(decode=pool(ranks, group), path=Path(), decode_policy="round-robin")


def split(ranks: int, group: int) -> System:
    return System(
        prefill=pool(ranks, group),
        decode=pool(ranks, group),
        path=Path(transfer_base_s=2e-3, transfer_per_token_s=2e-6),
        decode_policy="round-robin",
        prefill_policy="round-robin",
    )


def requests(due_s: list[float], prompts: list[int], outputs: list[int]) -> Arrivals:
    return Arrivals(
        due_s=np.array(due_s), input_tokens=np.array(prompts), output_tokens=np.array(outputs)
    )


def chats(rate: float, *, seed: int) -> Arrivals:
    workload = WorkloadSpec(
        requests_per_s=rate,
        input_tokens=Lengths(distribution="lognormal", median=500, sigma=0.8, high=4000),
        output_tokens=Lengths(distribution="uniform", low=1, high=80),
    )
    return drawn(workload, RequestSource(), count=1500, seed=seed)


def test_a_step_of_prompts_takes_as_long_as_that_of_the_slowest_rank() -> None:
    """By hand: 4 ms + 0.1 ms a token; two ranks, prompts of 1,000 and 100 tokens at once."""
    found = simulate_system(mixed(2, 2), requests([0.0, 0.0], [1000, 100], [1, 1]), seed=0)
    slowest_s = STEP.step_s([(1000, 0)], 0, 0)
    assert found.ttft_s == pytest.approx([slowest_s, slowest_s])
    alone = simulate_system(mixed(2, 1), requests([0.0, 0.0], [1000, 100], [1, 1]), seed=0)
    assert alone.ttft_s == pytest.approx([slowest_s, STEP.step_s([(100, 0)], 0, 0)])


@pytest.mark.parametrize("build", [mixed, split])
def test_a_request_at_an_idle_rank_waits_for_the_step_of_its_peers(
    build: Callable[[int, int], System],
) -> None:
    """By hand: it arrives 10 ms into a step of 1,000 tokens, and its own step follows that."""
    arrivals = requests([0.0, 0.01], [1000, 100], [1, 1])
    found = simulate_system(build(2, 2), arrivals, seed=0)
    first_s, second_s = (STEP.step_s([(tokens, 0)], 0, 0) for tokens in (1000, 100))
    ends = found.due_s + found.parts_s["prefill_queue"] + found.parts_s["prefill"]
    assert ends == pytest.approx([first_s, first_s + second_s])


def test_a_prompt_of_one_rank_delays_the_tokens_of_another() -> None:
    """By hand: the longest gap of a decoding rank is the step that holds its peer's prompt."""
    found = simulate_system(mixed(2, 2), requests([0.0, 0.05], [10, 1500], [60, 1]), seed=0)
    assert found.stall_s[0] == pytest.approx(STEP.step_s([(1500, 0)], 0, 0))


@pytest.mark.parametrize("seed", range(3))
def test_equal_ranks_with_equal_arrivals_are_as_one_rank(seed: int) -> None:
    one = chats(6.0, seed=seed)
    many = Arrivals(
        due_s=np.repeat(one.due_s, 4),
        input_tokens=np.repeat(one.input_tokens, 4),
        output_tokens=np.repeat(one.output_tokens, 4),
    )
    alone = simulate_system(mixed(1, 1), one, seed=seed)
    group = simulate_system(mixed(4, 4), many, seed=seed)
    assert group.ttft_s == pytest.approx(np.repeat(alone.ttft_s, 4), abs=1e-9)
    assert group.e2e_s == pytest.approx(np.repeat(alone.e2e_s, 4), abs=1e-9)


def test_ranks_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(InputError, match="whole groups of 4"):
        pool(6, 4)
