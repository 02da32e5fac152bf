"""Admission control: admits requests that will keep their SLO, counts them while in flight."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.routing import chooser
from serving.admission.policy import InflightLoad, Margin, Shed, decide, work_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.admission.policy import AdmissionForecast, RequestCost
    from serving.protocol.endpoint_config import EndpointConfig

ADMISSION = "MINICLUSTER_ADMISSION"
"""Environment variable: `off` admits everything, to measure the pools' capacity."""

FORMER_NAME = "MINICLUSTER_GUARD"
"""The former name of the same variable; still read."""

WINDOW = 400
"""Requests whose residuals make the margin: four of them lie above its p99."""

MIN_SAMPLES = 20
"""Requests before residuals count; until then the step model's own error is the margin."""


def read_admission(environment: Mapping[str, str]) -> bool:
    """Return whether requests may be shed; raises InputError for anything but `on` and `off`."""
    name = FORMER_NAME if ADMISSION not in environment and FORMER_NAME in environment else ADMISSION
    value = environment.get(name, "on")
    if value not in {"on", "off"}:
        raise InputError(name, value, "on or off")
    return value == "on"


class ResidualWindow:
    """The residuals (measured minus forecast) of the last requests."""

    def __init__(self, fraction: float) -> None:
        """Start empty; *fraction* is that of the SLO's percentile."""
        self._fraction = fraction
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        self._percentile = self._median = 0.0
        self._added = 0

    def add(self, residual_s: float) -> None:
        """Add a residual; sorts only every few of them, to keep requests cheap."""
        residuals = self._residuals
        residuals.append(residual_s)
        self._added += 1
        if len(residuals) <= MIN_SAMPLES or self._added % 8 == 0 or residual_s > self._percentile:
            ranked = sorted(residuals)
            self._percentile = ranked[min(len(ranked) - 1, int(self._fraction * len(ranked)))]
            self._median = ranked[len(ranked) // 2]

    def margin_s(self, prior_s: float) -> float:
        """Return the residual at the percentile; *prior_s* while there are too few."""
        return max(0.0, self._percentile) if len(self._residuals) >= MIN_SAMPLES else prior_s

    @property
    def median_s(self) -> float:
        """The median residual, at least 0; 0 while there are too few."""
        return max(0.0, self._median) if len(self._residuals) >= MIN_SAMPLES else 0.0


class InflightRequest:
    """
    One admitted request, until it ends.

    Attributes:
        cost: what it was admitted for.
        domain: the domain that answers.
        prefill: role and domain of the replicas that compute its prompts.
        work_s: of these, until its first token.
        per_token_s: seconds between tokens of the replicas that answer; 0 for prompts computed
            elsewhere.
        waiting: whether its first token is still to come.
        forecast: what was forecast; `None`: there is no plan, or admission is off.
    """

    __slots__ = ("cost", "domain", "forecast", "per_token_s", "prefill", "waiting", "work_s")

    def __init__(
        self,
        cost: RequestCost,
        domain: str,
        prefill: tuple[str, str],
        work_s: float,
        forecast: AdmissionForecast | None = None,
    ) -> None:
        """Start before the first token."""
        self.cost = cost
        self.domain = domain
        self.prefill = prefill
        self.work_s = work_s
        # Small: as many join in a step as there are, over the steps that each request takes.
        self.per_token_s = work_s / (cost.output_tokens + 1) if cost.local else 0.0
        self.waiting = True
        self.forecast = forecast

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
        self._pool = last
        self._prefill_domain = {domain: config.prefill_domain(domain) for domain in self.domains}
        self._replicas = {
            **{("prefill", near): first.replicas[near] for near in self._prefill_domain.values()},
            **{(last.role, domain): number for domain, number in last.replicas.items()},
        }
        self._work_s = dict.fromkeys(self._replicas, 0.0)
        self._waiting = dict.fromkeys(self._replicas, 0)
        self._sequences = dict.fromkeys(self.domains, 0)
        self._context = dict.fromkeys(self.domains, 0.0)
        self._per_token_s = dict.fromkeys(self.domains, 0.0)

    def load(self, domain: str) -> InflightLoad:
        """Return the load that a request answered in *domain* would meet."""
        prefill, decode = ("prefill", self._prefill_domain[domain]), (self._pool.role, domain)
        return InflightLoad(
            prefill_work_s=self._work_s[prefill],
            prefill_replicas=self._replicas[prefill],
            sequences=self._sequences[domain],
            context_tokens=self._context[domain],
            decode_replicas=self._replicas[decode],
            max_batch_size=self._pool.max_num_seqs,
            max_step_tokens=self._pool.max_num_batched_tokens,
            local_work_s=self._work_s[decode],
            local_per_token_s=self._per_token_s[domain],
        )

    def backlog_s(self) -> dict[str, float]:
        """Return the seconds of prefill still needed, by the domain that computes it."""
        found = dict.fromkeys((domain for _, domain in self._work_s), 0.0)
        for (_, domain), seconds in self._work_s.items():
            found[domain] += seconds
        return found

    def per_replica(self) -> list[float]:
        """Return the sequences per answering replica, in the order of `domains`."""
        role = self._pool.role
        return [self._sequences[each] / self._replicas[role, each] for each in self.domains]

    def set_replicas(self, live: Mapping[tuple[str, str], int]) -> None:
        """Take the live replicas by (role, domain), at least one; other pools keep their number."""
        for key in self._replicas.keys() & live.keys():
            self._replicas[key] = max(1, live[key])

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return sum(self._waiting.values())

    @property
    def sequences(self) -> int:
        """Sequences admitted and not finished."""
        return sum(self._sequences.values())

    def start(
        self,
        cost: RequestCost,
        domain: str,
        work_s: float,
        forecast: AdmissionForecast | None = None,
    ) -> InflightRequest:
        """Count a request that was admitted into *domain*."""
        decode, remote = (self._pool.role, domain), ("prefill", self._prefill_domain[domain])
        request = InflightRequest(cost, domain, decode if cost.local else remote, work_s, forecast)
        self._work_s[request.prefill] += work_s
        self._waiting[request.prefill] += 1
        self._per_token_s[domain] += request.per_token_s
        self._sequences[domain] += cost.sequences
        self._context[domain] += request.context_tokens
        return request

    def first_token(self, request: InflightRequest) -> None:
        """Remove a request from the prefill backlog; later calls change nothing."""
        if not request.waiting:
            return
        request.waiting = False
        at = request.prefill
        self._waiting[at] -= 1
        # Rounding errors of the sum would keep an idle pool from ever being idle: 0 is exact.
        self._work_s[at] = self._work_s[at] - request.work_s if self._waiting[at] else 0.0

    def end(self, request: InflightRequest) -> None:
        """Remove a request, however it ended."""
        self.first_token(request)
        at = request.domain
        self._sequences[at] -= request.cost.sequences
        busy = self._sequences[at] > 0
        self._context[at] = self._context[at] - request.context_tokens if busy else 0.0
        self._per_token_s[at] = self._per_token_s[at] - request.per_token_s if busy else 0.0


class AdmissionController:
    """Admission for one endpoint: `serving.admission.policy` on the requests in flight."""

    def __init__(
        self, config: EndpointConfig, seed: int | None = None, *, sheds: bool = True
    ) -> None:
        """Start idle; *seed* is for the choice among domains; without *sheds* all are admitted."""
        self.sheds = sheds
        self.inflight = InflightRequests(config)
        self._config = config
        self._rng = random.Random(seed)  # noqa: S311  (load balancing, not a secret)
        self._choose = chooser("power-of-two")
        fraction = 0.99 if config.slo is None else config.slo.level
        self._ttft, self._tpot = ResidualWindow(fraction), ResidualWindow(fraction)
        self._turn = 0

    @property
    def margin(self) -> Margin:
        """The margin that is added to forecasts now."""
        step, slo = self._config.step_model, self._config.slo
        if slo is None or step is None:
            return Margin()
        pace_s = slo.per_token_s or 0.0
        return Margin(
            ttft_s=self._ttft.margin_s(step.prefill.error_fraction * slo.ttft_s),
            tpot_s=self._tpot.margin_s(step.decode.error_fraction * pace_s),
            median_ttft_s=self._ttft.median_s,
            median_tpot_s=self._tpot.median_s,
        )

    def admit(self, cost: RequestCost) -> InflightRequest | Shed:
        """Choose a domain and admit a request, or shed it; without a plan all are admitted."""
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

    def end(self, request: InflightRequest, tpot_s: float | None) -> None:
        """Record the end of a request, and its time per output token if it has one."""
        self.inflight.end(request)
        if request.forecast is not None and tpot_s is not None:
            self._tpot.add(tpot_s - request.forecast.tpot_s)
