"""LoRA adapters: copies to slots, adapters of a batch, and prefixes by adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.phases import PREFILL_QUEUE
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.sources import RequestSource, drawn
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.system import Path, SimulatedPool, System
from tests import plans

STEP = PlannedStep(replace(plans.STEP, stream_s=7e-3, per_sequence_s=1e-4))
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048, kv_blocks=20_000, block_size=16)
COPY_S = 0.05
LOAD = WorkloadSpec(
    requests_per_s=8.0, input_tokens=Lengths.fixed(300), output_tokens=Lengths.fixed(30),
    lora_adapters=6, lora_popularity_exponent=1.0,
)  # fmt: skip


def arriving(
    adapters: list[int], *, gap_s: float = 10.0, outputs: int = 5, prefix: int = 0
) -> Arrivals:
    """Return requests of these adapters, *gap_s* apart."""
    count = len(adapters)
    return Arrivals(
        due_s=np.arange(count) * gap_s,
        input_tokens=np.full(count, 200),
        output_tokens=np.full(count, outputs),
        prefix_tokens=np.full(count, prefix),
        adapter=np.array(adapters),
    )


def served(
    arrivals: Arrivals,
    slots: int | None,
    *,
    split: bool = False,
    group: int = 1,
    copy_s: float = COPY_S,
) -> Outcome:
    """Serve requests on one replica with so many slots."""
    lora = None if slots is None else LoraLimits(slots=slots, load_s=copy_s)
    pool = SimulatedPool(
        replicas=group, limits=LIMITS, step=STEP, lora=lora, group=group, prefix_cache=True
    )
    system = System(
        decode=replace(pool, replicas=1, group=1) if split else pool,
        prefill=pool if split else None, path=Path(),
        decode_policy="round-robin", prefill_policy="round-robin",
    )  # fmt: skip
    return simulate_system(system, arrivals, seed=0)


@pytest.mark.parametrize(("split", "pools"), [(False, 1), (True, 2)])
def test_an_adapter_in_no_slot_delays_the_first_token_by_its_copy(
    *, split: bool, pools: int
) -> None:
    """In both pools; the slot of the adapter used longest ago is given away."""
    order = [0, 1, 0, 2, 0, 1]
    without = served(arriving(order), None, split=split)
    one = served(arriving(order), 1, split=split)
    two = served(arriving(order), 2, split=split)
    assert one.adapter_loads.tolist() == [pools] * 6
    assert two.adapter_loads.tolist() == [pools, pools, 0, pools, 0, pools]
    late_s = two.ttft_s - without.ttft_s
    assert late_s == pytest.approx(two.adapter_loads * COPY_S)
    assert np.nanmax(abs(two.tpot_s - without.tpot_s)) == pytest.approx(0.0, abs=1e-12)


def test_one_adapter_is_copied_once() -> None:
    """The adapter stays in its slot while all requests use it."""
    found = served(arriving([0] * 40, gap_s=0.01), 1)
    assert found.adapter_loads.sum() == 1


def test_requests_of_other_adapters_wait_and_let_others_pass() -> None:
    """With one slot a batch has one adapter: the second request waits for the first one's end."""
    found = served(arriving([0, 1, 0], gap_s=0.1, outputs=200), 1, copy_s=0.0)
    first, second, third = found.ttft_s
    assert found.due_s[1] + second > found.due_s[0] + found.e2e_s[0]
    assert found.due_s[1] + second > found.due_s[2] + found.e2e_s[2]
    assert third == pytest.approx(first, rel=1.0)
    together = served(arriving([0, 1, 0], gap_s=0.1, outputs=200), 2, copy_s=0.0)
    assert together.ttft_s[1] == pytest.approx(first, rel=1.0)


def test_pulled_prompts_wait_for_the_adapters_of_the_decode_batch() -> None:
    """They are computed meanwhile: the prefill batch of a prompt ends with it."""
    found = served(arriving([0, 1], gap_s=0.1, outputs=200), 1, split=True, copy_s=0.0)
    assert found.due_s[1] + found.ttft_s[1] > found.due_s[0] + found.e2e_s[0]
    assert found.parts_s[PREFILL_QUEUE][1] < 0.1


def test_a_shared_prefix_is_found_from_the_second_request_of_an_adapter_on() -> None:
    """Because vLLM's prefix cache is keyed by adapter as well."""
    found = served(arriving([0, 1, 0, 1, 1], prefix=160), 2)
    assert found.cached_tokens.tolist() == [0, 0, 160, 160, 160]
    assert served(arriving([0, 1, 0, 1, 1], prefix=160), None).cached_tokens.tolist() == [160] * 5


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(1, 5),
    split=st.booleans(),
    group=st.sampled_from([1, 2]),
)
def test_more_slots_copy_less_and_are_no_slower(
    seed: int, slots: int, *, split: bool, group: int
) -> None:
    """At p99 beyond noise, with the same steps; as many slots as adapters copy each once."""
    coming = drawn(LOAD, RequestSource(), count=400, seed=seed)
    few = served(coming, slots, split=split, group=group)
    all_of_them = served(coming, 6, split=split, group=group)
    assert all_of_them.adapter_loads.sum() <= few.adapter_loads.sum()
    replicas = group + 1 if split else group
    assert all_of_them.adapter_loads.sum() <= 6 * replicas
    late, soon = (np.quantile(each.ttft_s, 0.99) for each in (few, all_of_them))
    assert soon <= 1.02 * late
    assert (few.ttft_s > 0).all()


def test_requests_without_adapters_are_as_before() -> None:
    """Drawing adapters moves no other draw; slots that take no time and hold all change nothing."""
    plain = replace(LOAD, lora_adapters=0, lora_popularity_exponent=0.0)
    without, drawn_too = (drawn(each, RequestSource(), count=300, seed=1) for each in (plain, LOAD))
    assert without.adapter is None
    for name, column in without.columns().items():
        assert (column == getattr(drawn_too, name)).all()
    never, free = served(without, None), served(drawn_too, 6, copy_s=0.0)
    assert (never.ttft_s == free.ttft_s).all()
    assert (never.e2e_s == free.e2e_s).all()
    with pytest.raises(InputError, match="without adapters"):
        served(without, 6)


def test_adapters_are_drawn_by_popularity_and_kept_by_conversations() -> None:
    """Shares are 1/i over their sum; equal contents of two adapters are not equal."""
    found = drawn(LOAD, RequestSource(), count=60_000, seed=0)
    assert found.adapter is not None
    shares = np.bincount(found.adapter, minlength=6) / 60_000
    assert shares == pytest.approx(1 / np.arange(1, 7) / sum(1 / np.arange(1, 7)), abs=0.01)
    turns = drawn(LOAD, RequestSource(turns=4), count=400, seed=0)
    assert turns.adapter is not None
    assert (turns.adapter.reshape(-1, 4) == turns.adapter[::4, None]).all()
    bare = replace(arriving([0, 0]), adapter=None, content=((7, 8), (7, 8)))
    two = [bare.with_adapters(LOAD, np.random.default_rng(seed)) for seed in range(20)]
    same = [each.adapter is not None and len(set(each.adapter)) == 1 for each in two]
    assert [each.content is not None and len(set(each.content)) == 1 for each in two] == same
    assert set(same) == {True, False}
