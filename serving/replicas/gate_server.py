"""
The gate as a Ray Serve deployment: one process that all endpoint processes ask.

It admits requests, gives them places at replicas, and has the metrics, the readiness and the end of
all of them. When it dies, Ray Serve starts another one, to which the endpoints tell what they have
under way (`serving.replicas.ingress`); streams go on meanwhile. This module must not import
vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import serve

from serving.admission.controller import AdmissionController, KeyHolder, read_admission
from serving.api.gate import AnswerReport, Gate, Metrics, ReadyCheck
from serving.cluster.serve_compat import before_sigterm, keep_log_open
from serving.cluster.token import channel_tls
from serving.protocol.messages import UNAVAILABLE, from_plain, message_in, to_json
from serving.replicas.backend import ReplicaBackend
from serving.replicas.channels import CallListener
from serving.replicas.seats import NoReplicaError, Pool, ReplicaSeats, RoutedPrompt, Seat
from serving.request.cost import RequestSize, read_token_limit

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from serving.protocol.messages import ChannelPlace, Refusal
    from serving.replicas.channels import ServedCall


LEAVE_S = 2.0
"""Time for endpoints that end with the gate to say so, before it leaves the others."""


def plan_key(settings: Mapping[str, Any]) -> str:
    """Return the name of a plan's settings, which is the same in every process."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Plan:
    """One plan: its settings, and its replicas; once it serves, its gate."""

    gate: Gate

    def __init__(self, settings: Mapping[str, Any], changed: Callable[[], None]) -> None:
        """Watch the deployments that *settings* name, one for each domain, in this application."""
        self.settings = settings
        self.key = plan_key(settings)
        self.config = config = from_plain(settings["config"])
        app = serve.get_replica_context().app_name
        named = ((config.answering.role, settings["servers"]), ("prefill", settings["prefill"]))
        handles = {
            (role, domain): serve.get_deployment_handle(name, app)
            for role, names in named
            for domain, name in names.items()
        }
        self.seats = ReplicaSeats(config, handles, channel_tls(os.environ, listens=False), changed)
        self.backend = ReplicaBackend(config, self.seats)

    def begin(self, former: Gate | None) -> None:
        """Begin to serve, where *former* ends."""
        self.gate = Gate(
            self.config,
            self.backend,
            sheds=read_admission(os.environ),
            token_limit=read_token_limit(os.environ),
            former=former,
            requests=self.seats.requests,
        )


@dataclass(slots=True, eq=False)
class _Endpoint:
    """
    One endpoint process.

    Attributes:
        tell: sends it news.
        tickets: its requests in flight, by plan and number, with the gates that have them.
        seats: its places at replicas, by plan and number, with what gave them.
        plans: those by which it serves, or still ends requests; the last one serves.
        ends: whether its process is about to end.
    """

    tell: Callable[[dict[str, Any]], None] = lambda _news: None
    tickets: dict[tuple[str, int], Gate] = field(default_factory=dict)
    seats: dict[tuple[str, int], tuple[ReplicaSeats, Pool, Seat]] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)
    ends: bool = False


