"""SLO attainment over a time window: the difference of two scrapes of the endpoint's /metrics."""

from __future__ import annotations

import math
import os
import urllib.request
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from minicluster.errors import TargetFailed
from minicluster.phases import PREFILL_QUEUE
from serving.api.access import authorization
from serving.api.tls import trusting
from serving.operations.scaling_policy import WindowMetrics

if TYPE_CHECKING:
    from minicluster.specs.slo import SloSpec

LATENCIES = ("ttft", "tpot", PREFILL_QUEUE)
METRIC = "minicluster_{}_seconds"
SHED = "minicluster_shed"
OFFERED = ("offered", "", 0.0)
"""Key of the requests that were offered: those with a first token, and those not admitted."""


Samples = dict[tuple[str, str, float], float]
"""Values of the histograms since the endpoint's start, by latency, suffix and bound of a bucket."""


def scrape(base_url: str, tls_cert: str = "") -> Samples:
    """
    Read the endpoint's histograms; by HTTPS, the certificate of *tls_cert* is trusted.

    Raises:
        TargetFailed: the endpoint does not answer, or a histogram is missing.
    """
    try:
        request = urllib.request.Request(  # noqa: S310  (our own endpoint)
            f"{base_url}/metrics", headers=authorization(os.environ)
        )
        context = trusting(tls_cert)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310
            return read_histograms(answer.read().decode())
    except OSError as error:
        raise TargetFailed(f"{base_url}/metrics: {error}") from None


def read_histograms(text: str) -> Samples:
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
        for sample in family.samples:
            suffix, bound = sample.name.removeprefix(family.name), float(sample.labels.get("le", 0))
            found[latency, suffix, bound] = sample.value
    shed = families[SHED].samples if SHED in families else ()
    refused = sum(sample.value for sample in shed if sample.name == f"{SHED}_total")
    found[OFFERED] = found["ttft", "_count", 0.0] + refused
    return found


def offered_per_s(before: Samples, after: Samples, window_s: float) -> float:
    """Return the requests/s that came between two scrapes; a restarted endpoint begins anew."""
    since = after[OFFERED] - before[OFFERED]
    return (since if since >= 0 else after[OFFERED]) / window_s


def window_metrics(before: Samples, after: Samples, slo: SloSpec) -> WindowMetrics:
    """Return the metrics between two scrapes; without requests attainment is 1."""
    seen = {key: value - before[key] for key, value in after.items()}
    return WindowMetrics(
        requests=int(seen["ttft", "_count", 0.0]),
        ttft_fraction=_within(seen, "ttft", slo.ttft_s),
        tpot_fraction=_within(seen, "tpot", slo.tpot_s or math.inf),
        prefill_queue_s=_mean(seen, PREFILL_QUEUE),
        tpot_s=_mean(seen, "tpot"),
    )


def _within(seen: Samples, latency: str, limit_s: float) -> float:
    """Return the share of observations up to the largest bound within the limit."""
    count = seen[latency, "_count", 0.0]
    if not count:
        return 1.0
    bounds = [
        bound
        for name, suffix, bound in seen
        if (name, suffix) == (latency, "_bucket") and bound <= limit_s
    ]
    return seen[latency, "_bucket", max(bounds)] / count if bounds else 0.0


def _mean(seen: Samples, latency: str) -> float:
    count = seen[latency, "_count", 0.0]
    return seen[latency, "_sum", 0.0] / count if count else 0.0
