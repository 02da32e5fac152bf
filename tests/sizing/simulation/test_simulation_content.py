"""Prompts of known content: who finds whose blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.sources import RequestSource, drawn
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.system import Path, SimulatedPool, System
from tests import plans

STEP = PlannedStep(replace(plans.STEP, stream_s=7e-3, per_sequence_s=1e-4))
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048, kv_blocks=4_000, block_size=16)


def served(
    *prompts: tuple[int, tuple[int, ...]],
    replicas: int = 1,
    gap_s: float = 10.0,
    limits: EngineLimits = LIMITS,
    split: bool = False,
    policy: str = "round-robin",
) -> Outcome:
    """Serve prompts of so many tokens and such blocks, in turn, *gap_s* apart."""
    tokens, content = zip(*prompts, strict=True)
    pool = SimulatedPool(replicas=replicas, limits=limits, step=STEP, prefix_cache=True)
    system = System(
        decode=replace(pool, replicas=1) if split else pool,
        prefill=pool if split else None,
        path=Path(),
        decode_policy=policy,
        prefill_policy=policy,
    )
    arrivals = Arrivals(
        due_s=np.arange(len(tokens)) * gap_s,
        input_tokens=np.array(tokens),
        output_tokens=np.full(len(tokens), 5),
        content=content if any(content) else None,
    )
    return simulate_system(system, arrivals, seed=0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("gap_s", [10.0, 0.0])
def test_a_replica_finds_what_it_has_computed(*, split: bool, gap_s: float) -> None:
    """The same prompt again is found there, later or in the same step, and nowhere else."""
    same = (1600, (1, 2, 3))
    one = served(same, same, gap_s=gap_s, split=split)
    assert one.cached_tokens.tolist() == [0, 1536]
    assert gap_s == 0 or one.ttft_s[1] < one.ttft_s[0] / 2
    two = served(same, same, same, replicas=2, gap_s=gap_s, split=split)
    assert two.cached_tokens.tolist() == [0, 0, 1536]


def test_the_longest_common_prefix_counts() -> None:
    """Blocks count up to the first that differs, and the last token is always computed."""
    found = served(
        (1600, (1, 2, 3)), (1600, (1, 2, 4)), (1600, (5, 2, 3)), (1536, (1, 2, 3)), (1024, (1, 2))
    )
    assert found.cached_tokens.tolist() == [0, 1024, 0, 1520, 1008]


def test_what_was_used_longest_ago_is_forgotten_from_its_end_on() -> None:
    """Memory for five blocks and an answer: a second prompt of three leaves two of the first."""
    small = replace(LIMITS, kv_blocks=5 * 32 + 1)
    first, second = (1536, (1, 2, 3)), (1536, (4, 5, 6))
    found = served(first, second, second, first, limits=small)
    assert found.cached_tokens.tolist() == [0, 0, 1520, 1024]
    roomy = served(first, second, second, first)
    assert roomy.cached_tokens.tolist() == [0, 0, 1520, 1520]


@pytest.mark.parametrize("split", [False, True])
def test_a_router_by_prefix_sends_a_prompt_where_it_is_cached(*, split: bool) -> None:
    """It finds every prompt that came before; under load both replicas work, and most are found."""
    prompts = [(1600, (1, 2, 3)), (1700, (4, 5, 6)), (1700, (7, 8, 9))] * 4
    for gap_s, aware, in_turn in ((10.0, 9, 6), (0.01, 8, 6)):
        found = {
            policy: served(*prompts, replicas=2, gap_s=gap_s, split=split, policy=policy)
            for policy in ("prefix-aware", "round-robin")
        }
        cached = {policy: np.count_nonzero(each.cached_tokens) for policy, each in found.items()}
        assert cached == {"prefix-aware": aware, "round-robin": in_turn}
    busy = found["prefix-aware"]
    used = busy.prefill_of if split else busy.decode_of
    assert set(used.tolist()) == {0, 1}


def test_a_router_by_prefix_knows_a_conversation_by_its_session() -> None:
    """Almost every turn goes where the earlier ones are; routed in turn, half go elsewhere."""
    workload = WorkloadSpec(
        requests_per_s=0.2, input_tokens=Lengths.fixed(1100), output_tokens=Lengths.fixed(50)
    )
    arrivals = drawn(workload, RequestSource(turns=4, think_s=1.0), count=200, seed=0)
    pool = SimulatedPool(replicas=2, limits=LIMITS, step=STEP, prefix_cache=True)
    turns = np.arange(200) % 4
    whole = np.maximum(0, turns * 1150 - 1) // 16 * 16
    shares = {}
    for policy in ("prefix-aware", "round-robin"):
        system = System(decode=pool, path=Path(), decode_policy=policy)
        found = simulate_system(system, arrivals, seed=0).cached_tokens
        assert np.all(found <= whole)
        shares[policy] = found.sum() / whole.sum()
    assert shares["prefix-aware"] > 0.95
    assert shares["round-robin"] < 0.7


@pytest.mark.parametrize("again", [0, 1])
def test_each_conversation_goes_back_to_its_own_replica(again: int) -> None:
    """Two begin at the same time on idle replicas; whichever goes on goes on where it was."""
    arrivals = Arrivals(
        due_s=np.array([0.0, 0.001, 60.0]),
        input_tokens=np.array([1100, 1100, 1200]),
        output_tokens=np.full(3, 5),
        session=np.array([0, 1, again]),
    )
    pool = SimulatedPool(replicas=2, limits=LIMITS, step=STEP, prefix_cache=True)
    for order in (arrivals, replace(arrivals, session=np.array([1, 0, again]))):
        system = System(decode=pool, path=Path(), decode_policy="prefix-aware")
        assert order.session is not None
        *first, back = simulate_system(system, order, seed=0).decode_of.tolist()
        assert sorted(first) == [0, 1]
        assert back == first[order.session.tolist().index(again)]
