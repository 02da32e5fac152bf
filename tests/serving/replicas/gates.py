"""The gate and endpoints over real channels in one process, without Ray."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from serving.admission.controller import ANONYMOUS, KeyHolder
from serving.api.gate import AnswerReport
from serving.protocol.messages import (
    ChannelPlace,
    EndpointConfig,
    FirstChunk,
    Prefilled,
    Refusal,
    RequestPhases,
    to_plain,
)
from serving.replicas.channels import CallListener, ServedCall, whole
from serving.replicas.gate_server import GateServer, plan_key
from serving.replicas.ingress import GateConnection, RemoteGate
from serving.replicas.seats import RoutedPrompt, Seat
from serving.request.cost import RequestSize
from tests.serving.virtual_time import ticking

HERE = "127.0.0.1"
DECODE, PREFILL = ("decode", "d0"), ("prefill", "d0")
SIZE = RequestSize(
    kind="completions",
    prompts=((3, 0),),
    output_tokens=4,
    sequences=1,
    counted=False,
    local=False,
)
PHASES = RequestPhases(prefill_s=0.1, decode_s=0.1, prefill_replica="p")
ONE = RoutedPrompt()


def settings_of(config: EndpointConfig, generation: str = "", drain_s: float = 1.0) -> Any:  # noqa: ANN401
    """Return an endpoint's settings, with deployments of a generation."""
    return {
        "config": to_plain(config),
        "servers": {"d0": f"Decode{generation}"},
        "prefill": {"d0": f"Prefill{generation}"},
        "drain_s": drain_s,
    }


class Replicas:
    """
    The replicas of all deployments, each with a channel, as Ray Serve would name them.

    Attributes:
        named: their listeners, by deployment and name.
        refuses: whether they refuse all requests.
        go_on: set while answers go on after their first token.
        answered: requests that each has had.
    """

    def __init__(self) -> None:
        self.named: dict[str, dict[str, CallListener]] = {}
        self.refuses = False
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.answered: Counter[str] = Counter()

    async def start(self, deployment: str, *names: str) -> None:
        """Have these, and no others, run in a deployment."""
        methods = {
            "prefill": whole(self.prefill),
            "facts": whole(self.facts),
            "steps": whole(self.steps),
        }
        former = self.named.setdefault(deployment, {})
        for name in former.keys() - set(names):
            former.pop(name).close()
        for name in names:
            if name not in former:
                listener = CallListener({**methods, "answer": partial(self.answer, name)})
                await listener.listen(HERE, None)
                former[name] = listener

    async def answer(
        self, name: str, call: ServedCall, *, body: dict[str, Any], **_asked: object
    ) -> FirstChunk | Refusal | None:
        """Answer with as many tokens as are asked for, in one piece or in events."""
        self.answered[name] += 1
        if self.refuses:
            return Refusal(status=503, message="It is full.")
        tokens = body["max_tokens"]
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        if not body.get("stream"):
            if tokens > 1:
                await self.go_on.wait()
            return FirstChunk(phases=PHASES, first={"choices": [], "usage": usage})
        call.begin(FirstChunk(phases=PHASES, first="data: 0\n\n"))
        for number in range(1, tokens):
            await self.go_on.wait()
            call.events(b"data: %d\n\n" % number)
        call.end(usage=usage, text="data: [DONE]\n\n")
        return None

    async def prefill(self, **_asked: object) -> Prefilled:
        return Prefilled(kv_transfer_params={}, queue_s=0.0, step_s=0.1, replica="p")

    async def facts(self) -> dict[str, int]:
        return {"tp": 1}

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> list[list[float]]:
        return [[begin_unix_s, end_unix_s]]

    def live(self, handle: SimpleNamespace) -> frozenset[str] | None:
        found = self.named.get(handle.name)
        return None if found is None else frozenset(found)

    async def places(self, handle: SimpleNamespace, name: str) -> list[ChannelPlace]:
        return [self.named[handle.name][name].place]

    def close(self) -> None:
        for listener in itertools.chain(*(each.values() for each in self.named.values())):
            listener.close()


