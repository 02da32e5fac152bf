"""`serving scale`: the metrics of a window, and what they advise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from minicluster.errors import TargetFailed
from minicluster.specs.slo import SloSpec
from serving.operations.scaling_policy import PoolDevices, WindowMetrics, advise, moved_replicas
from serving.operations.slo_metrics import read_histograms, window_metrics

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05)
GOOD = WindowMetrics(
    requests=1000, ttft_fraction=0.999, tpot_fraction=0.999, prefill_queue_s=0.1, tpot_s=0.02
)
LATE = {"ttft_fraction": 0.9, "prefill_queue_s": 0.5}


def _devices(prefill: int, decode: int, widths: tuple[int, int] = (1, 1)) -> dict[str, PoolDevices]:
    return {
        "prefill": PoolDevices(replicas=prefill, width=widths[0]),
        "decode": PoolDevices(replicas=decode, width=widths[1]),
    }


@pytest.mark.parametrize(
    ("now", "change", "replicas", "says"),
    [
        ((2, 2), {}, (2, 2), "the SLO holds"),
        ((2, 2), LATE, (3, 1), "decode can spare"),
        ((1, 1), LATE, (1, 1), "no replica to give"),
        ((2, 2), LATE | {"prefill_queue_s": 0.02}, (2, 2), "only 2% of the TTFT limit"),
        ((2, 2), LATE | {"tpot_s": 0.03}, (2, 2), "no TPOT"),
        ((2, 2), {"tpot_fraction": 0.9, "prefill_queue_s": 0.01}, (1, 3), "prefill can spare"),
        ((2, 2), {"tpot_fraction": 0.9, "prefill_queue_s": 0.2}, (2, 2), "prefill queues too"),
        ((2, 2), {"tpot_fraction": 0.9, "ttft_fraction": 0.9}, (2, 2), "both pools are short"),
        ((2, 2), {"requests": 99, "ttft_fraction": 0.0}, (2, 2), "100 are needed"),
    ],
)
def test_decisions(
    now: tuple[int, int], change: dict[str, float], replicas: tuple[int, int], says: str
) -> None:
    """A replica moves to the pool whose SLO breaks, only if the other has room to give."""
    found = advise(replace(GOOD, **change), _devices(*now), SLO)  # type: ignore[arg-type]
    assert (found.replicas["prefill"], found.replicas["decode"]) == replicas
    assert says in found.reason
    assert found.conclusive == ("needed" not in says)


WIDTHS = st.sampled_from([1, 2, 4, 8])


@given(replicas=st.tuples(st.integers(1, 20), st.integers(1, 20)), widths=st.tuples(WIDTHS, WIDTHS))
def test_never_more_devices_than_before(replicas: tuple[int, int], widths: tuple[int, int]) -> None:
    """What one pool gets the other gives: devices never grow, and no pool goes empty."""
    shares = _devices(*replicas, widths)
    before = sum(share.replicas * share.width for share in shares.values())
    for to, source in (("prefill", "decode"), ("decode", "prefill")):
        moved = moved_replicas(shares, to=to, source=source)
        if moved is not None:
            assert sum(moved[role] * shares[role].width for role in moved) <= before
            assert min(moved.values()) >= 1
            assert moved[to] == shares[to].replicas + 1


def _text(observed: dict[str, list[float]]) -> str:
    registry = CollectorRegistry()
    for name, values in observed.items():
        histogram = Histogram(
            f"minicluster_{name}_seconds", name, registry=registry, buckets=(0.01, 0.05, 1.0, 10.0)
        )
        for value in values:
            histogram.observe(value)
    return generate_latest(registry).decode()


def test_only_what_came_in_between_counts() -> None:
    """Attainment and means are those of the window, not of the endpoint's life."""
    late = {"ttft": [5.0] * 50, "tpot": [0.2] * 50, "prefill_queue": [3.0] * 50}
    good = {"ttft": [0.5] * 9 + [2.0], "tpot": [0.02] * 10, "prefill_queue": [0.1] * 10}
    both = {name: late[name] + good[name] for name in late}
    seen = window_metrics(read_histograms(_text(late)), read_histograms(_text(both)), SLO)
    assert seen.requests == 10
    assert seen.ttft_fraction == pytest.approx(0.9)
    assert seen.tpot_fraction == pytest.approx(1.0)
    assert seen.prefill_queue_s == pytest.approx(0.1)
    assert seen.tpot_s == pytest.approx(0.02)


def test_without_requests_the_slo_holds() -> None:
    """An idle window misses nothing; metrics that are not ours are a failed target, by name."""
    idle = read_histograms(_text({"ttft": [], "tpot": [], "prefill_queue": []}))
    seen = window_metrics(idle, idle, SLO)
    assert (seen.requests, seen.ttft_fraction, seen.tpot_fraction) == (0, 1.0, 1.0)
    with pytest.raises(TargetFailed, match="minicluster_prefill_queue_seconds"):
        read_histograms(_text({"ttft": [], "tpot": []}))