class GateServer:
    """
    The gate of one application.

    Its settings are those of `serving.replicas.app.endpoint_settings`. With other ones a request
    in flight ends as it began, and the next one goes by the new plan to the new replicas.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        """Take the plan, and listen for endpoints."""
        keep_log_open()
        self._endpoints: dict[object, _Endpoint] = {}
        self._progress = asyncio.Condition()
        self._cache_secret = secrets.token_hex(32)
        self._draining = self._telling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared: _Plan | None = None
        self._plan = _Plan(settings, self._tell)
        self._plan.begin(None)
        self._plans = {self._plan.key: self._plan}
        called = (
            *(self.news, self.admit, self.move, self.seat),
            *(self.answered_within, self.ready, self.metrics_text, self.state, self.steps),
        )
        noticed = (
            *(self.joins, self.first_token, self.ended, self.answered, self.shed),
            *(self.leave, self.serves_by, self.ends),
        )
        self._listener = CallListener(
            {method.__name__: method for method in called},
            notices={method.__name__: method for method in noticed},
            left=self._left,
        )
        await self._listener.listen(
            ray.util.get_node_ip_address(), channel_tls(os.environ, listens=True)
        )
        loop = asyncio.get_running_loop()
        before_sigterm(lambda: asyncio.run_coroutine_threadsafe(self._end(), loop).result())

    # What the command that deploys calls, through Ray Serve.

    async def channel_place(self) -> ChannelPlace:
        """Return where endpoints find the gate; they call this, too."""
        return self._listener.place

    async def prepare(self, settings: dict[str, Any]) -> list[str]:
        """
        Have *settings* ready to switch to: send a request through every domain; return what lacks.

        What lacks something is not kept: it may be asked for again, or its replicas removed.
        """
        self._prepared = plan = self._ready_plan(settings)
        config = plan.config
        check = ReadyCheck(config, plan.backend, AdmissionController(config), Metrics(config))
        _, lacking = await check.check()
        if lacking and plan is self._prepared:
            plan.seats.close()
            self._prepared = None
            self._tell()
        return lacking

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Serve by *settings* from the next request on; Ray Serve calls this when they change."""
        key, former = plan_key(settings), self._plan
        if key == former.key:
            return
        plan = self._plans.get(key)
        if plan is not None:  # a former one, which has not ended
            plan.gate.metrics.take(plan.config)
        else:
            plan = self._ready_plan(settings)
            plan.begin(former.gate)
        if self._prepared not in {None, plan}:
            self._prepared.seats.close()
        self._prepared = None
        self._plans[key] = self._plan = plan
        self._tell()
        self._start(self._end_former(former))

    async def serves(self) -> dict[str, str]:
        """Return the deployment that answers in each domain, once all endpoints have the plan."""
        key = self._plan.key
        if any(endpoint.plans[-1:] != [key] for endpoint in self._endpoints.values()):
            return {}
        servers: dict[str, str] = self._plan.settings["servers"]
        return servers

    async def drain_former(self) -> int:
        """Wait until requests of former plans have ended; return how many are left at the limit."""
        await self._until(
            lambda: all(
                {*endpoint.plans} <= {self._plan.key} for endpoint in self._endpoints.values()
            )
        )
        return sum(key != self._plan.key for key in self._tickets())

    async def drain(self) -> int:
        """Refuse new work, and let answers end; return how many are left at the limit."""
        self._draining = True
        self._tell()
        await self._until(lambda: not any(endpoint.plans for endpoint in self._endpoints.values()))
        return len(self._tickets())

    async def __del__(self) -> None:
        """End; Ray Serve calls this."""
        await self._end()
        self._listener.close()

    async def _end(self) -> None:
        """Wait for the last answers of endpoints that end; the others wait for another gate."""
        await asyncio.sleep(LEAVE_S)
        await self._until(lambda: not any(endpoint.ends for endpoint in self._endpoints.values()))

    # What endpoints call.

    def joins(
        self,
        connection: object,
        plans: list[str],
        cache_secret: str | None,
        tickets: list[dict[str, Any]],
        seats: list[dict[str, Any]],
    ) -> None:
        """
        Count an endpoint, with what it has under way; it may have been at a gate before.

        Args:
            connection: connection of the endpoint.
            plans: as in `_Endpoint`.
            cache_secret: secret of the gate before, which goes on; `None`: there was none.
            tickets: its requests, as of `admit`, with `domain` and `waiting` as of `Gate.resume`.
            seats: its places, as of `seat`, with the `replica`.
        """
        endpoint = self._endpoints[connection] = _Endpoint(plans=plans)
        self._cache_secret = cache_secret or self._cache_secret
        for entry in tickets:
            if (plan := self._plans.get(entry.pop("plan"))) is not None:
                number, client = entry.pop("ticket"), KeyHolder(**entry.pop("client"))
                size = RequestSize(**entry.pop("size"))
                plan.gate.resume((connection, number), client, size, **entry)
                endpoint.tickets[plan.key, number] = plan.gate
        for entry in seats:
            if (plan := self._plans.get(entry["plan"])) is not None:
                pool, prompt = _pool_in(entry), _prompt_in(entry)
                taken = plan.seats.take(pool, entry["replica"], prompt)
                endpoint.seats[plan.key, entry["number"]] = plan.seats, pool, taken

    async def news(self, call: ServedCall) -> None:
        """Tell an endpoint that has joined all news, as long as it is there."""
        endpoint = self._endpoints[call.connection]
        if not endpoint.plans:
            endpoint.plans = [self._plan.key]  # it serves as soon as it knows by what
        call.begin(self._state_of_all())
        endpoint.tell = lambda news: call.events(json.dumps(news).encode() + b"\n")
        self._tell()
        await asyncio.get_running_loop().create_future()  # until the connection ends

    async def admit(
        self,
        call: ServedCall,
        plan: str,
        ticket: int,
        client: dict[str, Any],
        size: dict[str, Any],
        *,
        streamed: bool,
    ) -> str | Refusal:
        """See `Tickets.admit`."""
        if plan not in self._plans:
            return UNAVAILABLE["no_replica"]
        gate = self._plans[plan].gate
        admitted = await gate.admit(
            (call.connection, ticket), KeyHolder(**client), RequestSize(**size), streamed=streamed
        )
        if isinstance(admitted, str):
            self._endpoints[call.connection].tickets[plan, ticket] = gate
        return admitted

    async def move(self, call: ServedCall, plan: str, ticket: int) -> str:
        """See `Tickets.move`."""
        gate = self._endpoints[call.connection].tickets[plan, ticket]
        return await gate.move((call.connection, ticket))

    async def seat(self, call: ServedCall, **asked: Any) -> str | None:  # noqa: ANN401
        """
        Give a request a place at a replica, by a number of the endpoint's, until `leave`.

        Returns:
            The replica's name; `None`: there is none.
        """
        plan, pool = self._plans.get(asked["plan"]), _pool_in(asked)
        if plan is None:
            return None
        try:
            seat = await plan.seats.seat(pool, _prompt_in(asked), asked["tried"])
        except NoReplicaError:
            return None
        self._endpoints[call.connection].seats[plan.key, asked["number"]] = plan.seats, pool, seat
        return seat.replica

    def leave(self, connection: object, plan: str, number: int, *, answered: bool = False) -> None:
        """Take a place back, unless it has not been given."""
        place = self._endpoints[connection].seats.pop((plan, number), None)
        if place is not None:
            seats, pool, seat = place
            seats.leave(pool, seat, answered=answered)

    async def answered_within(
        self, _call: ServedCall, plan: str, pool: list[str], replica: str, age_s: float
    ) -> bool:
        """See `Seats.answered_within`."""
        its_plan = self._plans.get(plan)
        return its_plan is not None and await its_plan.seats.answered_within(
            _pool_in({"pool": pool}), replica, age_s
        )

    def first_token(
        self, connection: object, plan: str, ticket: int, phases: dict[str, Any], ttft_s: float
    ) -> None:
        """See `Tickets.first_token`."""
        gate = self._endpoints[connection].tickets.get((plan, ticket))
        if gate is not None:
            gate.first_token((connection, ticket), message_in(phases), ttft_s)

    def ended(
        self, connection: object, plan: str, ticket: int, report: dict[str, Any], gaps: str
    ) -> None:
        """See `Tickets.ended`; *gaps* has the gaps as base64 of 32-bit numbers."""
        gate = self._endpoints[connection].tickets.pop((plan, ticket), None)
        if gate is not None:
            gaps_s = np.frombuffer(base64.b64decode(gaps), dtype="<f4").tolist()
            gate.ended((connection, ticket), AnswerReport(**report, gaps_s=gaps_s))

    def answered(self, _connection: object, route: str, status: int) -> None:
        """See `Tickets.answered`."""
        self._plan.gate.answered(route, status)

    def shed(self, _connection: object, reason: str) -> None:
        """See `Tickets.shed`."""
        self._plan.gate.shed(reason)

    async def ready(self, _call: ServedCall) -> tuple[bool, list[str]]:
        """See `Tickets.ready`."""
        return await self._plan.gate.ready()

    async def metrics_text(self, _call: ServedCall) -> str:
        """See `Tickets.metrics_text`."""
        return await self._plan.gate.metrics_text()

    async def state(self, _call: ServedCall) -> dict[str, Any]:
        """See `Tickets.state`."""
        return await self._plan.gate.state()

    async def steps(self, _call: ServedCall, begin_unix_s: float, end_unix_s: float) -> Any:  # noqa: ANN401
        """See `Tickets.steps`."""
        return await self._plan.gate.steps(begin_unix_s, end_unix_s)

    def serves_by(self, connection: object, plans: list[str]) -> None:
        """Take note of the plans by which an endpoint serves, as in `_Endpoint`."""
        self._endpoints[connection].plans = plans
        self._wake()

    def ends(self, connection: object) -> None:
        """Take note that an endpoint ends with its last answer."""
        self._endpoints[connection].ends = True

    # Between the two.

    def _ready_plan(self, settings: dict[str, Any]) -> _Plan:
        """Return what has been prepared, if it is for *settings*; otherwise end that."""
        plan = self._prepared
        if plan is not None and plan.key == plan_key(settings):
            return plan
        if plan is not None:
            plan.seats.close()
        return _Plan(settings, self._tell)

    def _tickets(self) -> list[str]:
        return [key for endpoint in self._endpoints.values() for key, _ in endpoint.tickets]

    def _left(self, connection: object) -> None:
        endpoint = self._endpoints.pop(connection, None)
        if endpoint is None:
            return
        for (_, number), gate in endpoint.tickets.items():
            gate.ended((connection, number), AnswerReport(outcome="failed"))
        for seats, pool, seat in endpoint.seats.values():
            seats.leave(pool, seat)
        self._tell()
        self._wake()

    def _state_of_all(self) -> dict[str, Any]:
        plans = [*([self._prepared] if self._prepared else []), *self._plans.values()]
        return {
            "settings": self._plan.settings,
            "cache_secret": self._cache_secret,
            "draining": self._draining,
            "endpoints": len(self._endpoints),
            "replicas": {plan.key: plan.seats.places() for plan in plans},
        }

    def _tell(self) -> None:
        """Tell all endpoints the news, at the end of this turn of the loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_now)

    def _tell_now(self) -> None:
        self._telling = False
        news = json.loads(to_json(self._state_of_all())) if self._endpoints else {}
        for endpoint in self._endpoints.values():
            endpoint.tell(news)

    def _wake(self) -> None:
        async def wake() -> None:
            async with self._progress:
                self._progress.notify_all()

        self._start(wake())

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._progress:
            await self._progress.wait_for(holds)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_former(self, plan: _Plan) -> None:
        await self._until(
            lambda: not any(plan.key in endpoint.plans for endpoint in self._endpoints.values())
        )
        if plan is not self._plan and self._plans.pop(plan.key, None) is not None:
            plan.seats.close()
            self._tell()


def _pool_in(asked: Mapping[str, Any]) -> Pool:
    role, domain = asked["pool"]
    return role, domain


def _prompt_in(asked: Mapping[str, Any]) -> RoutedPrompt:
    tokens, blocks = asked["prompt"]
    return RoutedPrompt(tokens, tuple(blocks))
