"""
The endpoint processes as a Ray Serve deployment, and their connection to the gate.

`Ingress` replaces Ray's `OpenAiIngress`, which imports the engine (8 s of start, 0.6 GB), batches,
hides errors in 500s and lets clients forge KV transfers (docs/adr/0102). The connection is made
anew when the gate dies. This module must not import vLLM.
"""

from __future__ import annotations

import array
import asyncio
import base64
import itertools
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.api.app import api_app, write_access_log
from serving.api.server import HttpLimits, HttpServer
from serving.cluster.logs import access_log_name
from serving.cluster.serve_compat import before_sigterm, keep_log_open, serve_logs
from serving.cluster.token import channel_tls
from serving.protocol.app_spec import GATE
from serving.protocol.messages import (
    RETRY_AFTER_S,
    EngineFailed,
    Refusal,
    RequestRefused,
    from_plain,
    message_in,
)
from serving.replicas.backend import ReplicaBackend
from serving.replicas.channels import Channel, ChannelLostError
from serving.replicas.gate_server import plan_key
from serving.replicas.seats import Channels, NoReplicaError, Seat

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from serving.admission.controller import KeyHolder
    from serving.api.gate import AnswerReport
    from serving.api.tls import TlsFiles
    from serving.protocol.messages import ChannelPlace, RequestPhases
    from serving.replicas.channels import Call
    from serving.replicas.seats import Pool, RoutedPrompt
    from serving.request.cost import RequestSize

    News = dict[str, Any]
    """What `GateServer` tells endpoints."""


CLOSE_S = 5.0
"""Time for connections to close, after the last answer or the limit."""

IDLE_CONNECTIONS = 1024
"""Connections beyond two for each sequence that the plan's replicas decode at once."""


