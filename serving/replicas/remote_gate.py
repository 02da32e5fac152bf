"""The gate as an endpoint process uses it, over a channel that is made anew when the gate dies."""

from __future__ import annotations

import array
import asyncio
import base64
import itertools
import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from serving.protocol.messages import EngineFailed, Refusal, RequestRefused, message_in
from serving.replicas.channels import Channel, ChannelLostError, Channels
from serving.request.prefill import RETRY_AFTER_S
from serving.request.replica_pool import NoReplicaError, Seat

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from serving.admission.policy import RequestSize
    from serving.admission.tenants import KeyHolder
    from serving.api.gate import AnswerReport
    from serving.protocol.messages import ChannelPlace, RequestPhases
    from serving.replicas.channels import Call
    from serving.replicas.replica_seats import Pool
    from serving.request.replica_pool import RoutedPrompt

    News = dict[str, Any]
    """What `GateServer` tells endpoints."""

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
        news: what the gate has told last.
        plans: those by which this process serves, or still ends requests; the last one serves.
        channels: to the replicas.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[ChannelPlace]],
        tls: ssl.SSLContext | None,
        take: Callable[[News], None],
    ) -> None:
        """
        Begin to connect.

        Args:
            find: returns where the gate takes calls.
            tls: of all connections.
            take: is given the gate's news, at first and whenever they change.
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
        """Return what the gate that has been joined answers; raises what `Call.result` raises."""
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
        """Join the gate, and join it again whenever it is lost."""
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
        own = self._under_way.items()
        # A notice, so that the gate takes those after it, of what ends meanwhile, after it.
        channel.notify(
            "joins",
            {
                "plans": self.plans,
                "cache_secret": self.news.get("cache_secret"),
                "tickets": [
                    {"plan": key, **each} for key, of in own for each in of.tickets.values()
                ],
                "seats": [{"plan": key, **each} for key, of in own for each in of.seats.values()],
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
        asked = {"ticket": ticket, "client": _plain_client(client), "size": asdict(size)}
        try:
            admitted: str | Refusal = await self._connection.ask(
                "admit", plan=self._key, **asked, streamed=streamed
            )
        except BaseException:
            self._forget(ticket)
            raise
        if isinstance(admitted, str):
            self._under_way.tickets[ticket] = {**asked, "domain": admitted, "waiting": streamed}
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
        asked = {"pool": pool, "prompt": prompt, "number": number}
        try:
            replica = await self._connection.ask("seat", plan=self._key, **asked, tried=[*tried])
        except BaseException:
            self._tell("leave", number=number)
            raise
        if replica is None:
            raise NoReplicaError
        self._under_way.seats[number] = {**asked, "replica": replica}
        return Seat(replica, number)

    def leave(self, _pool: Pool, seat: Seat, *, answered: bool = False) -> None:
        """See `Seats`."""
        self._under_way.seats.pop(seat.number, None)
        self._tell("leave", number=seat.number, answered=answered)

    async def answered_within(self, pool: Pool, replica: str, age_s: float) -> bool:
        """See `Seats`."""
        asked = {"pool": pool, "replica": replica, "age_s": age_s}
        answered: bool = await self._connection.ask("answered_within", plan=self._key, **asked)
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
    """Return what the gate needs of a client."""
    return {
        "name": client.name,
        "requests_per_s": client.requests_per_s,
        "tokens_per_min": client.tokens_per_min,
        "max_concurrency": client.max_concurrency,
    }
