"""KV blocks in host memory and on disk: what is found there, and when its request begins."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.engine_model.limits import EngineLimits, OffloadLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import CONTENT_TOKENS, Arrivals
from minicluster.workload.sources import RequestSource, drawn
from sizing.simulation.hit_rate import hit_rates, needed_blocks
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.system import Path, SimulatedPool, System
from tests import plans

STEP = PlannedStep(replace(plans.STEP, stream_s=7e-3, per_sequence_s=1e-4))
SMALL = EngineLimits(
    max_num_seqs=64, max_num_batched_tokens=2048, kv_blocks=4 * 32 + 1, block_size=16
)
HOST_TOKEN_S, DISK_TOKEN_S = 1e-4, 1e-3

Prompt = tuple[int, tuple[int, ...]]
FIRST, SECOND = (1600, (1, 2, 3)), (1600, (4, 5, 6))


def tiers(host: int, disk: int = 0) -> OffloadLimits:
    """Return tiers of so many blocks of 512 tokens."""
    return OffloadLimits(
        host_tokens=host * CONTENT_TOKENS,
        host_token_s=HOST_TOKEN_S,
        disk_tokens=disk * CONTENT_TOKENS,
        disk_token_s=DISK_TOKEN_S,
    )


def arriving(prompts: list[Prompt], gap_s: float = 10.0) -> Arrivals:
    """Return prompts *gap_s* apart, with answers of five tokens."""
    tokens, content = zip(*prompts, strict=True)
    return Arrivals(
        due_s=np.arange(len(tokens)) * gap_s,
        input_tokens=np.array(tokens),
        output_tokens=np.full(len(tokens), 5),
        content=content,
    )


def served(
    prompts: list[Prompt],
    offload: OffloadLimits | None,
    *,
    gap_s: float = 10.0,
    split: bool = False,
    group: int = 1,
    limits: EngineLimits = SMALL,
) -> Outcome:
    """Serve prompts on GPUs that hold little more than one of them."""
    pool = SimulatedPool(
        replicas=group, limits=limits, step=STEP, prefix_cache=True, offload=offload, group=group
    )
    decode = replace(pool, replicas=1, group=1, offload=None) if split else pool
    system = System(
        decode=decode, prefill=pool if split else None, path=Path(),
        decode_policy="round-robin", prefill_policy="round-robin",
    )  # fmt: skip
    return simulate_system(system, arriving(prompts, gap_s), seed=0)


@pytest.mark.parametrize("split", [False, True])
def test_a_prompt_found_in_host_memory_begins_after_its_copy(*, split: bool) -> None:
    """TTFT is that of a prompt found on the GPU, and bytes over rate; the rest is computed."""
    whole = replace(SMALL, kv_blocks=4_000)
    on_gpu = served([FIRST, SECOND, FIRST], None, split=split, limits=whole)
    found = served([FIRST, SECOND, FIRST], tiers(6), split=split)
    left = int(served([FIRST, SECOND, FIRST], None, split=split).cached_tokens[2])
    loaded = 3 * CONTENT_TOKENS - left
    assert found.cached_tokens.tolist() == on_gpu.cached_tokens.tolist() == [0, 0, 1536]
    assert found.host_tokens.tolist() == [0, 0, loaded]
    assert loaded > 0
    assert found.ttft_s[2] == pytest.approx(on_gpu.ttft_s[2] + loaded * HOST_TOKEN_S)


def test_a_prompt_on_disk_is_read_to_host_memory_first() -> None:
    """Both times count, the second time it is in host memory again."""
    others = [(1600, (10 * k, 10 * k + 1, 10 * k + 2)) for k in range(2, 5)]
    prompts = [FIRST, *others, FIRST, others[2], FIRST]
    found = served(prompts, tiers(6, disk=50))
    assert found.disk_tokens.tolist()[4:] == [1536, 0, 0]
    assert found.host_tokens[6] > 0
    alone = served([FIRST, FIRST], None, limits=replace(SMALL, kv_blocks=4_000)).ttft_s[1]
    assert found.ttft_s[4] == pytest.approx(alone + 1536 * (DISK_TOKEN_S + HOST_TOKEN_S))


def test_loads_share_the_link_in_order() -> None:
    """Two prompts that come together load one after the other; decoding goes on meanwhile."""
    roomy = replace(SMALL, kv_blocks=7 * 32)
    others = [(1600, (10 * k, 10 * k + 1, 10 * k + 2)) for k in range(2, 6)]
    due = np.array([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 60.0])
    prompts = [FIRST, SECOND, *others, FIRST, SECOND]
    coming = replace(arriving(prompts), due_s=due)
    pool = SimulatedPool(replicas=1, limits=roomy, step=STEP, prefix_cache=True, offload=tiers(100))
    found = simulate_system(System(decode=pool, path=Path()), coming, seed=0)
    assert found.host_tokens.tolist()[-2:] == [1536, 1536]
    first, second = found.ttft_s[-2:]
    assert second - first == pytest.approx(1536 * HOST_TOKEN_S, rel=0.2)


@pytest.mark.parametrize("gap_s", [10.0, 0.01])
def test_without_capacity_nothing_changes(gap_s: float) -> None:
    """No host memory gives exactly the numbers of none."""
    prompts = [FIRST, SECOND, FIRST, SECOND, FIRST]
    none, empty = (served(prompts, each, gap_s=gap_s) for each in (None, tiers(0)))
    for name in ("ttft_s", "e2e_s", "cached_tokens", "host_tokens"):
        assert getattr(none, name).tolist() == getattr(empty, name).tolist()


PROMPTS = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(
        lambda ids: (len(ids) * CONTENT_TOKENS + 64, tuple(ids))
    ),
    min_size=2,
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(prompts=PROMPTS)
def test_more_capacity_finds_no_less(prompts: list[Prompt]) -> None:
    """And the disk counts like that much host memory, but for its time."""
    found = [int(served(prompts, tiers(host)).cached_tokens.sum()) for host in (0, 4, 8, 16)]
    assert found == sorted(found)
    disk = served(prompts, tiers(4, disk=16))
    assert disk.cached_tokens.sum() == found[-1]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_every_request_ends_under_load(*, split: bool, group: int) -> None:
    """Many loads at a time on GPUs with room for two prompts: none is lost or waits for ever."""
    rng = np.random.default_rng(0)
    prompts = [
        (1600, tuple(int(each) * 3 + k for k in range(3))) for each in rng.integers(8, size=80)
    ]
    roomy = replace(SMALL, kv_blocks=8 * 32 + 1)
    found = served(prompts, tiers(100), gap_s=0.02, split=split, group=group, limits=roomy)
    assert np.isfinite(found.e2e_s).all()
    assert found.host_tokens.sum() > 0


def brute_force(prompts: list[tuple[int, ...]], capacity: int) -> int:
    """Count hits of an LRU cache of so many blocks, prompt by prompt."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prompts:
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 12), max_size=5, unique=True).map(tuple), max_size=30),
    capacity=st.integers(1, 14),
)
def test_stack_distances_are_hits_of_lru(prompts: list[tuple[int, ...]], capacity: int) -> None:
    """One pass gives what a cache of each capacity finds."""
    needed = needed_blocks(prompts)
    assert sum(each <= capacity for each in needed) == brute_force(prompts, capacity)


