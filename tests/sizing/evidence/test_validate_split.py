"""Split rows: prefill ranks, decode slots and who waits for which."""

from __future__ import annotations

import pytest

from sizing.evidence.replay import ReplayedRequest
from sizing.evidence.row import row_from
from sizing.evidence.row_config import row_config
from sizing.evidence.slots import decode_slots, recipe_slots
from sizing.evidence.tandem import Pools, passed

CELLS = {
    "id": "one", "model": "deepseek-ai/DeepSeek-V3", "gpu": "h100-sxm", "engine": "trtllm",
    "engine_version": "1.1.0", "weight_dtype": "fp8", "serving": "disaggregated", "gpus": "64",
    "prefill_replicas": "1", "prefill_tp": "16", "decode_replicas": "3", "decode_tp": "16",
    "load": "closed", "concurrency": "60", "isl": "1024", "osl": "1024", "length_jitter": "0.2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("users", "replicas", "ranks", "slots"),
    [
        (6, 3, 1, 1), (9, 3, 1, 2), (30, 3, 1, 8), (60, 3, 1, 16), (117, 3, 1, 32),
        (154, 2, 1, 64), (462, 3, 1, 128), (77, 1, 16, 64), (231, 3, 16, 64), (308, 1, 16, 256),
        (615, 1, 16, 512), (1229, 1, 16, 1024),
    ],
)  # fmt: skip
def test_users_tell_the_slots_of_a_recipe(
    users: int, replicas: int, ranks: int, slots: int
) -> None:
    """NVIDIA srt-slurm recipes for DeepSeek on H100: slots from file names, users from sweeps."""
    assert recipe_slots(users, replicas, ranks) == slots


@pytest.mark.parametrize("users", [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_a_sweep_over_powers_of_two_tells_nothing(users: int) -> None:
    """Such users say what was tried, not what the pool holds."""
    assert recipe_slots(users, 1, 1) is None
    assert recipe_slots(users, 3, 1) is None


def test_slots_are_what_memory_and_recipe_leave() -> None:
    """60 users of three replicas: 16 each; long prompts fit fewer; 64 users say nothing."""
    counts = []
    for cells in ({}, {"isl": "100000"}, {"concurrency": "64"}, {"engine": "sglang"}):
        row = row_from(CELLS | cells, "rows.csv:2")
        counts.append(decode_slots(row, row_config(row)))
    assert counts[0] == 48
    assert counts[1] < 48
    assert min(counts[2:]) > 60


def pools(servers: int = 2, slots: int = 3) -> Pools:
    """Prompts of 1 s, pulls of 0.1 s."""
    return Pools(servers=servers, slots=slots, request_s=0.0, prefill_s=lambda _: 1.0, pull_s=0.1)


def test_users_beyond_the_slots_wait_for_one() -> None:
    """Six users, three slots of 10 s: every user waits as long as another one decodes."""
    served = passed(pools(servers=6), [ReplayedRequest(100, 0, 11)] * 300, 6, 1.0)
    waits = [each.first_s - each.sent_s for each in served[12:]]
    assert waits == pytest.approx([10.0] * len(waits))


def test_nobody_waits_where_there_is_room() -> None:
    """One user: prompt, pull, and then the tokens."""
    served = passed(pools(), [ReplayedRequest(100, 0, 11)] * 3, 1, 0.5)
    assert [each.first_s - each.sent_s for each in served] == pytest.approx([1.1] * 3)
    assert [each.last_s - each.first_s for each in served] == pytest.approx([5.0] * 3)


def test_the_first_wave_queues_for_prefill() -> None:
    """Six users at two ranks: prompts are done after 1, 1, 2, 2, 3 and 3 s."""
    served = passed(pools(slots=9), [ReplayedRequest(100, 0, 11)] * 6, 6, 0.5)
    assert [each.first_s for each in served] == pytest.approx([1.1, 1.1, 2.1, 2.1, 3.1, 3.1])
