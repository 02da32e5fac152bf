"""The metrics that Prometheus scrapes, and the recent latencies that `GET /plan` reports."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from minicluster.phases import HANDOFF, PREFILL, PREFILL_QUEUE, TTFT_PHASES, phase_s
from minicluster.specs.slo import METRICS, PERCENTILES
from minicluster.stats.quantiles import summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from minicluster.plan import Prediction
    from serving.admission.controller import AdmissionController
    from serving.api.gate import AnswerReport
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import RequestPhases

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds of the histograms, in seconds; the SLO's limit of a latency is added to its bounds."""

HISTOGRAMS = {
    "ttft": "Request to first token.",
    "tpot": "Per token after the first.",
    "e2e": "Request to last token.",
    PREFILL_QUEUE: "Wait inside the prefill engine.",
    PREFILL: "Prefill step.",
    HANDOFF: "Prefill's answer to first token: queue, KV transfer, decode step.",
}

MEASURED = (PREFILL_QUEUE, PREFILL, HANDOFF)
"""Phases of the TTFT with a histogram: of prompts that the prefill pool computed."""

GAPS = "Gap between two chunks."

COUNTERS = {
    "requests": ("Requests by path and outcome.", "path outcome"),
    "http_responses": ("Answers of any route, refusals included.", "route status"),
    "fallbacks": ("Requests that were not answered the planned way, by reason.", "reason"),
    "shed": ("Requests not admitted, by reason.", "reason"),
    "tokens": ("Tokens of complete answers.", "kind"),
}
"""Help and labels of each counter; Prometheus's client adds `_total` to its name."""

GAUGES = {
    "outstanding_requests": ("Requests admitted and not ended.", "stage"),
    "prefill_backlog_seconds": ("Seconds of prefill admitted and not done.", "domain"),
    "margin_seconds": ("Margin added to admission forecasts.", "quantity"),
    "replicas": ("Replicas.", "role domain kind"),
    "planned_seconds": ("Predicted latency.", "quantity percentile"),
    "slo_seconds": ("SLO limit.", "quantity"),
    "planned_requests_per_second": ("Planned load and capacity.", "kind"),
}


