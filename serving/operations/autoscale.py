"""Scaling with the rate: the advice, what it is measured by, and the loop that follows it."""

from __future__ import annotations

import math
import os
import urllib.request
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from minicluster.errors import TargetFailed
from minicluster.phases import PREFILL_QUEUE
from minicluster.plan.scaling import wanted_replicas
from minicluster.specs.scaling import MARGIN
from serving.api.access import authorization
from serving.api.tls import trusting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from minicluster.plan import Pool
    from minicluster.plan.scaling import ScaledPool
    from minicluster.specs.slo import SloSpec


MIN_REQUESTS = 100
"""Fewest requests from which SLO attainment at p99 can be judged."""

LONG_QUEUE = 0.25
"""Prefill queue, as a share of the TTFT limit, from which on prefill counts as overloaded."""

SHORT_QUEUE = 0.05
"""Prefill queue, as a share of the TTFT limit, up to which the pool can give a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMetrics:
    """
    The endpoint's metrics over a time window.

    Attributes:
        requests: number of answered requests.
        ttft_fraction, tpot_fraction: share of them within the SLO's limit; 1 without one.
        prefill_queue_s: mean wait of a prompt before its prefill.
        tpot_s: mean time per output token.
    """

    requests: int
    ttft_fraction: float
    tpot_fraction: float
    prefill_queue_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    The recommended replicas of each pool, and the reason.

    Attributes:
        conclusive: there were enough requests for a judgement.
    """

    replicas: dict[str, int]
    reason: str
    conclusive: bool = True


def advise(seen: WindowMetrics, pools: Mapping[str, Pool], slo: SloSpec) -> Advice:
    """
    Move a replica to the pool whose SLO is missed, if the other pool can give it.

    The devices stay those of the plan: one pool gives what the other gets, and none goes below one
    replica. A pool gives only while its own SLO holds with room: prefill while its queue is short,
    decode while its mean TPOT, scaled by the replicas it loses, stays within the limit.
    """
    now = {role: pool.replicas for role, pool in pools.items()}
    if seen.requests < MIN_REQUESTS:
        reason = f"{seen.requests} requests measured; {MIN_REQUESTS} are needed"
        return Advice(replicas=now, reason=reason, conclusive=False)
    late, slow = seen.ttft_fraction < slo.level, seen.tpot_fraction < slo.level
    attainment = (
        f"TTFT met by {seen.ttft_fraction:.1%}, TPOT by {seen.tpot_fraction:.1%} of requests"
    )
    if not late and not slow:
        return Advice(replicas=now, reason=f"{attainment}: the SLO holds")
    if late and slow:
        return Advice(replicas=now, reason=f"{attainment}: both pools are short; plan again")
    moved, reason = _move(seen, pools, slo, to="prefill" if late else "decode")
    return Advice(replicas=moved or now, reason=attainment + reason)


def _move(
    seen: WindowMetrics, pools: Mapping[str, Pool], slo: SloSpec, *, to: str
) -> tuple[dict[str, int] | None, str]:
    queue = seen.prefill_queue_s / slo.ttft_s
    if to == "prefill" and queue < LONG_QUEUE:
        return None, f", but prefill's queue takes only {queue:.0%} of the TTFT limit"
    source = "decode" if to == "prefill" else "prefill"
    moved = moved_replicas(pools, to=to, source=source)
    if moved is None:
        return None, f": {to} is short and {source} has no replica to give; plan again"
    if source == "prefill" and queue > SHORT_QUEUE:
        return None, ": decode is short and prefill queues too; plan again"
    limit_s = slo.per_token_s or math.inf
    if source == "decode" and seen.tpot_s * pools[source].replicas / moved[source] > limit_s:
        return None, ": prefill is short and decode has no TPOT to spare; plan again"
    return moved, f": {to} is short, {source} can spare"


def moved_replicas(pools: Mapping[str, Pool], *, to: str, source: str) -> dict[str, int] | None:
    """Return the replicas after *to* gets one more from *source*; `None`: *source* has too few."""
    freed = math.ceil(pools[to].slicing.gpus / pools[source].slicing.gpus)
    remaining = pools[source].replicas - freed
    return {to: pools[to].replicas + 1, source: remaining} if remaining >= 1 else None


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
    histograms = {}
    for latency in LATENCIES:
        family = families.get(METRIC.format(latency))
        if family is None:
            raise TargetFailed(f"/metrics has no {METRIC.format(latency)}")
        for sample in family.samples:
            suffix, bound = sample.name.removeprefix(family.name), float(sample.labels.get("le", 0))
            histograms[latency, suffix, bound] = sample.value
    shed = families[SHED].samples if SHED in families else ()
    refused = sum(sample.value for sample in shed if sample.name == f"{SHED}_total")
    histograms[OFFERED] = histograms["ttft", "_count", 0.0] + refused
    return histograms


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """The rate of an interval, and the replicas by role after the decision on it."""

    requests_per_s: float
    replicas: dict[str, int]


def follow(
    pools: Sequence[ScaledPool],
    replicas: Mapping[str, int],
    rate: Callable[[], float],
    change: Callable[[dict[str, int]], None],
    *,
    held: int,
    margin: float = MARGIN,
) -> Iterator[ScaleDecision]:
    """
    Decide and change without end, from the replicas that the first intervals allow.

    Until a whole hold time has been measured the planned rate stands for what is not known, so
    that nothing is taken away too early.

    Args:
        pools: pools of the plan.
        replicas: running replicas by role.
        rate: waits for the end of an interval and returns its requests/s.
        change: gives the pools so many replicas.
        held: intervals that decide together, see `held_intervals`.
        margin: as of the policy.
    """
    now = dict(replicas)
    rates = deque([pools[0].planned_requests_per_s] * held, maxlen=held)
    while True:
        rates.append(rate())
        wanted = wanted_replicas(pools, rates, margin=margin)
        if wanted != now:
            change(wanted)
            now = wanted
        yield ScaleDecision(requests_per_s=rates[-1], replicas=now)
