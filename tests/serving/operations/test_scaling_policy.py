from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.specs.slo import SloSpec
from serving.operations.scaling_policy import PoolDevices, WindowMetrics, advise, moved_replicas

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05)
GOOD = WindowMetrics(
    requests=1000, ttft_fraction=0.999, tpot_fraction=0.999, prefill_queue_s=0.1, tpot_s=0.02
)
TWO = {"prefill": PoolDevices(replicas=2, width=1), "decode": PoolDevices(replicas=2, width=1)}


@pytest.mark.parametrize(
    ("change", "replicas", "says"),
    [
        ({}, (2, 2), "the SLO holds"),
        ({"ttft_fraction": 0.9, "prefill_queue_s": 0.5}, (3, 1), "decode can spare"),
        ({"ttft_fraction": 0.9, "prefill_queue_s": 0.02}, (2, 2), "only 2% of the TTFT limit"),
        ({"ttft_fraction": 0.9, "prefill_queue_s": 0.5, "tpot_s": 0.03}, (2, 2), "no TPOT"),
        ({"tpot_fraction": 0.9, "prefill_queue_s": 0.01}, (1, 3), "prefill can spare"),
        ({"tpot_fraction": 0.9, "prefill_queue_s": 0.2}, (2, 2), "prefill queues too"),
        ({"tpot_fraction": 0.9, "ttft_fraction": 0.9}, (2, 2), "both pools are short"),
    ],
)
def test_decisions(change: dict[str, float], replicas: tuple[int, int], says: str) -> None:
    """A replica moves to the pool whose promise breaks, only if the other has room to give."""
    found = advise(replace(GOOD, **change), TWO, SLO)  # type: ignore[arg-type]
    assert (found.replicas["prefill"], found.replicas["decode"]) == replicas
    assert says in found.reason


def test_the_last_replica_stays() -> None:
    """A pool never gives its last replica."""
    one = {"prefill": PoolDevices(replicas=1, width=1), "decode": PoolDevices(replicas=1, width=1)}
    found = advise(replace(GOOD, ttft_fraction=0.5, prefill_queue_s=2.0), one, SLO)
    assert found.replicas == {"prefill": 1, "decode": 1}
    assert "no replica to give" in found.reason


def test_too_few_requests_judge_nothing() -> None:
    """Below a hundred requests nothing is concluded."""
    found = advise(replace(GOOD, requests=99, ttft_fraction=0.0), TWO, SLO)
    assert not found.conclusive
    assert found.replicas == {"prefill": 2, "decode": 2}


@given(
    replicas=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    widths=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
)
def test_never_more_devices_than_before(replicas: tuple[int, int], widths: tuple[int, int]) -> None:
    """What one pool gets the other gives: devices never grow, and no pool goes empty."""
    shares = {
        role: PoolDevices(replicas=count, width=width)
        for role, count, width in zip(("prefill", "decode"), replicas, widths, strict=True)
    }
    before = sum(share.replicas * share.width for share in shares.values())
    for to, source in (("prefill", "decode"), ("decode", "prefill")):
        moved = moved_replicas(shares, to=to, source=source)
        if moved is not None:
            assert sum(moved[role] * shares[role].width for role in moved) <= before
            assert min(moved.values()) >= 1
            assert moved[to] == shares[to].replicas + 1
