"""SLO attainment over a time window: the difference of two scrapes of the endpoint's /metrics."""

from __future__ import annotations

import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from minicluster.errors import TargetFailed
from minicluster.phases import PREFILL_QUEUE
from serving.api.auth import authorization
from serving.operations.scaling_policy import WindowMetrics

if TYPE_CHECKING:
    from minicluster.specs.slo import SloSpec

LATENCIES = ("ttft", "tpot", PREFILL_QUEUE)
METRIC = "minicluster_{}_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSnapshot:
    """
    A histogram at one moment, with counts since the endpoint's start.

    Attributes:
        buckets: observations up to each bound.
    """

    count: float
    sum_s: float
    buckets: Mapping[float, float]


def scrape(base_url: str) -> dict[str, HistogramSnapshot]:
    """
    Read the endpoint's histograms.

    Raises:
        TargetFailed: the endpoint does not answer, or a histogram is missing.
    """
    try:
        request = urllib.request.Request(  # noqa: S310  (our own endpoint)
            f"{base_url}/metrics", headers=authorization(os.environ)
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return read_histograms(answer.read().decode())
    except (urllib.error.URLError, OSError) as error:
        raise TargetFailed(f"{base_url}/metrics: {error}") from None


def read_histograms(text: str) -> dict[str, HistogramSnapshot]:
    """
    Read the histograms of `LATENCIES` from Prometheus' text format.

    Raises:
        TargetFailed: one is missing.
    """
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {}
    for latency in LATENCIES:
        family = families.get(METRIC.format(latency))
        if family is None:
            raise TargetFailed(f"/metrics has no {METRIC.format(latency)}")
        values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples}
        found[latency] = HistogramSnapshot(
            count=values["_count"],
            sum_s=values["_sum"],
            buckets={
                float(sample.labels["le"]): sample.value
                for sample in family.samples
                if sample.name.endswith("_bucket")
            },
        )
    return found


def window_metrics(
    before: Mapping[str, HistogramSnapshot], after: Mapping[str, HistogramSnapshot], slo: SloSpec
) -> WindowMetrics:
    """Return the metrics between two scrapes; without requests attainment is 1."""
    between = {name: _difference(before[name], after[name]) for name in LATENCIES}
    return WindowMetrics(
        requests=int(between["ttft"].count),
        ttft_fraction=_within(between["ttft"], slo.ttft_s),
        tpot_fraction=_within(between["tpot"], slo.tpot_s or math.inf),
        prefill_queue_s=_mean(between[PREFILL_QUEUE]),
        tpot_s=_mean(between["tpot"]),
    )


def _difference(before: HistogramSnapshot, after: HistogramSnapshot) -> HistogramSnapshot:
    return HistogramSnapshot(
        count=after.count - before.count,
        sum_s=after.sum_s - before.sum_s,
        buckets={bound: after.buckets[bound] - before.buckets[bound] for bound in after.buckets},
    )


def _within(seen: HistogramSnapshot, limit_s: float) -> float:
    """Return the share of observations up to the largest bound within the limit."""
    if not seen.count:
        return 1.0
    bounds = [bound for bound in seen.buckets if bound <= limit_s]
    return seen.buckets[max(bounds)] / seen.count if bounds else 0.0


def _mean(seen: HistogramSnapshot) -> float:
    return seen.sum_s / seen.count if seen.count else 0.0
