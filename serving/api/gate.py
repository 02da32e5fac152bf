"""
The gate: the one exact count behind the endpoint processes of a plan.

It admits requests and counts them while they are in flight, and has the metrics and the readiness
of the cluster. Several endpoints share one, so that what was simulated with one router stays true.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter as Tally
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from minicluster.phases import DECODE, HANDOFF, PREFILL, PREFILL_QUEUE, TTFT_PHASES, phase_s
from minicluster.specs.slo import METRICS, PERCENTILES
from minicluster.stats.quantiles import summarise
from serving.admission.controller import AdmissionController, Shed
from serving.protocol.messages import DECODE_FAILED, Refusal, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping

    from minicluster.plan import Prediction
    from serving.admission.controller import InflightRequest, KeyHolder
    from serving.protocol.messages import Backend, EndpointConfig, PoolRequests, RequestPhases
    from serving.request.cost import RequestSize

    Running = dict[tuple[str, str], int]
    Facts = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReport:
    """
    The report of a request that has ended.

    Attributes:
        outcome: as in `minicluster_requests_total`.
        path: as in `RequestPhases`; `none`: it got no token.
        ttft_s, tpot_s, e2e_s: latencies, where they are known.
        prompt_tokens, output_tokens: counts of the engine.
        gaps_s: times between the chunks of a stream.
    """

    outcome: str
    path: str = "none"
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    gaps_s: Sequence[float] = ()


class Tickets(Protocol):
    """The gate as an endpoint uses it, in its own process or from another one."""

    async def admit(
        self, ticket: int, client: KeyHolder, size: RequestSize, *, streamed: bool
    ) -> str | Refusal:
        """
        Admit a request, which has this number from now on; return the domain that answers it.

        Raises:
            RequestRefused: the gate does not answer.
        """

    async def move(self, ticket: int) -> str:
        """Move a request whose domain could not answer it; return the other domain."""

    def first_token(self, ticket: int, phases: RequestPhases, ttft_s: float) -> None:
        """Take note of the first token of a request."""

    def ended(self, ticket: int, report: AnswerReport) -> None:
        """Take note of the end of a request."""

    def answered(self, route: str, status: int) -> None:
        """Count an answer of any route."""

    def shed(self, reason: str) -> None:
        """Count a request that the endpoint has refused for a limit of its key."""

    async def ready(self) -> tuple[bool, list[str]]:
        """Return whether requests get through in any domain, and what is lacking in the others."""

    async def metrics_text(self) -> str:
        """Return the metrics in Prometheus's text format."""

    async def state(self) -> dict[str, Any]:
        """Return what is deployed and what is measured, as `GET /plan` has them."""

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        """Return the steps of one engine of each role that ended in an interval."""