def test_conversations_find_their_turns_in_host_memory() -> None:
    """A cache of one conversation's turns forgets others; host memory keeps them."""
    workload = WorkloadSpec(
        requests_per_s=2.0, input_tokens=Lengths.fixed(500), output_tokens=Lengths.fixed(10)
    )
    coming = drawn(workload, RequestSource(turns=3, think_s=5.0), count=90, seed=0)
    shares = []
    for offload in (None, tiers(200)):
        pool = SimulatedPool(
            replicas=1, limits=SMALL, step=STEP, prefix_cache=True, offload=offload
        )
        found = simulate_system(System(decode=pool, path=Path()), coming, seed=0)
        shares.append(found.cached_tokens.sum() / coming.input_tokens.sum())
    assert shares[1] > shares[0] + 0.1
    rates = hit_rates(found, coming, first_tokens=512)
    assert [each.hit_fraction for each in rates] == sorted(each.hit_fraction for each in rates)


def test_capacities_double_until_all_is_found_that_can_be() -> None:
    """The last capacity is the first that finds every block that came before."""
    prompts = [FIRST, SECOND, (1600, (7, 8, 9)), FIRST, SECOND, FIRST]
    arrivals = arriving(prompts)
    found = hit_rates(served(prompts, None), arrivals, first_tokens=CONTENT_TOKENS)
    tokens = [each.capacity_tokens for each in found]
    assert tokens == [CONTENT_TOKENS * 2**power for power in range(len(tokens))]
    repeated = 3 * 3 * CONTENT_TOKENS / (6 * 1600)
    assert found[-1].hit_fraction == pytest.approx(repeated)
    assert found[-2].hit_fraction < repeated
    assert len(found) == 5  # 16 blocks hold the nine that lie between FIRST and its return
