"""Admission control: tenants, the decision on a request, and the counts of those in flight."""

from __future__ import annotations

import math
import random
import time
from bisect import insort
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.routing import ANSWER_POLICY, find_policy
from serving.protocol.messages import RETRY_SPREAD, Refusal
from serving.request.cost import (
    AdmissionForecast,
    InflightLoad,
    PoolInFlight,
    RequestCost,
    RequestSize,
    TokenCounts,
    forecast,
    request_cost,
    work_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minicluster.plan import StepModel
    from minicluster.specs.slo import SloSpec
    from serving.protocol.messages import EndpointConfig


LARGEST_MARGIN = 0.9
"""
Largest margin, as a fraction of (SLO limit - latency on an idle cluster). Below 1, so that a few
requests are always admitted and the margin can recover.
"""

LARGEST_TAIL = 0.6
"""
Largest part of the margin beyond the median, as a fraction of the same difference. Stalls of a
machine come at any load: a margin with room for all of them sheds most of a load that the cluster
could serve, and the stalls stay (2026-11-22, two cores, p99 of 50 ms per token in answers of ten
tokens: 272 of 443 requests).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """
    The residuals of earlier forecasts (measured minus forecast), added to the next one.

    Attributes:
        ttft_s, tpot_s: at the SLO's percentile.
        median_ttft_s, median_tpot_s: at the median: the error of the step model.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    median_ttft_s: float = 0.0
    median_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """
    The decision not to admit a request.

    Attributes:
        reason: `ttft` or `tpot`; `unreachable`: not even on an idle cluster; `key`: beyond a limit
            of the client's key.
        retry_after_s: time until there may be room; `None`: never.
    """

    reason: str
    message: str
    retry_after_s: float | None

    @property
    def refusal(self) -> Refusal:
        """The answer that the client gets, its time in whole seconds, as HTTP takes them."""
        code = "rate_limit_exceeded" if self.reason == "key" else f"slo_{self.reason}"
        if self.retry_after_s is None:
            return Refusal(status=429, message=self.message, code=code)
        seconds = max(1, math.ceil(self.retry_after_s))
        message = f"{self.message} Try again in {seconds} s."
        return Refusal(status=429, message=message, code=code, retry_after_s=seconds)


def decide(
    model: StepModel, slo: SloSpec, cost: RequestCost, load: InflightLoad, margin: Margin
) -> Shed | AdmissionForecast:
    """
    Admit a request, with its forecast without margin, or return why it would miss its SLO.

    Monotone: more work ahead, a longer prompt or a larger margin never admit what less would not;
    faster steps or more replicas never shed what slower or fewer would admit. On an idle cluster
    the step model alone decides, so that a margin learned under overload cannot shed every request
    for ever (docs/model.md, eq. G5). A limit on gaps between tokens counts as one on their mean.
    """
    floor = forecast(model, cost, load.emptied())
    pace_s = min(slo.tpot_s or math.inf, slo.itl_s or math.inf)
    if floor.ttft_s > slo.ttft_s or floor.tpot_s > pace_s:
        return _unreachable(cost, floor, slo, pace_s)
    expected = forecast(model, cost, load)
    if load.idle:
        return expected
    more_s = _margin_s(margin.ttft_s, margin.median_ttft_s, slo.ttft_s - floor.ttft_s)
    late_s = expected.ttft_s + more_s - slo.ttft_s
    if late_s > 0:
        return _shed("ttft", "the queue is too long for the promised time to first token", late_s)
    more_s = _margin_s(margin.tpot_s, margin.median_tpot_s, pace_s - floor.tpot_s)
    if expected.tpot_s + more_s > pace_s:
        wait_s = cost.output_tokens * expected.tpot_s
        return _shed("tpot", "the batch is too large for the promised pace of tokens", wait_s)
    return expected


def _margin_s(percentile_s: float, median_s: float, room_s: float) -> float:
    """Return the margin, bounded by parts of *room_s*: limit less latency when idle."""
    median_s = min(median_s, percentile_s)
    tail_s = min(percentile_s - median_s, LARGEST_TAIL * room_s)
    return min(median_s + tail_s, LARGEST_MARGIN * room_s)


def _shed(reason: str, why: str, wait_s: float) -> Shed:
    return Shed(reason=reason, message=f"Not admitted: {why}.", retry_after_s=min(wait_s, 60))


def _unreachable(cost: RequestCost, floor: AdmissionForecast, slo: SloSpec, pace_s: float) -> Shed:
    if floor.ttft_s > slo.ttft_s:
        what = (
            f"a prompt of about {cost.prompt_tokens:.0f} tokens takes {floor.ttft_s:.2f} s to the "
            f"first token, and {slo.ttft_s:g} s are promised"
        )
    else:
        what = f"tokens come every {floor.tpot_s:.3f} s at best, and {pace_s:g} s are promised"
    return Shed(
        reason="unreachable",
        message=f"Not admitted, and never will be by this endpoint: {what}.",
        retry_after_s=None,
    )


TIMING, INTERNAL = "timing", "internal"

RIGHTS = frozenset({TIMING, INTERNAL})
"""The rights that a key may have: `Server-Timing` in its answers, and `/internal/` routes."""

DOUBT_S = 60.0
"""
Shortest time between two discounts of what a tenant's texts have taught: a text that is refused for
its estimated length is never counted, and one that is let in by mistake delays everybody.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """
    The holder of an API key; keys of one name are one tenant. A limit of `None` is none.

    Attributes:
        requests_per_s, tokens_per_min: mean rates, of prompt and answer tokens together; a second's
            and a minute's worth may come at once.
        max_concurrency: most requests in flight at once.
        rights: some of `RIGHTS`.
        share_cache: whether it uses the prefix cache that all such keys share.
    """

    name: str = ""
    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_concurrency: int | None = None
    rights: frozenset[str] = RIGHTS
    share_cache: bool = False


ANONYMOUS = KeyHolder(share_cache=True)
"""The client of every request to an endpoint without keys."""


@dataclass(slots=True)
class TokenBucket:
    """A token bucket; it begins full."""

    level: float = math.inf
    at_s: float = 0.0

    def wait_s(self, cost: float, *, per_s: float, capacity: float, now_s: float) -> float:
        """Return the seconds until there is *cost*, or until the bucket is full if that is less."""
        self.level = min(capacity, self.level + per_s * (now_s - self.at_s))
        self.at_s = now_s
        return max(0.0, (min(cost, capacity) - self.level) / per_s)


@dataclass(slots=True, kw_only=True, eq=False)
class Tenant:
    """
    What the keys of one name have in flight, have used and have taught; it outlives the key file.

    Attributes:
        number: position among the tenants.
        ongoing: its requests in flight.
        discounted_s: time of the last discount of its token counts.
    """

    number: int
    ongoing: int = 0
    discounted_s: float = -math.inf
    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    token_counts: dict[str, TokenCounts] = field(
        default_factory=lambda: {kind: TokenCounts() for kind in ("chat", "completions")}
    )

    def limit_wait_s(self, holder: KeyHolder, tokens: float, now_s: float) -> float:
        """Return the seconds until the rates of *holder* allow a request of *tokens*."""
        wait_s = 0.0
        if rate := holder.requests_per_s:
            wait_s = self.requests.wait_s(1, per_s=rate, capacity=max(1.0, rate), now_s=now_s)
        if rate := holder.tokens_per_min:
            token_wait_s = self.tokens.wait_s(tokens, per_s=rate / 60, capacity=rate, now_s=now_s)
            wait_s = max(wait_s, token_wait_s)
        return wait_s

    def charge(self, tokens: float) -> None:
        """Count an admitted request against the rates."""
        self.requests.level -= 1
        self.tokens.level -= tokens

    def discount(self, kind: str, now_s: float) -> None:
        """Doubt what was learned of *kind*, if `DOUBT_S` have passed."""
        if now_s - self.discounted_s >= DOUBT_S:
            self.discounted_s = now_s
            self.token_counts[kind].discount()


ADMISSION = "MINICLUSTER_ADMISSION"
"""Environment variable: `off` admits everything, to measure the pools' capacity."""

WINDOW = 400
"""Requests whose residuals make the margin: four of them lie above its p99."""

MIN_SAMPLES = 20
"""Requests before residuals count; until then the step model's own error is the margin."""

PARTS = 5
"""Parts of the window: a key is in one, and the margin is the median of theirs."""

BUSY_RETRY_S = 1.0
"""Retry-After of a key with as many requests in flight as it may have: when one ends is unknown."""


def read_admission(environment: Mapping[str, str]) -> bool:
    """Return whether requests may be shed; raises InputError for anything but `on` and `off`."""
    value = environment.get(ADMISSION, "on")
    if value not in {"on", "off"}:
        raise InputError(ADMISSION, value, "on or off")
    return value == "on"


KEY_IS_FULL = Shed(
    reason="key",
    message="This key has as many requests in flight as it may.",
    retry_after_s=BUSY_RETRY_S,
)


def key_is_full(client: KeyHolder, requests: int) -> bool:
    """Return whether a key with so many *requests* may have no further one."""
    return client.max_concurrency is not None and requests >= client.max_concurrency


class ResidualWindow:
    """
    The residuals (measured minus forecast) of the last requests, in parts by tenant.

    A quantile is the median of the parts' quantiles, weighted by their requests: tenants with less
    than half of the requests cannot move it beyond what the others see. For a tenant's own requests
    it is at least that of its part, if this has a tenth of the window.
    """

    def __init__(self) -> None:
        self._residuals: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._ranked: list[list[float]] = [[] for _ in range(PARTS)]

    def add(self, residual_s: float, tenant: int = 0) -> None:
        """Add a residual of the tenant of this number; a full window loses its oldest."""
        if len(self._residuals) == WINDOW:
            part, oldest_s = self._residuals[0]
            self._ranked[part].remove(oldest_s)
        self._residuals.append((tenant % PARTS, residual_s))
        insort(self._ranked[tenant % PARTS], residual_s)

    def quantile_s(self, fraction: float, prior_s: float, tenant: int | None = None) -> float:
        """
        Return the quantile of *fraction*, at least 0; *prior_s* with too few residuals.

        It is for a *tenant*'s requests, or for those of all.
        """
        if len(self._residuals) < MIN_SAMPLES:
            return prior_s
        parts = [(part[int(fraction * len(part))], len(part)) for part in self._ranked if part]
        counted, found_s = 0, 0.0
        for quantile_s, requests in sorted(parts):
            counted += requests
            if 2 * counted >= len(self._residuals):
                found_s = max(found_s, quantile_s)
                break
        tenants = () if tenant is None else self._ranked[tenant % PARTS]
        if len(tenants) * 10 >= WINDOW:
            found_s = max(found_s, tenants[int(fraction * len(tenants))])
        return found_s


@dataclass(slots=True, kw_only=True, eq=False)
class InflightRequest:
    """
    One admitted request, until it ends.

    Attributes:
        work_s: seconds that its prompts take from the replicas, until its first token.
        forecast: latencies without margin; `None`: there is no plan, or admission is off.
        domain: the domain that answers.
        prefill, decode: the replicas that compute its prompts, and those that answer.
        waiting: whether its first token is still to come.
    """

    cost: RequestCost
    work_s: float
    forecast: AdmissionForecast | None = None
    client: KeyHolder = ANONYMOUS
    domain: str = field(init=False)
    prefill: PoolInFlight = field(init=False)
    decode: PoolInFlight = field(init=False)
    waiting: bool = field(init=False)

    @property
    def per_token_s(self) -> float:
        """
        Seconds that its prompts add between tokens of the replicas that answer.

        Small: as many requests join in a step as there are, over the steps that each one takes.
        """
        return self.work_s / (self.cost.output_tokens + 1) if self.cost.local else 0.0

    @property
    def context_tokens(self) -> float:
        """Tokens that it will have cached at its end."""
        return self.cost.sequences * (self.cost.prompt_tokens + self.cost.output_tokens)


class InflightRequests:
    """
    The counts of admitted requests by domain and pool.

    They are exact because one process admits all requests: the gate.
    """

    def __init__(self, config: EndpointConfig) -> None:
        """Start with no requests and the planned replicas."""
        first, last = config.prefilling, config.answering
        self._size = last
        predicted = config.prediction
        used = {} if predicted is None else predicted.utilisation_fraction
        self._tokens_per_step = config.tokens_per_step
        self._prefill_busy_fraction = min(1.0, used.get("prefill", 1.0))
        self._pools = {
            (pool.role, domain): PoolInFlight(replicas)
            for pool in (first, last)
            for domain, replicas in pool.replicas.items()
        }
        self._decode = {domain: self._pools[last.role, domain] for domain in last.replicas}
        self._prefill = {
            domain: self._pools[first.role, config.prefill_domain(domain)]
            for domain in self._decode
        }

    def load(self, domain: str) -> InflightLoad:
        """Return the load that a request answered in *domain* would meet."""
        return InflightLoad(
            prefill=replace(self._prefill[domain]),
            decode=replace(self._decode[domain]),
            max_batch_size=self._size.max_num_seqs,
            max_step_tokens=self._size.max_num_batched_tokens,
            prefill_busy_fraction=self._prefill_busy_fraction,
            tokens_per_step=self._tokens_per_step,
        )

    def backlog_s(self) -> dict[str, float]:
        """Return the seconds of prefill still needed, by the domain that computes it."""
        backlog_s: defaultdict[str, float] = defaultdict(float)
        for (_, domain), pool in self._pools.items():
            backlog_s[domain] += pool.work_s
        return backlog_s

    def candidates(self, but: str = "") -> dict[str, float]:
        """
        Return the domains that a request may go to, with their sequences per answering replica.

        A domain without a live replica is none of them while there is another, and neither is
        *but*: an idle one that is dead would attract every request.
        """
        live = {domain: pool for domain, pool in self._decode.items() if pool.live}
        others = {domain: pool for domain, pool in live.items() if domain != but}
        pools = others or live or self._decode
        return {domain: pool.sequences / pool.replicas for domain, pool in pools.items()}

    def set_replicas(self, live: Mapping[tuple[str, str], int]) -> None:
        """Take the live replicas by (role, domain), at least one; other pools keep their number."""
        for key, pool in self._pools.items():
            pool.live = live.get(key, 1) > 0
            pool.replicas = max(1, live.get(key, pool.replicas))

    @property
    def outstanding(self) -> dict[str, int]:
        """Requests without a first token (`prefill`), and sequences that are not finished."""
        return {
            "prefill": sum(pool.waiting for pool in self._pools.values()),
            "all": sum(pool.sequences for pool in self._decode.values()),
        }

    def start(
        self,
        cost: RequestCost,
        domain: str,
        work_s: float,
        forecast: AdmissionForecast | None = None,
    ) -> InflightRequest:
        """Count a request that was admitted into *domain*."""
        request = InflightRequest(cost=cost, work_s=work_s, forecast=forecast)
        self.place(request, domain)
        return request

    def place(self, request: InflightRequest, domain: str) -> None:
        """Count a request that has no token yet in *domain*."""
        request.domain, request.waiting = domain, True
        request.decode = decode = self._decode[domain]
        request.prefill = prefill = decode if request.cost.local else self._prefill[domain]
        prefill.work_s += request.work_s
        prefill.waiting += 1
        decode.sequences += request.cost.sequences
        decode.context_tokens += request.context_tokens
        decode.per_token_s += request.per_token_s

    def first_token(self, request: InflightRequest) -> None:
        """Remove a request from the prefill backlog; later calls change nothing."""
        if not request.waiting:
            return
        request.waiting = False
        prefill = request.prefill
        prefill.waiting -= 1
        # Rounding errors of the sum would keep an idle pool from ever being idle: 0 is exact.
        prefill.work_s = prefill.work_s - request.work_s if prefill.waiting else 0.0

    def end(self, request: InflightRequest) -> None:
        """Remove a request, however it ended."""
        self.first_token(request)
        decode = request.decode
        decode.sequences -= request.cost.sequences
        busy = decode.sequences > 0
        decode.context_tokens = decode.context_tokens - request.context_tokens if busy else 0.0
        decode.per_token_s = decode.per_token_s - request.per_token_s if busy else 0.0


class AdmissionController:
    """
    Admission of a gate: `serving.request.cost` on the requests in flight.

    Attributes:
        inflight: the requests in flight.
        tenants: what its keys have in flight, have used and have taught.
    """

    def __init__(
        self,
        config: EndpointConfig,
        seed: int | None = None,
        *,
        sheds: bool = True,
        former: AdmissionController | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Start idle; *seed* is for the choice among domains, *clock* for rates.

        The SLO is kept if it *sheds*. Tenants of a *former* controller, of the plan before, stay.
        """
        self.sheds = sheds
        self.inflight = InflightRequests(config)
        self._config = config
        self._clock = clock
        self._rng = random.Random(seed)  # noqa: S311  (load balancing, not a secret)
        self._choose = find_policy(ANSWER_POLICY).choose
        self.tenants: dict[str, Tenant] = {} if former is None else former.tenants
        self._ttft, self._tpot = ResidualWindow(), ResidualWindow()
        self._turn = 0

    @property
    def margin(self) -> Margin:
        """The margin that is added to forecasts of all tenants now."""
        return self._margin(None)

    def _margin(self, tenant: int | None) -> Margin:
        step, slo = self._config.step_model, self._config.slo
        if slo is None or step is None:
            return Margin()
        pace_s = slo.per_token_s or 0.0
        return Margin(
            ttft_s=self._ttft.quantile_s(
                slo.level, step.prefill.error_fraction * slo.ttft_s, tenant
            ),
            tpot_s=self._tpot.quantile_s(slo.level, step.decode.error_fraction * pace_s, tenant),
            median_ttft_s=self._ttft.quantile_s(0.5, 0.0, tenant),
            median_tpot_s=self._tpot.quantile_s(0.5, 0.0, tenant),
        )

    def cost(self, size: RequestSize, client: KeyHolder = ANONYMOUS) -> RequestCost:
        """Return the cost of a request; of text as answers to *client* suggest."""
        estimate = self._tenant(client).token_counts[size.kind].estimate
        return request_cost(size, self._config, estimate)

    def admit(self, cost: RequestCost, client: KeyHolder = ANONYMOUS) -> InflightRequest | Shed:
        """
        Admit a request into a domain, or shed it: for a limit of its key, or for the SLO.

        Without a plan, or with admission off, only the limits of keys count.
        """
        now_s, tenant = self._clock(), self._tenant(client)
        if key_is_full(client, tenant.ongoing):
            return KEY_IS_FULL
        wait_s = tenant.limit_wait_s(client, cost.all_tokens, now_s)
        if wait_s > 0:
            why = "This key has used up its requests per second or its tokens per minute."
            # However Retry-After is spread, there is room then.
            return Shed(reason="key", message=why, retry_after_s=wait_s / (1 - RETRY_SPREAD))
        placed = self._placed(cost, tenant)
        if isinstance(placed, Shed):
            if placed.retry_after_s is None and cost.text_bytes:
                tenant.discount(cost.kind, now_s)
            return placed
        placed.client = client
        tenant.ongoing += 1
        tenant.charge(cost.all_tokens)
        return placed

    def resume(self, cost: RequestCost, client: KeyHolder, domain: str) -> InflightRequest:
        """Count a request that has been admitted into *domain* before, at another controller."""
        step = self._config.step_model
        own_s = 1.0 if step is None else work_s(step, cost, self.inflight.load(domain))
        request = self.inflight.start(cost, domain, own_s)
        request.client = client
        self._tenant(client).ongoing += 1
        return request

    def _tenant(self, client: KeyHolder) -> Tenant:
        tenant = self.tenants.get(client.name)
        if tenant is None:
            tenant = self.tenants[client.name] = Tenant(number=len(self.tenants))
        return tenant

    def _placed(self, cost: RequestCost, tenant: Tenant) -> InflightRequest | Shed:
        inflight, step, slo = self.inflight, self._config.step_model, self._config.slo
        domain = self._chosen_domain()
        if slo is None or step is None:
            return inflight.start(cost, domain, 1.0)
        load = inflight.load(domain)
        own_s = work_s(step, cost, load)
        if not self.sheds:
            return inflight.start(cost, domain, own_s)
        decision = decide(step, slo, cost, load, self._margin(tenant.number))
        if isinstance(decision, Shed):
            return decision
        return inflight.start(cost, domain, own_s, decision)

    def _chosen_domain(self, but: str = "") -> str:
        loads = self.inflight.candidates(but)
        chosen = self._choose(list(loads.values()), self._rng, self._turn)
        self._turn += 1
        return list(loads)[chosen]

    def move(self, request: InflightRequest) -> None:
        """Move a request whose domain could not answer it to another one that is live, if any."""
        self.inflight.end(request)
        self.inflight.place(request, self._chosen_domain(but=request.domain))

    def first_token(self, request: InflightRequest, ttft_s: float | None) -> None:
        """
        Record a first token, *ttft_s* after the request arrived.

        `None`: it came by another path than was forecast, which says nothing of the forecast.
        """
        self.inflight.first_token(request)
        if request.forecast is not None and ttft_s is not None:
            tenant = self._tenant(request.client)
            self._ttft.add(ttft_s - request.forecast.ttft_s, tenant.number)

    def end(
        self, request: InflightRequest, tpot_s: float | None, prompt_tokens: int | None = None
    ) -> None:
        """Record the end of a request; its time per output token and its prompt, if known."""
        self.inflight.end(request)
        tenant, cost = self._tenant(request.client), request.cost
        tenant.ongoing -= 1
        if request.forecast is not None and tpot_s is not None:
            self._tpot.add(tpot_s - request.forecast.tpot_s, tenant.number)
        if prompt_tokens is not None and cost.text_bytes:
            tenant.token_counts[cost.kind].add(cost.text_bytes, prompt_tokens)
