from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from minicluster.errors import TargetFailed
from minicluster.specs.slo import SloSpec
from serving.operations.slo_metrics import read_histograms, window_metrics

SLO = SloSpec(ttft_s=1.0, tpot_s=0.05)


def _text(observed: dict[str, list[float]]) -> str:
    """Return what an endpoint would expose."""
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


def test_without_requests_every_promise_is_kept() -> None:
    """An idle window has nothing to complain of."""
    idle = read_histograms(_text({"ttft": [], "tpot": [], "prefill_queue": []}))
    seen = window_metrics(idle, idle, SLO)
    assert (seen.requests, seen.ttft_fraction, seen.tpot_fraction) == (0, 1.0, 1.0)


def test_another_endpoint_is_reported() -> None:
    """Metrics that are not ours are a failed target, by name."""
    with pytest.raises(TargetFailed, match="minicluster_prefill_queue_seconds"):
        read_histograms(_text({"ttft": [], "tpot": []}))
