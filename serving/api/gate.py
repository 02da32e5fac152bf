"""
The gate: the one exact count behind the endpoint processes of a plan.

It admits requests and counts them while they are in flight, and has the metrics and the state of
the cluster. Several endpoints share one, so that what was simulated with one router stays true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from serving.admission.controller import AdmissionController
from serving.admission.policy import Shed
from serving.api.metrics import Metrics
from serving.api.readiness import ReadyCheck

if TYPE_CHECKING:
    from collections.abc import Hashable

    from serving.admission.controller import InflightRequest
    from serving.admission.policy import RequestSize
    from serving.admission.tenants import KeyHolder
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Backend, Refusal, RequestPhases


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReport:
    """
    What is reported of a request that has ended.

    Attributes:
        outcome: as in `minicluster_requests_total`.
        path: as in `RequestPhases`; `none`: it got no token.
        ttft_s, tpot_s, e2e_s: latencies, where they are known.
        prompt_tokens, output_tokens: as the engine counts them.
        gaps_s: between the chunks of a stream.
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
    ) -> None:
        """
        Start without requests.

        Args:
            config: the plan.
            backend: the pools.
            sheds: whether requests that would miss the SLO are refused.
            token_limit: most tokens of one answer, as `state` reports it.
            former: the gate of the plan before, whose keys' counts and metrics go on.
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
        return self.metrics.text(self.admission).decode()

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
