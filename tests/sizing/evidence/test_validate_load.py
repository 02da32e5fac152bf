"""What a measured row sends, and to what: counts, lengths, queues, slots."""

from __future__ import annotations

import numpy as np
import pytest

from sizing.evidence.row import MeasuredRow, row_from
from sizing.evidence.row_config import row_config
from sizing.evidence.row_system import (
    MOST_REQUESTS,
    OPEN_REQUESTS,
    queues_of,
    recipe_slots,
    row_arrivals,
    row_system,
    sent_before,
)

CELLS = {
    "id": "one", "model": "meta-llama/Llama-3.1-70B", "gpu": "h100-sxm", "engine": "vllm",
    "engine_version": "0.15.1", "weight_dtype": "fp8", "serving": "aggregated", "gpus": "8",
    "tp": "4", "isl": "1000", "osl": "500",
}  # fmt: skip
SPLIT = {
    "model": "deepseek-ai/DeepSeek-V3", "engine": "trtllm", "engine_version": "1.1.0",
    "serving": "disaggregated", "gpus": "64", "tp": "", "prefill_replicas": "1",
    "prefill_tp": "16", "decode_replicas": "3", "decode_tp": "16", "load": "closed",
    "concurrency": "60", "isl": "1024", "osl": "1024", "length_jitter": "0.2",
}  # fmt: skip


def row(**cells: str) -> MeasuredRow:
    return row_from(CELLS | cells, "rows.csv:2")


def test_lengths_are_drawn_as_the_schema_says() -> None:
    """Uniform in [(1 - j) nominal, nominal]: mean 0.9 at j = 0.2; the same every time."""
    jittered = row(load="closed", concurrency="400", length_jitter="0.2")
    found, again = (row_arrivals(jittered, queues=1) for _ in range(2))
    assert (found.input_tokens.min(), found.input_tokens.max()) == (800, 1000)
    assert found.input_tokens.mean() == pytest.approx(900, rel=0.01)
    np.testing.assert_array_equal(found.output_tokens, again.output_tokens)
    assert set(row_arrivals(row(load="closed", concurrency="4"), queues=1).input_tokens) == {1000}


def test_queues_share_users_and_batches() -> None:
    """Two copies of attention: half of the users each, who send ten requests; half of a batch."""
    closed = row(load="closed", concurrency="9")
    assert queues_of(closed) == 2
    found = row_arrivals(closed, queues=2)
    assert (len(found), (found.previous < 0).sum()) == (50, 5)
    batch = row_arrivals(row(load="static", batch_size="9"), queues=2)
    assert len(batch) == 5
    assert not batch.due_s.any()


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        ({}, OPEN_REQUESTS),
        ({"requests": "300"}, 150),
        ({"duration_s": "600"}, 1200),
        ({"requests": "300", "duration_s": "600"}, 150),
        ({"duration_s": "60000"}, MOST_REQUESTS),
    ],
)
def test_an_open_loop_is_as_long_as_its_row_says(cells: dict[str, str], count: int) -> None:
    """Requests counted, or the duration times the rate; else a default. Two queues share them."""
    found = row_arrivals(row(load="open", requests_per_s="4", **cells), queues=2)
    assert len(found) == count
    assert found.due_s[-1] / len(found) == pytest.approx(1 / 2, rel=0.2)


def test_prompts_sent_before_are_in_the_cache() -> None:
    """All but the first round, of which only the named prefix is."""
    drawn = row_arrivals(row(load="closed", concurrency="1", prefix_tokens="100"), queues=1)
    found = sent_before(drawn, but=2)
    assert found.prefix_tokens.tolist() == [100, 100] + [1000] * 8


@pytest.mark.parametrize(
    ("users", "replicas", "ranks", "slots"),
    [
        (6, 3, 1, 1), (9, 3, 1, 2), (30, 3, 1, 8), (60, 3, 1, 16), (117, 3, 1, 32),
        (154, 2, 1, 64), (462, 3, 1, 128), (77, 1, 16, 64), (231, 3, 16, 64), (308, 1, 16, 256),
        (615, 1, 16, 512), (1229, 1, 16, 1024), *((2**k, 1, 1, None) for k in (0, 2, 3, 4, 10)),
        *((2**k, 3, 1, None) for k in (0, 2, 3, 4, 10)),
    ],
)  # fmt: skip
def test_users_tell_the_slots_of_a_recipe(
    users: int, replicas: int, ranks: int, slots: int | None
) -> None:
    """NVIDIA srt-slurm recipes for DeepSeek on H100; powers of two say only what was tried."""
    assert recipe_slots(users, replicas, ranks) == slots


def test_slots_are_what_the_recipe_leaves() -> None:
    """60 users of three replicas: 16 each; 64 users, and other engines' recipes, say nothing."""
    pools = []
    for cells in ({}, {"concurrency": "64"}, {"engine": "sglang"}):
        one = row(**SPLIT | cells)
        pools.append(row_system(one, row_config(one)).decode)
    assert [pool.replicas for pool in pools] == [3, 3, 3]
    recipe, *others = [pool.limits.max_num_seqs for pool in pools]
    assert recipe == 16
    assert min(others) > 1000


def test_an_engine_is_simulated_by_its_rules() -> None:
    """What the profile says of scheduling is what the simulated engine does."""
    for engine, version, expected in (
        ("vllm", "0.12.0", (True, True, 0.0, False)),
        ("vllm", "0.15.1", (True, True, 0.0, True)),
        ("sglang", "0.5.1", (False, True, 0.5, True)),
        ("trtllm", "1.0.0", (True, False, 1.0, True)),
    ):
        one = row(load="closed", concurrency="8", engine=engine, engine_version=version)
        limits = row_system(one, row_config(one)).decode.limits
        assert (
            limits.mixed_steps, limits.chunked_prefill, limits.kv_reserved_fraction,
            limits.scheduled_ahead,
        ) == expected  # fmt: skip
