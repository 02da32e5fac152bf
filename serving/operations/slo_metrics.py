"""How well the promise is kept: the difference of two scrapes of the endpoint's /metrics."""

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
from serving.api.api_keys import authorization
from serving.operations.scaling_policy import Seen

if TYPE_CHECKING:
    from minicluster.specs.slo import SloSpec

LATENCIES = ("ttft", "tpot", "queue")
METRIC = "minicluster_{}_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """
    A histogram at one moment; all counts since the endpoint started.

    Attributes:
        buckets: observations up to each bound.
    """

    count: float
    sum_s: float
    buckets: Mapping[float, float]


def scrape(base_url: str) -> dict[str, Scraped]:
    """
    Read the endpoint's histograms.

    Raises:
        TargetFailed: it does not answer, or says nothing of them.
    """
    try:
        asked = urllib.request.Request(  # noqa: S310  (our own endpoint)
            f"{base_url}/metrics", headers=authorization(os.environ)
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310
            return read_histograms(answer.read().decode())
    except (urllib.error.URLError, OSError) as error:
        raise TargetFailed(f"{base_url}/metrics: {error}") from None


def read_histograms(text: str) -> dict[str, Scraped]:
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
        found[latency] = Scraped(
            count=values["_count"],
            sum_s=values["_sum"],
            buckets={
                float(sample.labels["le"]): sample.value
                for sample in family.samples
                if sample.name.endswith("_bucket")
            },
        )
    return found


def seen_between(before: Mapping[str, Scraped], after: Mapping[str, Scraped], slo: SloSpec) -> Seen:
    """Return what was measured between two scrapes; without requests every promise is kept."""
    between = {name: _difference(before[name], after[name]) for name in LATENCIES}
    return Seen(
        requests=int(between["ttft"].count),
        ttft_fraction=_within(between["ttft"], slo.ttft_s),
        tpot_fraction=_within(between["tpot"], slo.tpot_s or math.inf),
        prefill_queue_s=_mean(between["queue"]),
        tpot_s=_mean(between["tpot"]),
    )


def _difference(before: Scraped, after: Scraped) -> Scraped:
    """Return what came in between."""
    return Scraped(
        count=after.count - before.count,
        sum_s=after.sum_s - before.sum_s,
        buckets={bound: after.buckets[bound] - before.buckets[bound] for bound in after.buckets},
    )


def _within(seen: Scraped, limit_s: float) -> float:
    """Return the share at or below the limit, of the largest bound that does not exceed it."""
    if not seen.count:
        return 1.0
    bounds = [bound for bound in seen.buckets if bound <= limit_s]
    return seen.buckets[max(bounds)] / seen.count if bounds else 0.0


def _mean(seen: Scraped) -> float:
    """Return the mean; 0 of nothing."""
    return seen.sum_s / seen.count if seen.count else 0.0
