"""Prompts of known content: who finds whose blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.workload.arrivals import Arrivals
from sizing.simulation.outcome import Outcome, simulate
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
) -> Outcome:
    """Serve prompts of so many tokens and such blocks, in turn, *gap_s* apart."""
    tokens, content = zip(*prompts, strict=True)
    pool = SimulatedPool(replicas=replicas, limits=limits, step=STEP, prefix_cache=True)
    system = System(
        decode=replace(pool, replicas=1) if split else pool,
        prefill=pool if split else None,
        path=Path(),
        decode_policy="round-robin",
        prefill_policy="round-robin",
    )
    arrivals = Arrivals(
        due_s=np.arange(len(tokens)) * gap_s,
        input_tokens=np.array(tokens),
        output_tokens=np.full(len(tokens), 5),
        content=content if any(content) else None,
    )
    return simulate(system, arrivals, seed=0)


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