class OneGate(GateServer):
    """Ours without Ray Serve around it."""

    def __del__(self) -> None:  # type: ignore[override]
        """Python's own end: Ray Serve awaits ours before."""

    @property
    def outstanding(self) -> dict[str, int]:
        """Requests in flight by the plan that serves."""
        return self._plan.gate.admission.inflight.outstanding

    @property
    def seated(self) -> dict[str, int]:
        """Requests at each replica, of all plans, without those that have none."""
        pools = [pool for plan in self._plans.values() for pool in plan.seats._pools.values()]
        groups = [{**(pool._replicas or {}), **pool._expected} for pool in pools]
        return {name: at.requests for each in groups for name, at in each.items() if at.requests}

    @property
    def ongoing(self) -> dict[str, int]:
        """Requests in flight of each key that has some."""
        tenants = self._plan.gate.admission.tenants
        return {name: each.ongoing for name, each in tenants.items() if each.ongoing}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any request."""
        left = [each.tickets or each.seats for each in self._endpoints.values()]
        counted = [*self.outstanding.values(), *self.seated.values(), *self.ongoing.values()]
        pools = [pool for plan in self._plans.values() for pool in plan.seats._pools.values()]
        kept = [pool._seats or pool._waiting or pool._expected for pool in pools]
        return not any(
            [*counted, *left, *kept, *(each.gate._requests for each in self._plans.values())]
        )

    async def series(self) -> dict[str, float]:
        """Return the metrics."""
        lines = (await self._plan.gate.metrics_text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def die(self) -> None:
        """Leave all connections at once."""
        self._listener.close()
        for plan in {*self._plans.values(), self._prepared} - {None}:
            assert plan is not None
            plan.seats.close()


class OneEndpoint:
    """
    An endpoint process: it serves by the plan that it is told.

    Attributes:
        told: the gate's news.
        key: of the plan that it has been told last.
        ends: whether its requests by former plans end at once, and all of them at a drain.
    """

    tickets = itertools.count(1)

    def __init__(self, gates: Gates) -> None:
        self.told: list[dict[str, Any]] = []
        self.key = ""
        self.ends = True
        self.connection = GateConnection(gates.find, None, self._take)

    @property
    def gate(self) -> RemoteGate:
        return self.connection.by_plan(self.key)

    def _take(self, news: dict[str, Any]) -> None:
        self.told.append(news)
        self.key, plans = plan_key(news["settings"]), self.connection.plans
        if not news["draining"] and plans[-1:] != [self.key]:
            self.connection.serve_by([*plans, self.key])
        if self.ends:
            self.end_former(but=0 if news["draining"] else 1)

    def end_former(self, *, but: int = 1) -> None:
        """Have no request any more by any plan but the last one, or by none."""
        plans = self.connection.plans
        if len(plans) > but:
            self.connection.serve_by(plans[len(plans) - but :])

    async def admit(
        self, client: KeyHolder = ANONYMOUS, gate: RemoteGate | None = None
    ) -> int | Refusal:
        """Return the ticket of a request, if it is admitted."""
        ticket = next(self.tickets)
        admitted = await (gate or self.gate).admit(ticket, client, SIZE, streamed=True)
        return admitted if isinstance(admitted, Refusal) else ticket

    async def seat(self, pool: tuple[str, str] = DECODE) -> Seat:
        return await self.gate.seat(pool, ONE, [])

    def end(self, ticket: int, **report: Any) -> None:  # noqa: ANN401
        self.gate.ended(ticket, AnswerReport(outcome="ok", path="remote", **report))

    def lose(self) -> None:
        """Have the connection to the gate break."""
        channel = self.connection._channel
        if channel is not None and hasattr(channel, "transport"):
            channel.transport.abort()


class Gates:
    """The gate that runs, which may be another one later, and what endpoints find it by."""

    def __init__(self, settings: dict[str, Any], replicas: Replicas) -> None:
        self.settings = settings
        self.replicas = replicas
        self.gate: OneGate | None = None

    async def start(self, settings: dict[str, Any] | None = None) -> OneGate:
        """Start a gate, in the place of one that has died."""
        gate = OneGate.__new__(OneGate)
        await gate.__init__(settings or self.settings)  # type: ignore[misc]
        self.gate = gate
        return gate

    def die(self) -> None:
        """Have the gate die, and none there."""
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.die()

    async def find(self) -> ChannelPlace:
        if self.gate is None:
            raise LookupError("no gate runs")
        return await self.gate.channel_place()


@asynccontextmanager
async def gated(
    config: EndpointConfig, replicas: Replicas, endpoints: int = 2
) -> AsyncIterator[tuple[Gates, list[OneEndpoint]]]:
    """Yield a gate with replicas `d` and `p`, and endpoints that have joined it."""
    async with ticking():
        await replicas.start("Decode", "d")
        await replicas.start("Prefill", "p")
        gates = Gates(settings_of(config), replicas)
        await gates.start()
        joined = [OneEndpoint(gates) for _ in range(endpoints)]
        try:
            await settled(joined)
            yield gates, joined
        finally:
            for each in joined:
                each.connection.close()
            gates.die()
            replicas.close()


async def settled(endpoints: list[OneEndpoint]) -> None:
    """Wait until endpoints have joined the gate, know all replicas, and have told all."""
    async with asyncio.timeout(60.0):
        for each in endpoints:
            await each.connection._joined.wait()
            while None in [each.gate.live(pool) for pool in (DECODE, PREFILL)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