class Gate:
    """
    Implements `Tickets` where the counts are; those of several endpoints have different numbers.

    Attributes:
        admission, metrics: the counts.
    """

    def __init__(
        self,
        config: EndpointConfig,
        backend: Backend,
        *,
        sheds: bool = True,
        token_limit: int | None = None,
        former: Gate | None = None,
        requests: Callable[[], Mapping[tuple[str, str], PoolRequests]] = dict,
    ) -> None:
        """
        Start without requests; those that would miss the SLO are refused if it *sheds*.

        *token_limit* is the most tokens of one answer, for `state`. Keys' counts and metrics of a
        *former* gate, of the plan before, go on. *requests* tells what is in each pool, by role and
        domain, where that is known.
        """
        self._config = config
        self._backend = backend
        self._token_limit = token_limit
        self.admission: AdmissionController = AdmissionController(
            config, sheds=sheds, former=None if former is None else former.admission
        )
        self.metrics: Metrics = Metrics(config) if former is None else former.metrics
        if former is not None:
            self.metrics.take(config)
        self._requests: dict[Hashable, InflightRequest] = {}
        self._in_pools = requests
        self._readiness = ReadyCheck(config, backend, self.admission, self.metrics)

    async def admit(
        self, ticket: Hashable, client: KeyHolder, size: RequestSize, *, streamed: bool
    ) -> str | Refusal:
        """See `Tickets`."""
        self._readiness.running.refresh()
        request = self.admission.admit(self.admission.cost(size, client), client)
        if isinstance(request, Shed):
            self.metrics.shed(request.reason)
            return request.refusal
        self._requests[ticket] = request
        if not streamed and request.forecast is not None:
            # The first token of an answer in one piece is not seen: it leaves when it is due.
            on_time = self.admission.inflight.first_token
            asyncio.get_running_loop().call_later(request.forecast.ttft_s, on_time, request)
        return request.domain

    def resume(
        self,
        ticket: Hashable,
        client: KeyHolder,
        size: RequestSize,
        *,
        domain: str,
        waiting: bool,
    ) -> None:
        """Count a request that another gate has admitted, and whether its first token is due."""
        request = self.admission.resume(self.admission.cost(size, client), client, domain)
        self._requests[ticket] = request
        if not waiting:
            self.admission.inflight.first_token(request)

    async def move(self, ticket: Hashable) -> str:
        """See `Tickets`."""
        request = self._requests[ticket]
        self.admission.move(request)
        return request.domain

    def first_token(self, ticket: Hashable, phases: RequestPhases, ttft_s: float) -> None:
        """See `Tickets`; of a request that is unknown nothing is counted."""
        request = self._requests.get(ticket)
        if request is not None:
            self.metrics.first_token(ttft_s, phases)
            self.admission.first_token(request, ttft_s if phases.as_planned else None)
            self._readiness.answered(request.domain, phases, time.perf_counter())

    def ended(self, ticket: Hashable, report: AnswerReport) -> None:
        """See `Tickets`; of a request that is unknown, or has ended, nothing is counted."""
        request = self._requests.pop(ticket, None)
        if request is not None:
            self.admission.end(request, report.tpot_s, report.prompt_tokens)
            self.metrics.ended(report)

    def answered(self, route: str, status: int) -> None:
        """See `Tickets`."""
        self.metrics.answered(route, status)

    def shed(self, reason: str) -> None:
        """See `Tickets`."""
        self.metrics.shed(reason)

    async def ready(self) -> tuple[bool, list[str]]:
        """See `Tickets`."""
        return await self._readiness.check()

    async def metrics_text(self) -> str:
        """See `Tickets`."""
        await self._readiness.running.get()
        return self.metrics.text(self.admission, self._stages()).decode()

    def _stages(self) -> dict[str, int]:
        in_pools, first = self._in_pools(), self._config.prefilling.role
        return requests_by_stage(
            len(self._requests),
            sum(request.waiting for request in self._requests.values()),
            [requests for (role, _), requests in in_pools.items() if role == first],
            split=self._config.split,
        )

    async def state(self) -> dict[str, Any]:
        """See `Tickets`."""
        running = await self._readiness.running.get()
        replicas = {
            pool.role: {
                domain: {"planned": planned, "running": running.get((pool.role, domain), 0)}
                for domain, planned in pool.replicas.items()
            }
            for pool in self._config.pools
        }
        engines: dict[str, dict[str, Any]] = {}
        for (role, domain), facts in (await self._readiness.facts.get()).items():
            engines.setdefault(role, {})[domain] = facts
        margin = self.admission.margin
        return {
            "deployed": {
                "replicas": replicas,
                "engines": engines,
                "max_output_tokens": self._token_limit,
                "admission": self.admission.sheds,
            },
            "measured": {
                **self.metrics.recent.summary(),
                "outstanding": self.admission.inflight.outstanding,
                "margin": {"ttft_s": margin.ttft_s, "tpot_s": margin.tpot_s},
            },
        }

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        """See `Tickets`."""
        return await self._backend.steps(begin_unix_s, end_unix_s)