@serve.ingress()
class Ingress:
    """
    An endpoint process: checks requests, sends them to replicas, reports times in `Server-Timing`.

    The gate tells it the plan. With another one a request in flight ends as it began, and the next
    one goes by the new plan to the new replicas.
    """

    def __init__(
        self,
        *,
        pools: object = None,  # noqa: ARG002
        address: tuple[str, int] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """
        Begin to look for the gate.

        With an *address* it listens there itself, with *tls* by HTTPS; without one Ray Serve's
        proxy forwards requests. Through *pools* Ray Serve finds the deployments to start.
        """
        keep_log_open()
        rank = serve.get_replica_context().rank.rank
        write_access_log(serve_logs() / access_log_name(rank))
        self._address = address
        self._tls = tls
        self._app: Starlette | None = None
        self._key = ""
        self._drain_s = 0.0
        self._drains: set[asyncio.Task[None]] = set()
        self._refuses = self._ends = False
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, once the gate has told the plan; Ray calls this once."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(news: dict[str, Any]) -> None:
            try:
                self._serve_by(news)
            except Exception as error:
                if not told.done():
                    told.set_exception(error)  # this process cannot start
                raise
            if not told.done():
                told.set_result(None)

        self._gate = GateConnection(_find_gate, channel_tls(os.environ, listens=False), take)
        await told

        # A function, because uvicorn takes a bound method for the older interface.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            assert self._app is not None  # noqa: S101  (for the type checker)
            await self._app(scope, receive, send)

        if self._address is not None:
            host, port = self._address
            limits = HttpLimits(connections=self._connections)
            self._server = HttpServer(
                answer, host, port, limits=limits, tls=self._tls, count=self._count
            )
            self._serving = asyncio.create_task(self._server.serve())
        loop = asyncio.get_running_loop()
        before_sigterm(lambda: asyncio.run_coroutine_threadsafe(self._end(), loop).result())
        return answer

    def _serve_by(self, news: dict[str, Any]) -> None:
        settings, draining = news["settings"], news["draining"]
        key = plan_key(settings)
        # A gate that had all drain may have died, and its successor has them serve again.
        if key != self._key or (self._refuses and not draining and not self._ends):
            self._begin(key, settings, bytes.fromhex(news["cache_secret"]))
        if draining:
            self._drain()

    def _begin(self, key: str, settings: dict[str, Any], cache_secret: bytes) -> None:
        config, gate = from_plain(settings["config"]), self._gate.by_plan(key)
        app = api_app(
            config,
            ReplicaBackend(config, gate),
            gate,
            os.environ,
            host="" if self._address is None else self._address[0],
            cache_secret=cache_secret,
            former=self._app,
        )
        self._drain()
        self._app, self._refuses = app, False
        self._key, self._drain_s = key, settings["drain_s"]
        self._connections = IDLE_CONNECTIONS + 2 * config.answering.sequences
        self._gate.serve_by([*self._gate.plans, key])
        if self._server is not None:
            self._server.allow(self._connections)

    def _drain(self) -> None:
        if self._app is None or self._refuses:
            return
        self._refuses = True
        task = asyncio.create_task(self._drained(self._key, self._app, self._drain_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drained(self, key: str, app: Starlette, limit_s: float) -> None:
        await app.state.drain(limit_s)
        plans = [*self._gate.plans]
        plans.remove(key)
        self._gate.serve_by(plans)

    def _count(self, status: int) -> None:
        assert self._app is not None  # noqa: S101  (for the type checker)
        self._app.state.count(status)

    def check_health(self) -> None:
        """
        Have Ray Serve replace this replica if its HTTP server has ended; Ray calls this.

        Raises:
            RuntimeError: it has.
        """
        if self._serving is not None and self._serving.done():
            error = None if self._serving.cancelled() else self._serving.exception()
            raise RuntimeError(f"the HTTP server at {self._address} has ended: {error!r}")

    async def _end(self) -> None:
        """
        Let answers end, without new ones.

        Where there are other endpoints, this one stops listening at first, so that the kernel gives
        them the next connections; a lone one refuses new work until then.
        """
        if self._app is None:
            return
        self._ends = True
        self._gate.notify("ends")
        alone = self._gate.news["endpoints"] <= 1 or self._gate.news["draining"]
        if alone:
            self._drain()
            await asyncio.gather(*self._drains)
        if self._server is not None and self._serving is not None:
            self._server.stop()
            limit_s = CLOSE_S if alone else self._drain_s
            await asyncio.wait({self._serving}, timeout=limit_s)

    async def __del__(self) -> None:
        """End; Ray Serve, past which clients connect, knows of no request."""
        await self._end()
        self._gate.close()


async def _find_gate() -> ChannelPlace:
    handle = serve.get_deployment_handle(GATE, serve.get_replica_context().app_name)
    place: ChannelPlace = await handle.channel_place.remote()
    return place


logger = logging.getLogger(__name__)

WAIT_S = 15.0
"""Longest time that a request waits for the gate: Ray Serve takes seconds to start another."""

RETRY_S = 0.2
"""Time between two tries to find the gate."""

FIND_S = 10.0
"""Longest time for Ray Serve to name the gate; it is asked again after it."""

PATIENT = frozenset({"seat", "ready"})
"""
What has its own limits: a place may be free late, and a probe may take as long as both deadlines.
"""

NO_GATE = Refusal(
    status=503,
    message="The gate of the endpoint is starting again; send the request again.",
    code="gate_unavailable",
    retry_after_s=RETRY_AFTER_S,
)


@dataclass(slots=True)
class _UnderWay:
    """What this process has under way by one plan, as another gate is told of it."""

    tickets: dict[int, dict[str, Any]]
    seats: dict[int, dict[str, Any]]


class GateConnection:
    """
    The connection of this endpoint process to the gate, and those to all replicas.

    Attributes:
        news: last news of the gate.
        plans: those by which this process serves, or still ends requests; the last one serves.
        channels: connections to the replicas.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[ChannelPlace]],
        tls: ssl.SSLContext | None,
        take: Callable[[News], None],
    ) -> None:
        """
        Begin to connect to where *find* says that the gate takes calls.

        *take* is given the gate's news, at first and whenever they change.
        """
        self.news: News = {}
        self.plans: list[str] = []
        self.channels = Channels(tls)
        self._find, self._tls, self._take = find, tls, take
        self._under_way: dict[str, _UnderWay] = {}
        self._places: dict[str, dict[Pool, list[str]]] = {}
        self._channel: Channel | None = None
        self._rest = b""
        self._joined = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    def by_plan(self, key: str) -> RemoteGate:
        """Return the gate of a plan."""
        return RemoteGate(self, key)

    def serve_by(self, plans: list[str]) -> None:
        """Take other `plans`, and tell the gate; forget those that have ended."""
        self.plans = plans
        self._under_way = {
            key: of for key, of in self._under_way.items() if key in plans or of.tickets or of.seats
        }
        self.notify("serves_by", plans=plans)

    def under_way(self, key: str) -> _UnderWay:
        """Return what this process has under way by a plan."""
        return self._under_way.setdefault(key, _UnderWay({}, {}))

    def places(self, key: str, pool: Pool) -> list[str] | None:
        """Return the replicas of a pool that can be called; `None`: not known yet."""
        return self._places.get(key, {}).get(pool)

    async def ask(self, method: str, **asked: Any) -> Any:  # noqa: ANN401
        """
        Return the gate's answer, as soon as there is a gate.

        Raises:
            RequestRefused: there is none for too long, or it has failed.
        """
        try:
            async with asyncio.timeout(None if method in PATIENT else WAIT_S):
                while True:
                    async with asyncio.timeout(WAIT_S):
                        await self._joined.wait()
                    with suppress(ChannelLostError):
                        return await self._answer(method, asked)
        except TimeoutError as error:
            raise RequestRefused(NO_GATE) from error
        except EngineFailed as error:
            logger.warning("the gate failed to %s: %s", method, error)
            raise RequestRefused(NO_GATE) from error

    async def _answer(self, method: str, asked: dict[str, Any]) -> Any:  # noqa: ANN401
        channel = self._channel
        if channel is None:
            raise ChannelLostError("the gate was lost right after it was joined")
        call = channel.call(method, asked)
        try:
            return await call.result
        except ChannelLostError:
            if self._channel is channel:
                self._joined.clear()
            raise
        finally:
            call.cancel()  # unless it has ended

    def notify(self, method: str, **told: Any) -> None:  # noqa: ANN401
        """Tell the gate something; one that is away is told later what is under way then."""
        if self._channel is not None:
            self._channel.notify(method, told)

    def close(self) -> None:
        """Leave the gate, and cut all connections."""
        self._task.cancel()
        if self._channel is not None:
            self._channel.give_up("this process ends")
        self.channels.close()

    # What the gate tells.

    def events(self, text: bytes) -> None:
        """Take news, one in a line."""
        *lines, self._rest = (self._rest + text).split(b"\n")
        try:
            for line in lines[-1:]:  # each has everything
                self._hear(json.loads(line))
        except Exception:
            if self._channel is not None:
                self._channel.give_up("its news cannot be taken")  # and asked for again
            raise

    def ended(self, ending: dict[str, Any]) -> None:
        """Take note that the gate has ended the connection."""
        logger.error("the gate has turned this endpoint away: %s", ending["error"])
        if self._channel is not None:
            self._channel.give_up("the gate wants no more of it")

    def lost(self, _error: ChannelLostError) -> None:
        """Take note that the gate is gone."""

    async def _keep(self) -> None:
        while True:
            gone = asyncio.Event()
            try:
                async with asyncio.timeout(FIND_S):
                    place = await self._find()
                channel = Channel(place, self._tls, ended=gone.set)
                try:
                    await self._join(channel)
                    await gone.wait()
                finally:
                    channel.give_up("another one is made")
            except Exception as error:  # noqa: BLE001  (Ray's, or of a gate that is ending)
                logger.warning("the gate does not answer: %r", error)
                await asyncio.sleep(RETRY_S)
            self._channel = None
            self._joined.clear()

    async def _join(self, channel: Channel) -> None:
        """Tell the gate what is under way, and ask for its news; raises any error of the call."""
        under_way = self._under_way.items()
        # A notice, so that the gate takes those after it, of what ends meanwhile, after it.
        channel.notify(
            "joins",
            {
                "plans": self.plans,
                "cache_secret": self.news.get("cache_secret"),
                "tickets": [
                    {"plan": key, **entry} for key, of in under_way for entry in of.tickets.values()
                ],
                "seats": [
                    {"plan": key, **entry} for key, of in under_way for entry in of.seats.values()
                ],
            },
        )
        call = channel.call("news", {})
        self._rest, self._channel = b"", channel
        self._hear(await call.result)
        call.forward(self)  # of newer ones
        self.serve_by(self.plans)
        self._joined.set()

    def _hear(self, news: News) -> None:
        self.news = news
        places: dict[str, ChannelPlace] = {}
        self._places = {}
        for key, pools in news["replicas"].items():
            for (role, domain), replicas in pools:
                self._places.setdefault(key, {})[role, domain] = [*replicas]
                places |= {name: message_in(place) for name, place in replicas.items()}
        self.channels.expect(places)
        self._take(news)


class RemoteGate:
    """
    The gate of one plan: implements `Tickets` and `serving.replicas.backend.Seats`.

    A gate that dies is told what is under way here when it is back.
    """

    numbers = itertools.count(1)

    def __init__(self, connection: GateConnection, key: str) -> None:
        self._connection = connection
        self._key = key
        self._under_way = connection.under_way(key)

    async def admit(
        self, ticket: int, client: KeyHolder, size: RequestSize, *, streamed: bool
    ) -> str | Refusal:
        """See `Tickets`."""
        arguments = {"ticket": ticket, "client": _plain_client(client), "size": asdict(size)}
        try:
            admitted: str | Refusal = await self._connection.ask(
                "admit", plan=self._key, **arguments, streamed=streamed
            )
        except BaseException:
            self._forget(ticket)
            raise
        if isinstance(admitted, str):
            self._under_way.tickets[ticket] = {**arguments, "domain": admitted, "waiting": streamed}
        return admitted

    async def move(self, ticket: int) -> str:
        """See `Tickets`."""
        domain: str = await self._connection.ask("move", plan=self._key, ticket=ticket)
        self._under_way.tickets[ticket]["domain"] = domain
        return domain

    def first_token(self, ticket: int, phases: RequestPhases, ttft_s: float) -> None:
        """See `Tickets`."""
        self._under_way.tickets[ticket]["waiting"] = False
        self._tell("first_token", ticket=ticket, phases=phases, ttft_s=ttft_s)

    def ended(self, ticket: int, report: AnswerReport) -> None:
        """See `Tickets`."""
        self._under_way.tickets.pop(ticket, None)
        plain = {name: getattr(report, name) for name in report.__slots__ if name != "gaps_s"}
        gaps = base64.b64encode(array.array("f", report.gaps_s).tobytes()).decode()
        self._tell("ended", ticket=ticket, report=plain, gaps=gaps)

    def answered(self, route: str, status: int) -> None:
        """See `Tickets`."""
        self._connection.notify("answered", route=route, status=status)

    def shed(self, reason: str) -> None:
        """See `Tickets`."""
        self._connection.notify("shed", reason=reason)

    async def ready(self) -> tuple[bool, list[str]]:
        """See `Tickets`."""
        ready, lacking = await self._connection.ask("ready")
        return ready, lacking

    async def metrics_text(self) -> str:
        """See `Tickets`."""
        text: str = await self._connection.ask("metrics_text")
        return text

    async def state(self) -> dict[str, Any]:
        """See `Tickets`."""
        state: dict[str, Any] = await self._connection.ask("state")
        return state

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> dict[str, list[list[float]]]:
        """See `Tickets`."""
        interval = {"begin_unix_s": begin_unix_s, "end_unix_s": end_unix_s}
        steps: dict[str, list[list[float]]] = await self._connection.ask("steps", **interval)
        return steps

    async def seat(self, pool: Pool, prompt: RoutedPrompt, tried: Sequence[str]) -> Seat:
        """See `Seats`."""
        number = next(self.numbers)
        arguments = {"pool": pool, "prompt": prompt, "number": number}
        try:
            replica = await self._connection.ask(
                "seat", plan=self._key, **arguments, tried=[*tried]
            )
        except BaseException:
            self._tell("leave", number=number)
            raise
        if replica is None:
            raise NoReplicaError
        self._under_way.seats[number] = {**arguments, "replica": replica}
        return Seat(replica, number)

    def leave(self, _pool: Pool, seat: Seat, *, answered: bool = False) -> None:
        """See `Seats`."""
        self._under_way.seats.pop(seat.number, None)
        self._tell("leave", number=seat.number, answered=answered)

    async def answered_within(self, pool: Pool, replica: str, age_s: float) -> bool:
        """See `Seats`."""
        arguments = {"pool": pool, "replica": replica, "age_s": age_s}
        answered: bool = await self._connection.ask("answered_within", plan=self._key, **arguments)
        return answered

    def live(self, pool: Pool) -> Sequence[str] | None:
        """See `Seats`."""
        return self._connection.places(self._key, pool)

    def call(self, replica: str, method: str, arguments: dict[str, Any]) -> Call:
        """See `Seats`."""
        return self._connection.channels.call(replica, method, arguments)

    def _tell(self, method: str, **told: Any) -> None:  # noqa: ANN401
        self._connection.notify(method, plan=self._key, **told)

    def _forget(self, ticket: int) -> None:
        """Have the gate end a request that it may have admitted while nobody waited any more."""
        self._tell("ended", ticket=ticket, report={"outcome": "cancelled"}, gaps="")


def _plain_client(client: KeyHolder) -> dict[str, Any]:
    return {
        "name": client.name,
        "requests_per_s": client.requests_per_s,
        "tokens_per_min": client.tokens_per_min,
        "max_concurrency": client.max_concurrency,
    }
