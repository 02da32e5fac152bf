"""Admission control: admits requests that will keep their SLO, counts them while in flight."""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.routing import chooser
from serving.admission.policy import (
    AdmissionForecast,
    InflightLoad,
    Margin,
    PoolInFlight,
    RequestCost,
    Shed,
    decide,
    request_cost,
    work_s,
)
from serving.request.length import TokenCounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.endpoint_config import EndpointConfig

ADMISSION = "MINICLUSTER_ADMISSION"
"""Environment variable: `off` admits everything, to measure the pools' capacity."""

FORMER_NAME = "MINICLUSTER_GUARD"
"""The former name of the same variable; still read."""

WINDOW = 400
"""Requests whose residuals make the margin: four of them lie above its p99."""

MIN_SAMPLES = 20
"""Requests before residuals count; until then the step model's own error is the margin."""

TOO_MANY_ONGOING = Shed(
    reason="key",
    message="This key has as many requests under way as it may; wait for one to end.",
    retry_after_s=1,
)


def read_admission(environment: Mapping[str, str]) -> bool:
    """Return whether requests may be shed; raises InputError for anything but `on` and `off`."""
    name = FORMER_NAME if ADMISSION not in environment and FORMER_NAME in environment else ADMISSION
    value = environment.get(name, "on")
    if value not in {"on", "off"}:
        raise InputError(name, value, "on or off")
    return value == "on"


class ResidualWindow:
    """The residuals (measured minus forecast) of the last requests."""

    def __init__(self) -> None:
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        self._ranked: list[float] = []

    def add(self, residual_s: float) -> None:
        """Add a residual, in place of the oldest one if the window is full."""
        if len(self._residuals) == WINDOW:
            self._ranked.remove(self._residuals[0])
        self._residuals.append(residual_s)
        insort(self._ranked, residual_s)

    def quantile_s(self, fraction: float, prior_s: float = 0.0) -> float:
        """Return a quantile, at least 0; *prior_s* while there are too few residuals."""
        if len(self._ranked) < MIN_SAMPLES:
            return prior_s
        return max(0.0, self._ranked[int(fraction * len(self._ranked))])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """
    The holder of an API key.

    Attributes:
        max_ongoing: most requests in flight at once; `None`: no limit of its own.
    """

    name: str = ""
    max_ongoing: int | None = None


ANONYMOUS = KeyHolder()
"""The client of every request to an endpoint without keys."""