def requests_by_stage(
    requests: int, without_token: int, first_pool: Sequence[PoolRequests], *, split: bool
) -> dict[str, int]:
    """
    Return how many of the *requests* in flight are in each phase now, by the names of the phases.

    The gate sees places at replicas and first tokens, and not into engines. A prompt behind another
    one at its prefill replica counts as queued, although an engine may compute both in one step.
    Where there is no prefill replica, prompts are computed where they are answered: until its first
    token a request that has a place counts as `prefill`.

    Args:
        without_token: those whose first token is still to come.
        first_pool: what is in the pool that computes prompts, by domain.
        split: whether that is a prefill pool.
    """
    queued = sum(pool.waiting for pool in first_pool)
    at_replicas = [number for pool in first_pool for number in pool.at_replicas] if split else []
    computing = max(0, without_token - queued)
    if at_replicas:
        computing = sum(number > 0 for number in at_replicas)
        queued += sum(at_replicas) - computing
    return {
        PREFILL_QUEUE: queued,
        PREFILL: computing,
        HANDOFF: max(0, without_token - queued - computing),
        DECODE: requests - without_token,
    }


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
    "stage_requests": ("Requests in flight by phase.", "stage"),
    "recent_seconds": ("Exact percentiles of the last minutes.", "quantity percentile"),
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
        self.recent = RecentRequests("p99" if config.slo is None else config.slo.percentile)
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
        self.recent.first_token(ttft_s)
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
        self.recent.ended(report)
        if report.outcome != "ok":
            return
        for name, seconds in (("e2e", report.e2e_s), ("tpot", report.tpot_s)):
            if seconds is not None:
                self._seconds[name].observe(seconds)
        assert self._gaps is not None  # noqa: S101  (`take` makes it)
        self._gaps.observe(report.gaps_s)
        self._counters["tokens"].labels("prompt").inc(report.prompt_tokens or 0)
        self._counters["tokens"].labels("output").inc(report.output_tokens or 0)

    def shed(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._counters["shed"].labels(reason).inc()
        self._counters["requests"].labels("none", "shed").inc()
        self.recent.shed(reason)

    def replicas(self, running: Mapping[tuple[str, str], int]) -> None:
        """Set the number of running replicas, by role and domain."""
        for (role, domain), number in running.items():
            self._gauges["replicas"].labels(role, domain, "running").set(number)

    def text(self, admission: AdmissionController, stages: Mapping[str, int]) -> bytes:
        """Return all metrics in Prometheus's text format, with the requests in flight now."""
        inflight, margin = admission.inflight, admission.margin
        for stage, requests in stages.items():
            self._gauges["stage_requests"].labels(stage).set(requests)
        self._gauges["recent_seconds"].clear()
        for quantity, percentiles_s in self.recent.latencies().items():
            for name, seconds in (percentiles_s or {}).items():
                percentile = name.removesuffix("_s")
                self._gauges["recent_seconds"].labels(quantity, percentile).set(seconds)
        for stage, requests in inflight.outstanding.items():
            self._gauges["outstanding_requests"].labels(stage).set(requests)
        self._gauges["margin_seconds"].labels("ttft").set(margin.ttft_s)
        self._gauges["margin_seconds"].labels("tpot").set(margin.tpot_s)
        for domain, seconds in inflight.backlog_s().items():
            self._gauges["prefill_backlog_seconds"].labels(domain).set(seconds)
        return generate_latest(self._registry)


def _planned_s(prediction: Prediction, *, split: bool) -> dict[tuple[str, str], float]:
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


RECENT_S = 300.0
"""Age up to which latencies and outcomes are recent."""

LAST_VALUES = 10_000
"""Most recent values of each latency; at higher rates they reach less far back."""

SLOT_S = 5.0
"""Interval of the points of the live page's charts."""


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


class RecentSeconds:
    """The values of one latency in the last minutes."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=LAST_VALUES)

    def add(self, values_s: Iterable[float | None]) -> None:
        """Add values that are known now; `None` is none."""
        now_s = time.perf_counter()
        self._last.extend((now_s, value_s) for value_s in values_s if value_s is not None)

    def percentiles(self, now_s: float) -> dict[str, float] | None:
        """Return the percentiles of all, as `p50_s` and so on; `None`: there are no values."""
        while self._last and self._last[0][0] < now_s - RECENT_S:
            self._last.popleft()
        return _statistics([value_s for _, value_s in self._last])

    def by_slot(self) -> dict[int, dict[str, float] | None]:
        """Return the percentiles of each slot that has values."""
        return {
            slot: _statistics([value_s for _, value_s in values])
            for slot, values in groupby(self._last, key=lambda pair: _slot(pair[0]))
        }


class RecentRequests:
    """
    What the last minutes were like, and the outcomes of all requests by this plan.

    Attributes:
        outcomes: number of requests by outcome.
    """

    def __init__(self, percentile: str) -> None:
        """Start empty; the history shows the median and this *percentile*."""
        self.outcomes: Tally[str] = Tally()
        self._shown = {"p50_s", f"{percentile}_s"}
        self._seconds = {name: RecentSeconds() for name in METRICS}
        self._ends: deque[float] = deque(maxlen=LAST_VALUES)
        self._slots: dict[int, Tally[str]] = {}

    def first_token(self, ttft_s: float) -> None:
        """Add the TTFT of a request that has its first token now."""
        self._seconds["ttft"].add([ttft_s])

    def ended(self, report: AnswerReport) -> None:
        """Add a request that has ended now, with its latencies if its answer is complete."""
        self.outcomes[report.outcome] += 1
        if report.outcome != "ok":
            self._count(failed=int(report.outcome in FAILURES))
            return
        self._ends.append(time.perf_counter())
        self._seconds["tpot"].add([report.tpot_s])
        self._seconds["e2e"].add([report.e2e_s])
        self._seconds["itl"].add(report.gaps_s)
        self._count(ok=1, output_tokens=report.output_tokens or 0)

    def shed(self, reason: str) -> None:
        """Add a request that was not admitted."""
        self.outcomes[f"shed: {reason}"] += 1
        self._count(shed=1)

    def latencies(self) -> dict[str, dict[str, float] | None]:
        """Return the percentiles of each latency, as `p50_s` and so on; `None`: no value."""
        now_s = time.perf_counter()
        return {name: seconds.percentiles(now_s) for name, seconds in self._seconds.items()}

    def summary(self) -> dict[str, Any]:
        """Return latencies, rate, outcomes and history, as plain data."""
        latencies, ends = self.latencies(), self._ends
        while ends and ends[0] < time.perf_counter() - RECENT_S:
            ends.popleft()
        span_s = ends[-1] - ends[0] if ends else 0.0
        return {
            "window_s": RECENT_S,
            "answers": len(ends),
            "requests_per_s": (len(ends) - 1) / span_s if span_s > 0 else None,
            "outcomes": dict(self.outcomes),
            **latencies,
            "history": {"slot_s": SLOT_S, "slots": self._history()},
        }

    def _history(self) -> list[dict[str, Any]]:
        """Return what each slot counted, the oldest first; the last one has only begun."""
        last = _slot(time.perf_counter())
        by_slot = {name: self._seconds[name].by_slot() for name in ("ttft", "tpot")}
        return [
            {
                **self._slots.get(slot, {}),
                **{
                    name: {key: value for key, value in found.items() if key in self._shown}
                    for name, slots in by_slot.items()
                    if (found := slots.get(slot)) is not None
                },
            }
            for slot in range(last - int(RECENT_S / SLOT_S), last + 1)
        ]

    def _count(self, **counts: int) -> None:
        now = _slot(time.perf_counter())
        if now not in self._slots:
            oldest = now - int(RECENT_S / SLOT_S)
            self._slots = {at: tally for at, tally in self._slots.items() if at >= oldest}
            self._slots[now] = Tally()
        self._slots[now].update(counts)


def _slot(at_s: float) -> int:
    return int(at_s // SLOT_S)


FAILURES = ("failed", "broken")
"""Outcomes for which the cluster is to blame."""


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    summary = summarise(values)
    return None if summary is None else {f"{name}_s": summary.at(name) for name in PERCENTILES}


logger = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Age at which the number of replicas is stale; a query costs Serve's controller some ms."""

FACTS_REFRESH_S = 60.0
"""Age at which the engines' settings are stale; they change with a deployment only."""

WAIT_S = 1.0
"""Longest wait for a refresh before the stale value is returned."""

FIRST_WAIT_S = 10.0
"""Longest wait for the first value."""

PROBE_TOKEN = 100
"""A token id that every vocabulary has; its meaning does not matter."""

THROUGH_PREFILL = ("remote", "retried")
"""Paths on which prefill, the KV transfer and decode have all worked."""

Value = TypeVar("Value")


class CachedValue(Generic[Value]):
    """
    A stale-while-revalidate cache for one slow async value.

    At most one refresh runs at a time. A refresh that hangs is not cancelled, because a thread may
    block in it and each new one would take another. One that fails leaves the last value.
    """

    def __init__(
        self, refresh: Callable[[], Awaitable[Value]], *, initial: Value, max_age_s: float
    ) -> None:
        """Start with *initial*, which is stale; a refreshed value is fresh for *max_age_s*."""
        self._refresh = refresh
        self._value = initial
        self._max_age_s = max_age_s
        self._refreshed_s = float("-inf")
        self._has_value = False
        self._task: asyncio.Task[None] | None = None

    def refresh(self) -> None:
        """Begin to refresh a stale value."""
        if self._task is None and time.monotonic() - self._refreshed_s > self._max_age_s:
            self._task = asyncio.create_task(self._run())

    async def get(self) -> Value:
        """Return the value, a fresh one if it comes soon enough."""
        self.refresh()
        if self._task is not None:
            wait_s = WAIT_S if self._has_value else FIRST_WAIT_S
            await asyncio.wait({self._task}, timeout=wait_s)
        return self._value

    async def _run(self) -> None:
        try:
            self._value = await self._refresh()
            self._has_value = True
        except Exception:  # any error: the last value stays
            logger.exception("the cluster did not answer")
        finally:
            self._refreshed_s = time.monotonic()
            self._task = None


class ReadyCheck:
    """
    The state of the cluster, queried at most once per `REFRESH_S`, however often it is read.

    A probe may take as long as both deadlines; the other two do not wait for it.

    Attributes:
        running: number of running replicas, by role and domain.
        facts: settings of one engine of each role and domain.
    """

    def __init__(
        self,
        config: EndpointConfig,
        backend: Backend,
        admission: AdmissionController,
        metrics: Metrics,
    ) -> None:
        """Start without a query; *admission* and *metrics* receive the number of replicas."""

        async def query() -> Running:
            running = await backend.running()
            admission.inflight.set_replicas(running)
            metrics.replicas(running)
            return running

        self._config = config
        self._backend = backend
        self.running: CachedValue[Running] = CachedValue(query, initial={}, max_age_s=REFRESH_S)
        self.facts: CachedValue[Facts] = CachedValue(
            backend.facts, initial={}, max_age_s=FACTS_REFRESH_S
        )
        self._probing = asyncio.Lock()
        self._known = dict.fromkeys(config.pairing, (float("-inf"), ""))
        threshold = config.routing.local_threshold_tokens
        # Beyond what decode computes itself, if there is room.
        self._prompt = [PROBE_TOKEN] * min(threshold + 1, config.max_model_len - 1)
        self._splits = config.split and len(self._prompt) > threshold

    def answered(self, domain: str, phases: RequestPhases, first_s: float) -> None:
        """Record a client's answer: its path, and its first token's time by `perf_counter`."""
        if self._proves_ready(phases):
            self._record(domain, first_s, "")

    async def check(self) -> tuple[bool, list[str]]:
        """Return whether requests get through in any domain, and what is lacking in the others."""
        running = await self.running.get()
        if not running:
            return False, ["Ray Serve does not say what runs"]
        roles = sorted({pool.role for pool in self._config.pools})
        missing = [
            f"no {role} replica is up"
            for role in roles
            if not any(number for (of, _), number in running.items() if of == role)
        ]
        if missing:
            return False, missing
        async with self._probing:
            now_s = time.perf_counter()
            # A client that has just been answered proves as much, for its domain.
            due = [at for at, (when_s, _) in self._known.items() if now_s - when_s > REFRESH_S]
            await asyncio.gather(*(self._probe(domain) for domain in due))
        errors = [error for _, error in self._known.values()]
        return not all(errors), [error for error in errors if error]

    async def _probe(self, domain: str) -> None:
        error = await self._probe_error(domain)
        if error and len(self._known) > 1:
            error = f"{domain}: {error}"
        self._record(domain, time.perf_counter(), error)

    async def _probe_error(self, domain: str) -> str:
        config = self._config
        limit_s = config.prefill_deadline_s + config.kv_wait_deadline_s
        body = {
            "model": config.model_id,
            "prompt": self._prompt,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": uuid.uuid4().hex,  # no prefix-cache hit: computed and transferred anew
        }
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._backend.answer(domain, "completions", body)
        except TimeoutError:
            return f"a probe got no token within {limit_s:g} s"
        except RequestRefused as refused:
            answer = refused.refusal
        except Exception:  # noqa: BLE001  (a client would meet any of them, too)
            return "a probe failed"
        if isinstance(answer, Refusal):
            return f"a probe was refused: {answer.message}"
        phases = answer.chunk.phases
        if not self._proves_ready(phases):
            return f"a probe was answered without prefill: {phases.path_and_reason}"
        return ""

    def _proves_ready(self, phases: RequestPhases) -> bool:
        proves = phases.path in THROUGH_PREFILL and phases.reason != DECODE_FAILED
        return proves or not self._splits

    def _record(self, domain: str, when_s: float, error: str) -> None:
        self._known[domain] = max(self._known[domain], (when_s, error))