class Metrics:
    """The registry of all metrics, with the plan's predictions as gauges."""

    def __init__(self, config: EndpointConfig) -> None:
        """Make every series, so that a scrape before the first request finds them."""
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"minicluster_{name}", text, labels.split(), registry=self._registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"minicluster_{name}", text, labels.split(), registry=self._registry)
            for name, (text, labels) in GAUGES.items()
        }
        self._seconds: dict[str, Histogram] = {}
        self._gaps: GapHistogram | None = None
        self._bounds_s: dict[str, list[float]] = {}
        self.take(config)

    def take(self, config: EndpointConfig) -> None:
        """Show another plan from now on; counts go on, but for histograms with another limit."""
        self.recent = RecentLatencies()
        limits = {} if config.slo is None else config.slo.limits_s
        for name, text in HISTOGRAMS.items():
            bounds = sorted({*SECONDS, limits.get(name, SECONDS[0])})
            if self._bounds_s.get(name) != bounds:
                if name in self._seconds:
                    self._registry.unregister(self._seconds[name])
                self._bounds_s[name] = bounds
                self._seconds[name] = Histogram(
                    f"minicluster_{name}_seconds", text, buckets=bounds, registry=self._registry
                )
        bounds = sorted({*SECONDS, limits.get("itl", SECONDS[0])})
        if self._gaps is None or self._gaps.bounds_s != bounds:
            if self._gaps is not None:
                self._registry.unregister(self._gaps)
            self._gaps = GapHistogram(bounds)
            self._registry.register(self._gaps)
        for gauge in self._gauges.values():
            gauge.clear()
        self._show(config, limits)

    def _show(self, config: EndpointConfig, limits: Mapping[str, float]) -> None:
        """Set the gauges of what is planned."""
        for pool in config.pools:
            for domain, replicas in pool.replicas.items():
                self._gauges["replicas"].labels(pool.role, domain, "planned").set(replicas)
        for quantity, limit_s in limits.items():
            self._gauges["slo_seconds"].labels(quantity).set(limit_s)
        if config.prediction is None or config.workload is None:
            return
        for labels, seconds in _planned_s(config.prediction, split=config.split).items():
            self._gauges["planned_seconds"].labels(*labels).set(seconds)
        rate = self._gauges["planned_requests_per_second"]
        rate.labels("load").set(config.workload.requests_per_s)
        rate.labels("capacity").set(config.prediction.capacity_requests_per_s)

    def first_token(self, ttft_s: float, phases: RequestPhases) -> None:
        """Observe a TTFT, and its phases as far as the prefill pool took part."""
        self._seconds["ttft"].observe(ttft_s)
        if not phases.as_planned:
            self._counters["fallbacks"].labels(phases.reason).inc()
        if phases.prefill_replica:
            for name in MEASURED:
                self._seconds[name].observe(phases.phases_s[name])

    def answered(self, route: str, status: int) -> None:
        """Count an answer, of whatever route."""
        self._counters["http_responses"].labels(route, str(status)).inc()

    def ended(self, report: AnswerReport) -> None:
        """Count a request that ended, and observe its answer if that is complete."""
        self._counters["requests"].labels(report.path, report.outcome).inc()
        self.recent.outcomes[report.outcome] += 1
        if report.outcome != "ok":
            return
        for name, seconds in (("e2e", report.e2e_s), ("tpot", report.tpot_s)):
            if seconds is not None:
                self._seconds[name].observe(seconds)
        assert self._gaps is not None  # noqa: S101  (`take` makes it)
        self._gaps.observe(report.gaps_s)
        self._counters["tokens"].labels("prompt").inc(report.prompt_tokens or 0)
        self._counters["tokens"].labels("output").inc(report.output_tokens or 0)
        self.recent.add(report)

    def shed(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._counters["shed"].labels(reason).inc()
        self._counters["requests"].labels("none", "shed").inc()
        self.recent.outcomes[f"shed: {reason}"] += 1

    def replicas(self, running: Mapping[tuple[str, str], int]) -> None:
        """Set the number of running replicas, by role and domain."""
        for (role, domain), number in running.items():
            self._gauges["replicas"].labels(role, domain, "running").set(number)

    def text(self, admission: AdmissionController) -> bytes:
        """Return all metrics in Prometheus's text format, with the requests in flight now."""
        inflight, margin = admission.inflight, admission.margin
        for stage, requests in inflight.outstanding.items():
            self._gauges["outstanding_requests"].labels(stage).set(requests)
        self._gauges["margin_seconds"].labels("ttft").set(margin.ttft_s)
        self._gauges["margin_seconds"].labels("tpot").set(margin.tpot_s)
        for domain, seconds in inflight.backlog_s().items():
            self._gauges["prefill_backlog_seconds"].labels(domain).set(seconds)
        return generate_latest(self._registry)


def _planned_s(prediction: Prediction, *, split: bool) -> dict[tuple[str, str], float]:
    """Return predicted seconds by quantity and percentile; of phases the mean, in a split plan."""
    latencies = {
        (quantity, percentile): getattr(prediction, quantity).at(percentile)
        for quantity in METRICS
        for percentile in PERCENTILES
    }
    if not split:
        return latencies
    # A phase that takes nothing is not in the plan.
    parts_s = dict.fromkeys(TTFT_PHASES, 0.0) | prediction.ttft_parts_s
    return latencies | {(name, "mean"): phase_s(parts_s, name) or 0.0 for name in MEASURED}


LAST_ANSWERS = 1_000
LAST_GAPS = 10_000
"""Sizes of the window that `GET /plan` reports on: answers, and gaps between their tokens."""


class GapHistogram(Collector):
    """
    The histogram of the gaps between tokens, which takes those of a whole answer at once.

    There are as many as tokens; one by one they would cost more than all else of an answer.
    """

    def __init__(self, bounds_s: list[float]) -> None:
        """Start empty, with these upper bounds."""
        self.bounds_s = bounds_s
        self._counts = np.zeros(len(bounds_s) + 1, dtype=np.int64)
        self._sum_s = 0.0

    def observe(self, gaps_s: Sequence[float]) -> None:
        """Add gaps."""
        gaps = np.asarray(gaps_s, dtype=float)
        at = np.searchsorted(self.bounds_s, gaps)
        self._counts += np.bincount(at, minlength=len(self._counts))
        self._sum_s += float(gaps.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram, as Prometheus's client asks for it."""
        bounds = [*map(str, self.bounds_s), "+Inf"]
        buckets = zip(bounds, np.cumsum(self._counts).tolist(), strict=True)
        yield HistogramMetricFamily(
            "minicluster_itl_seconds", GAPS, buckets=[*buckets], sum_value=self._sum_s
        )


class RecentLatencies:
    """The latencies of the last answers, and the outcomes of all requests."""

    def __init__(self) -> None:
        self.outcomes: Tally[str] = Tally()
        self._last: deque[tuple[float, AnswerReport]] = deque(maxlen=LAST_ANSWERS)
        self._gaps_s: deque[float] = deque(maxlen=LAST_GAPS)

    def add(self, answer: AnswerReport) -> None:
        """Add a complete answer, which has ended now."""
        self._last.append((time.perf_counter(), answer))
        self._gaps_s.extend(answer.gaps_s)

    def summary(self) -> dict[str, Any]:
        """Return percentiles of every latency, the rate, and the outcomes, as plain data."""
        last = [answer for _, answer in self._last]
        span_s = self._last[-1][0] - self._last[0][0] if last else 0.0
        return {
            "answers": len(last),
            "requests_per_s": (len(last) - 1) / span_s if span_s > 0 else None,
            "outcomes": dict(self.outcomes),
            "ttft": _statistics(each.ttft_s for each in last),
            "tpot": _statistics(each.tpot_s for each in last),
            "e2e": _statistics(each.e2e_s for each in last),
            "itl": _statistics(self._gaps_s),
        }


def _statistics(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean and percentiles; `None` without values."""
    found = summarise([each for each in values if each is not None])
    return None if found is None else {f"{name}_s": found.at(name) for name in PERCENTILES}
