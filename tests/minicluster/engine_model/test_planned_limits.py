"""Limits of the scheduler that follow from a plan's pools and engine, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.kv_cache import kv_pages
from minicluster.engine_model.planned_limits import kv_blocks, planned_limits, planned_offload
from minicluster.errors import InputError
from minicluster.plan import Deployment, Pool
from minicluster.plan.deployment import KvOffload
from minicluster.specs.slicing import Slicing
from sizing.catalog import find_model
from tests.loadtest.made import make_plan
from tests.serving.plans import make_pool

TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Of Llama-3.1-8B: keys and values of 32 layers, 8 heads of 128 values, 2 bytes each."""


def planned(**engine: object) -> Deployment:
    """Return a deployment of the model, blocks of 32 tokens, with other settings of the engine."""
    found = make_plan().deployment
    settings = replace(found.engine, block_size=32, **engine)  # type: ignore[arg-type]
    return replace(found, model=find_model("llama-3.1-8b"), engine=settings)


def mixed(pp: int, **changes: object) -> Pool:
    """Return a pool of one replica of so many stages."""
    return make_pool("mixed", tuple(range(pp)), pp=pp, **changes)


@pytest.mark.parametrize(
    ("pp", "sequences", "each", "tokens"),
    [
        (1, 40, 40, 100),
        (1, 140, 140, 140),
        (4, 40, 10, 100),
        (4, 3, 1, 100),  # a batch without a sequence would be none
    ],
)
def test_stages_share_the_sequences_of_a_replica(
    pp: int, sequences: int, each: int, tokens: int
) -> None:
    """And its cache; a step has room for a token of each sequence."""
    pool = mixed(pp, max_num_seqs=sequences, max_num_batched_tokens=100, kv_bytes=1e9)
    found = planned_limits(planned(), pool)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (each, tokens)
    # A stage has its layers' part of a token's bytes, and of the cache as much for each batch; of
    # every engine one block is the null block.
    assert found.kv_blocks == int((int(1e9 / (32 * TOKEN_BYTES / pp)) - 1) / pp)
    with pytest.raises(InputError, match="room for a block"):
        planned_limits(planned(), replace(pool, kv_bytes=32 * TOKEN_BYTES - 1.0))


WINDOWED = {
    # Blocks of 32 tokens that are in every layer, and those that full windows leave room for; the
    # null block is taken off before.
    ("mistral-7b", 2): (1023, 2 * 1024),  # 2 x 4,128 tokens of 128 KiB fit: any length does
    ("mistral-7b", 8): (1023, 0),
    ("gpt-oss-120b", 16): (1819, 3559),  # 18 + 18 layers of 2,048 bytes; a window is 5 blocks
    ("gpt-oss-120b", 1024): (1819, -1481),
}


@pytest.mark.parametrize(("name", "sequences"), WINDOWED)
def test_windows_are_full_or_are_not_passed(name: str, sequences: int) -> None:
    """The larger of two numbers of blocks that hold whatever runs, by hand (M11)."""
    deployment = replace(planned(max_model_len=32768), model=find_model(name))
    pool = mixed(1, max_num_seqs=sequences, kv_bytes=2.0**32)
    assert kv_blocks(deployment, pool) == max(WINDOWED[name, sequences])


def test_states_of_all_sequences_come_first() -> None:
    """Three groups of 15 linear layers keep a block of every sequence, however long it is (M6)."""
    deployment = replace(planned(), model=find_model("qwen3.5-397b-a17b"))
    # 15 layers of 2 x 2 heads of 256 values, 2 bytes each; a state is 4,268,032 bytes: 2,084 tokens
    # of 2,048 bytes, which are whole blocks of 32 from 2,112 on.
    block_bytes = 15 * 2_112 * 2_048
    pool = mixed(1, max_num_seqs=40, kv_bytes=(1 + 40 * 3 + 100.5) * block_bytes)
    assert kv_blocks(deployment, pool) == 100
    assert planned_limits(deployment, pool).block_size == 2_112


@given(
    st.sampled_from(["mistral-7b", "gpt-oss-120b", "llama-4-maverick", "qwen3.5-397b-a17b"]),
    st.integers(1, 300),
    st.floats(37, 39),
    st.lists(st.integers(1, 512), max_size=300),
)
def test_sequences_that_fit_in_blocks_fit_in_memory(
    name: str, sequences: int, log_bytes: float, blocks: list[int]
) -> None:
    """Sequences of any lengths, as many as may run, in the blocks that a pool has."""
    deployment = replace(planned(max_model_len=16384), model=find_model(name))
    pool = mixed(1, max_num_seqs=sequences, kv_bytes=2.0**log_bytes)
    room = kv_blocks(deployment, pool)
    pages = kv_pages(deployment.model, slicing=Slicing(), block_size=deployment.engine.block_size)
    held = 1.0  # the null block
    for each in blocks[:sequences]:
        if each <= room:
            room -= each
            held += pages.blocks(each * pages.block_tokens)
    assert held * pages.block_bytes <= pool.kv_bytes


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("disk", [False, True])
def test_tiers_hold_tokens_of_all_stages(pp: int, *, disk: bool) -> None:
    """Host memory is that of each GPU; what it holds of a token are its own layers."""
    reads = {"disk_bytes": 2e9, "disk_bytes_per_s": 3e9, "disk_path": "/kv"} if disk else {}
    offload = KvOffload(host_bytes=1e9, host_bytes_per_s={"cpu": 5e9}, **reads)  # type: ignore[arg-type]
    deployment, pool = planned(kv_offload=offload), mixed(pp)
    found = planned_offload(deployment, pool)
    assert found is not None
    assert (found.host_tokens, found.host_token_s) == (int(1e9 / TOKEN_BYTES), TOKEN_BYTES / 5e9)
    on_disk = (int(2e9 / TOKEN_BYTES), TOKEN_BYTES / 3e9) if disk else (0, 0.0)
    assert (found.disk_tokens, found.disk_token_s) == on_disk
    assert planned_offload(deployment, replace(pool, role="decode")) is None
    assert planned_offload(planned(), pool) is None
