"""`serving scale`: the metrics of a window, and what they advise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from minicluster.errors import TargetFailed
from minicluster.plan import Plan, Pool
from minicluster.specs.slo import SloSpec
from serving.cli import scale as cli
from serving.operations.autoscale import (
    WindowMetrics,
    advise,
    moved_replicas,
    read_histograms,
    window_metrics,
)
from tests.serving.command import serving_here
from tests.serving.plans import deployed, make_pool, places

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05)
GOOD = WindowMetrics(
    requests=1000, ttft_fraction=0.999, tpot_fraction=0.999, prefill_queue_s=0.1, tpot_s=0.02
)
LATE = {"ttft_fraction": 0.9, "prefill_queue_s": 0.5}


def _pools(prefill: int, decode: int, widths: tuple[int, int] = (1, 1)) -> dict[str, Pool]:
    return {
        role: make_pool(
            role,
            replicas=replicas,
            tp=width,
            placement=places(("node", tuple(range(replicas * width)))),
        )
        for role, replicas, width in zip(
            ("prefill", "decode"), (prefill, decode), widths, strict=True
        )
    }


@pytest.mark.parametrize(
    ("now", "change", "replicas", "says"),
    [
        ((2, 2), {}, (2, 2), "the SLO holds"),
        ((2, 2), LATE, (3, 1), "decode can spare"),
        ((2, 3), LATE | {"tpot_s": 0.03}, (3, 2), "decode can spare"),
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
    found = advise(replace(GOOD, **change), _pools(*now), SLO)  # type: ignore[arg-type]
    assert (found.replicas["prefill"], found.replicas["decode"]) == replicas
    assert says in found.reason
    assert found.conclusive == ("needed" not in says)


WIDTHS = st.sampled_from([1, 2, 4, 8])


@given(replicas=st.tuples(st.integers(1, 20), st.integers(1, 20)), widths=st.tuples(WIDTHS, WIDTHS))
def test_never_more_devices_than_before(replicas: tuple[int, int], widths: tuple[int, int]) -> None:
    """What one pool gets the other gives: devices never grow, and no pool goes empty."""
    pools = _pools(*replicas, widths)
    before = sum(pool.gpus for pool in pools.values())
    for to, source in (("prefill", "decode"), ("decode", "prefill")):
        moved = moved_replicas(pools, to=to, source=source)
        if moved is not None:
            assert sum(moved[role] * pools[role].slicing.gpus for role in moved) <= before
            assert min(moved.values()) >= 1
            assert moved[to] == pools[to].replicas + 1


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


def test_advice_is_measured_between_two_scrapes(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two scrapes of the endpoint advise; too few requests are exit 4."""
    monkeypatch.chdir(tmp_path)
    state = deployed(plan)
    scrapes = [_text({"ttft": [0.5] * n, "tpot": [0.1], "prefill_queue": [0.1]}) for n in (1, 2)]
    monkeypatch.setattr("serving.operations.status.current", lambda: state)
    monkeypatch.setattr(
        "serving.operations.autoscale.scrape", lambda *_: read_histograms(scrapes.pop(0))
    )
    monkeypatch.setattr(cli.time, "sleep", lambda _s: None)
    done = serving_here(tmp_path, "scale", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout) == {
        "replicas": {"prefill": 1, "decode": 1},
        "reason": "1 requests measured; 100 are needed",
    }
