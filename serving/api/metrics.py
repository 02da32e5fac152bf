"""What Prometheus scrapes: measured latencies, each beside what was planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.admission.controller import AdmissionController
    from serving.protocol.endpoint_config import EndpointConfig, ServedSlo
    from serving.protocol.phases import RequestPhases

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds of the histograms; those of a latency with a limit get the limit too."""

PHASES = {
    "queue": ("prefill queue", "queue"),
    "prefill": ("prefill", "interference of decode"),
    "kv_transfer": (
        *("kv transfer", "decode queue", "decode admission"),
        *("decode step in progress", "first decode step"),
    ),
}
"""What is measured of the way to the first token, and the plan's phases that make it up."""


class Metrics:
    """One registry, with what `front` planned already in it."""

    def __init__(self, front: EndpointConfig) -> None:
        """Make every series, so that a scrape before the first request finds them."""
        self._registry = CollectorRegistry()
        limits = {} if front.slo is None else front.slo.limits_s
        self._seconds = {
            "ttft": self._histogram("ttft", "Request to first token.", limits.get("ttft")),
            "tpot": self._histogram("tpot", "Per token after the first.", limits.get("tpot")),
            "itl": self._histogram("itl", "Gap between two chunks.", limits.get("itl")),
            "e2e": self._histogram("e2e", "Request to last token."),
            "queue": self._histogram("queue", "Waiting inside prefill's engine."),
            "prefill": self._histogram("prefill", "Prefill step."),
            "kv_transfer": self._histogram(
                "kv_transfer", "Prefill's answer to first token: KV pull, queue, decode step."
            ),
        }
        self._requests = self._counter("requests", "Requests by way and outcome.", "path outcome")
        self._shed = self._counter("shed", "Requests not admitted.", "reason")
        self._tokens = self._counter("tokens", "Tokens of answered requests.", "kind")
        self._outstanding = self._gauge("outstanding_requests", "Admitted, not ended.", "stage")
        self._backlog = self._gauge("prefill_backlog_seconds", "Prefill work admitted.", "domain")
        self._margin = self._gauge("margin_seconds", "Added to forecasts.", "quantity")
        self._replicas = self._gauge("replicas", "Replicas.", "role domain kind")
        self._plan(front, limits)

    def _plan(self, front: EndpointConfig, limits: Mapping[str, float]) -> None:
        """Set what was planned, once."""
        planned = self._gauge("planned_seconds", "Predicted latency.", "quantity percentile")
        slo = self._gauge("slo_seconds", "Limit.", "quantity")
        rate = self._gauge("planned_requests_per_second", "Load of the plan.", "kind")
        for quantity, limit_s in limits.items():
            slo.labels(quantity).set(limit_s)
        for pool in front.pools:
            for domain, replicas in pool.replicas.items():
                self._replicas.labels(pool.role, domain, "planned").set(replicas)
        if front.promise is None:
            return
        for labels, seconds in _planned_s(front.promise, split=front.split).items():
            planned.labels(*labels).set(seconds)
        rate.labels("load").set(front.promise.workload.requests_per_s)
        rate.labels("capacity").set(front.promise.capacity_requests_per_s)

    def seconds(self, quantity: str, value_s: float) -> None:
        """Observe a latency."""
        self._seconds[quantity].observe(value_s)

    def phases(self, phases: RequestPhases) -> None:
        """Observe where the time to the first token went, of what prefill computed."""
        if phases.prefill_replica:
            self._seconds["queue"].observe(phases.prefill_queue_s)
            self._seconds["prefill"].observe(phases.prefill_step_s)
        if phases.path in {"remote", "retried"}:
            self._seconds["kv_transfer"].observe(phases.handoff_s)

    def ended(self, path: str, outcome: str) -> None:
        """Count a request."""
        self._requests.labels(path, outcome).inc()

    def shed(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._shed.labels(reason).inc()
        self._requests.labels("none", "shed").inc()

    def tokens(self, prompt: int, output: int) -> None:
        """Count tokens."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("output").inc(output)

    def replicas(self, running: Mapping[tuple[str, str], int]) -> None:
        """Set how many replicas run, by role and domain."""
        for (role, domain), number in running.items():
            self._replicas.labels(role, domain, "running").set(number)

    def text(self, guard: AdmissionController) -> bytes:
        """Return everything in Prometheus's text format, with the guard's books of this moment."""
        state = guard.state
        self._outstanding.labels("prefill").set(state.waiting)
        self._outstanding.labels("all").set(state.sequences)
        for domain, seconds in state.backlog_s().items():
            self._backlog.labels(domain).set(seconds)
        margin = guard.margin
        self._margin.labels("ttft").set(margin.ttft_s)
        self._margin.labels("tpot").set(margin.tpot_s)
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, limit_s: float | None = None) -> Histogram:
        """Make a histogram of seconds."""
        bounds = sorted({*SECONDS, *(() if limit_s is None else (limit_s,))})
        return Histogram(
            f"minicluster_{name}_seconds", text, buckets=bounds, registry=self._registry
        )

    def _counter(self, name: str, text: str, labels: str) -> Counter:
        """Make a counter; Prometheus's client adds `_total`."""
        return Counter(f"minicluster_{name}", text, labels.split(), registry=self._registry)

    def _gauge(self, name: str, text: str, labels: str) -> Gauge:
        """Make a gauge."""
        return Gauge(f"minicluster_{name}", text, labels.split(), registry=self._registry)


def _planned_s(promise: ServedSlo, *, split: bool) -> dict[tuple[str, str], float]:
    """Return planned seconds by quantity and percentile; of phases the mean, if pools are split."""
    latencies = {
        (quantity, percentile): getattr(promise, quantity).at(percentile)
        for quantity in ("ttft", "tpot", "itl", "e2e")
        for percentile in ("mean", "p50", "p90", "p95", "p99")
    }
    said = promise.ttft_parts_s
    phases = {
        (quantity, "mean"): sum(said.get(name, 0.0) for name in names)
        for quantity, names in PHASES.items()
    }
    return latencies | (phases if split else {})