@dataclass(slots=True, kw_only=True, eq=False)
class InflightRequest:
    """
    One admitted request, until it ends.

    Attributes:
        domain: the domain that answers.
        prefill: the replicas that compute its prompts.
        work_s: of these, until its first token.
        forecast: without margin; `None`: there is no plan, or admission is off.
        waiting: whether its first token is still to come.
    """

    cost: RequestCost
    domain: str
    prefill: PoolInFlight
    work_s: float
    forecast: AdmissionForecast | None = None
    client: KeyHolder = ANONYMOUS
    waiting: bool = True

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

    They are exact while one endpoint admits all requests: `serving.replicas.app` starts one.
    """

    def __init__(self, config: EndpointConfig) -> None:
        """Start with no requests and the planned replicas."""
        first, last = config.prefilling, config.answering
        self.domains = tuple(last.replicas)
        self._size = last
        predicted = config.prediction
        used = {} if predicted is None else predicted.utilisation_fraction
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
        )

    def backlog_s(self) -> dict[str, float]:
        """Return the seconds of prefill still needed, by the domain that computes it."""
        found: defaultdict[str, float] = defaultdict(float)
        for (_, domain), pool in self._pools.items():
            found[domain] += pool.work_s
        return found

    def per_replica(self) -> list[float]:
        """Return the sequences per answering replica, in the order of `domains`."""
        return [pool.sequences / pool.replicas for pool in self._decode.values()]

    def set_replicas(self, live: Mapping[tuple[str, str], int]) -> None:
        """Take the live replicas by (role, domain), at least one; other pools keep their number."""
        for key in self._pools.keys() & live.keys():
            self._pools[key].replicas = max(1, live[key])

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return sum(pool.waiting for pool in self._pools.values())

    @property
    def sequences(self) -> int:
        """Sequences admitted and not finished."""
        return sum(pool.sequences for pool in self._decode.values())

    def start(
        self,
        cost: RequestCost,
        domain: str,
        work_s: float,
        forecast: AdmissionForecast | None = None,
    ) -> InflightRequest:
        """Count a request that was admitted into *domain*."""
        decode = self._decode[domain]
        prefill = decode if cost.local else self._prefill[domain]
        request = InflightRequest(
            cost=cost, domain=domain, prefill=prefill, work_s=work_s, forecast=forecast
        )
        prefill.work_s += work_s
        prefill.waiting += 1
        decode.sequences += cost.sequences
        decode.context_tokens += request.context_tokens
        decode.per_token_s += request.per_token_s
        return request

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
        decode = self._decode[request.domain]
        decode.sequences -= request.cost.sequences
        busy = decode.sequences > 0
        decode.context_tokens = decode.context_tokens - request.context_tokens if busy else 0.0
        decode.per_token_s = decode.per_token_s - request.per_token_s if busy else 0.0


class AdmissionController:
    """Admission for one endpoint: `serving.admission.policy` on the requests in flight."""

    def __init__(
        self, config: EndpointConfig, seed: int | None = None, *, sheds: bool = True
    ) -> None:
        """Start idle; *seed* is for the choice among domains; *sheds*: whether the SLO is kept."""
        self.sheds = sheds
        self.inflight = InflightRequests(config)
        self._config = config
        self._rng = random.Random(seed)  # noqa: S311  (load balancing, not a secret)
        self._choose = chooser("power-of-two")
        self._ongoing: Counter[str] = Counter()
        self._token_counts = {kind: TokenCounts() for kind in ("chat", "completions")}
        self._ttft, self._tpot = ResidualWindow(), ResidualWindow()
        self._turn = 0

    @property
    def margin(self) -> Margin:
        """The margin that is added to forecasts now."""
        step, slo = self._config.step_model, self._config.slo
        if slo is None or step is None:
            return Margin()
        pace_s = slo.per_token_s or 0.0
        return Margin(
            ttft_s=self._ttft.quantile_s(slo.level, step.prefill.error_fraction * slo.ttft_s),
            tpot_s=self._tpot.quantile_s(slo.level, step.decode.error_fraction * pace_s),
            median_ttft_s=self._ttft.quantile_s(0.5),
            median_tpot_s=self._tpot.quantile_s(0.5),
        )

    def cost(self, kind: str, body: Mapping[str, Any]) -> RequestCost:
        """Return the cost of a request of *kind*; of text as the answers so far suggest."""
        return request_cost(kind, body, self._config, self._token_counts[kind].estimate)

    def ongoing(self, client: KeyHolder) -> int:
        """Return the number of requests of *client* that are in flight."""
        return self._ongoing[client.name]

    def admit(self, cost: RequestCost, client: KeyHolder = ANONYMOUS) -> InflightRequest | Shed:
        """
        Admit a request into a domain, or shed it: for its client's limit, or for the SLO.

        Without a plan, or with admission off, only the limits of clients count.
        """
        if client.max_ongoing is not None and self._ongoing[client.name] >= client.max_ongoing:
            return TOO_MANY_ONGOING
        found = self._placed(cost)
        if isinstance(found, Shed):
            if found.retry_after_s is None and cost.text_bytes:
                self._token_counts[cost.kind].discount()
        else:
            found.client = client
            self._ongoing[client.name] += 1
        return found

    def _placed(self, cost: RequestCost) -> InflightRequest | Shed:
        inflight, step, slo = self.inflight, self._config.step_model, self._config.slo
        domain = inflight.domains[self._choose(inflight.per_replica(), self._rng, self._turn)]
        self._turn += 1
        if slo is None or step is None:
            return inflight.start(cost, domain, 1.0)
        load = inflight.load(domain)
        found = decide(step, slo, cost, load, self.margin) if self.sheds else None
        if isinstance(found, Shed):
            return found
        return inflight.start(cost, domain, work_s(step, cost, load), found)

    def first_token(self, request: InflightRequest, ttft_s: float) -> None:
        """Record a first token, *ttft_s* after the request arrived."""
        self.inflight.first_token(request)
        if request.forecast is not None:
            self._ttft.add(ttft_s - request.forecast.ttft_s)

    def end(
        self, request: InflightRequest, tpot_s: float | None, prompt_tokens: int | None = None
    ) -> None:
        """Record the end of a request; its time per output token and its prompt, if known."""
        self.inflight.end(request)
        self._ongoing[request.client.name] -= 1
        if request.forecast is not None and tpot_s is not None:
            self._tpot.add(tpot_s - request.forecast.tpot_s)
        if prompt_tokens is not None and request.cost.text_bytes:
            self._token_counts[request.cost.kind].add(request.cost.text_bytes, prompt_tokens)
