"""The servers of the pools with simulated engines. This module must not import torch or vLLM."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ray import serve

from serving.cluster.serve_compat import keep_log_open
from serving.cluster.token import channel_tls
from serving.protocol.messages import EngineFailed, Prefilled, message_in
from serving.replicas.channels import CallListener, Channel, whole
from serving.replicas.roles import AnswerRole, EngineServer, PrefillRole, replica_name
from serving.simulated.answering import RANK, AnswerRules, SimulatedAnswers, read_tokenizer
from serving.simulated.engine import EngineClock, SimulatedEngine
from serving.simulated.kv_transfer import AgreedPull, KvLost, KvSink, KvSource

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

    from serving.protocol.app_spec import SimulatedSettings
    from serving.protocol.messages import PromptPath
    from serving.replicas.channels import Method, ServedCall

FETCH_LIMIT_S = 5.0
"""Longest wait for the word of a prefill replica; after it its KV cache counts as lost."""


class SimulatedServer(EngineServer):
    """A simulated engine, or all ranks of a simulated group, each called at a place of its own."""

    _source: KvSource | None = None

    async def __init__(self, settings: SimulatedSettings) -> None:  # type: ignore[misc]
        """Start the engine."""
        keep_log_open()
        self._settings = settings
        number = serve.get_replica_context().rank.rank
        self._engine = SimulatedEngine(
            settings.limits,
            settings.steps.step(settings.role),
            EngineClock(settings.slowdown),
            prefill_only=settings.role == "prefill",
            lanes=settings.lanes,
            ranks=settings.ranks,
            lora=settings.lora,
            keeps_steps=settings.keeps_steps,
        )
        if settings.role == "prefill":
            self._source = KvSource(self._engine, settings.steps.steps.path)
        labels = settings.places[number % len(settings.places)]
        self.answers = self._simulated = SimulatedAnswers(
            self._engine,
            AnswerRules(
                model=settings.model,
                vocab_size=settings.vocab_size,
                max_model_len=settings.max_model_len,
                block_size=settings.limits.block_size,
                unasked_tokens=settings.unasked_tokens,
                tokenizer=read_tokenizer(settings.source),
                adapters=settings.adapters,
            ),
            settings.facts | {"labels": labels},
            source=self._source,
            lease_s=settings.lease_s,
        )
        await self.begin()

    def made_listeners(self) -> Sequence[CallListener]:
        """Return a listener for each rank: the router chooses among ranks, as with vLLM's."""
        ranks = self._settings.ranks
        if ranks == 1:
            return super().made_listeners()
        return [
            CallListener(
                {name: _at_rank(rank, method) for name, method in self.called().items()},
                group=replica_name(),
            )
            for rank in range(ranks)
        ]

    async def check_health(self) -> None:
        """Pass: an engine that died ends this process."""

    async def routed(self) -> None:
        """Wait as long as the plan says that routing a request takes."""
        path = self._settings.steps.steps.path
        seconds = path.request_s + path.request_spread_s
        await asyncio.sleep(seconds * self._settings.slowdown)

    async def inside(self) -> dict[str, Any]:
        """Return name and process of this replica, and what its engine has inside."""
        return {"replica": replica_name(), "pid": os.getpid()} | asdict(self._engine.load())

    async def fault(
        self, kind: str, value: float = 1.0, *, replicas: Collection[str] | None = None
    ) -> None:
        """
        Let something go wrong, here or at some *replicas* by name; for tests of what then happens.

        *kind* is `die`, `exit`, `fail-pulls`, `freeze`, `lose-streams` or `slow`; *value* has
        seconds of a freeze, the factor of slow steps, or the number of pulls or streams that fail.
        """
        if replicas is not None and replica_name() not in replicas:
            return
        if kind == "exit":
            os._exit(1)
        elif kind == "die":
            self._engine.fail()
        elif kind == "freeze":
            self._engine.freeze(value)
        elif kind == "slow":
            self._engine.step.factor = value
        elif kind == "lose-streams":
            self._simulated.lose_next = int(value)
        elif kind == "fail-pulls" and self._source is not None:
            self._source.fail_next = int(value)
        else:
            raise ValueError(f"no fault {kind} here")


def _at_rank(rank: int, method: Method) -> Method:
    async def at_rank(call: ServedCall, **arguments: Any) -> object:  # noqa: ANN401
        RANK.set(rank)
        return await method(call, **arguments)

    return at_rank


class SimulatedPrefillServer(PrefillRole, SimulatedServer):
    """A simulated prefill engine."""

    def called(self) -> dict[str, Method]:
        """Return what may be called through a channel, by name."""
        return super().called() | {"fetch": whole(self.fetch)}

    async def prefill(self, kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """Compute a prompt as `PrefillRole.prefill` does; decode fetches its KV cache here."""
        await self.routed()
        computed = await super().prefill(kind, body)
        if isinstance(computed, Prefilled):
            place = {**computed.kv_transfer_params, "place": self.listeners[0].place}
            computed = replace(computed, kv_transfer_params=place)
        return computed

    async def time_prefill(self, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """Time a prompt as `PrefillRole.time_prefill` does, and what is on the way to here."""
        await self.routed()
        return await super().time_prefill(body)

    async def fetch(self, key: str, start_in_s: float) -> list[float]:
        """Agree on a pull of the KV cache of *key*; return the fields of `AgreedPull`."""
        assert self._source is not None  # noqa: S101  (a prefill engine has one)
        try:
            agreed = self._source.fetch(key, start_in_s)
        except KvLost as error:
            raise EngineFailed(f"the KV cache {error} is not here") from None
        return [agreed.held_s, agreed.arrives_s]

    async def __del__(self) -> None:
        """Drain; Ray Serve awaits this once a replica that ends has no requests of its own."""
        await self.drain()


class SimulatedAnswerServer(AnswerRole, SimulatedServer):
    """A simulated decode engine, or the simulated mixed engine of an aggregated plan."""

    async def __init__(self, settings: SimulatedSettings) -> None:  # type: ignore[misc]
        """Start, ready to pull from prefill replicas."""
        self._prefill: dict[str, Channel] = {}
        await super().__init__(settings)
        if settings.role == "decode":
            self._simulated.pull_by(KvSink(self._engine, self._fetch))

    async def events(
        self, kind: str, body: dict[str, Any], prefill: PromptPath
    ) -> AsyncGenerator[Any, None]:
        """Compute an answer as `AnswerRole.events` does."""
        if prefill.prefilled is None:
            await self.routed()
        async with aclosing(super().events(kind, body, prefill)) as items:
            async for item in items:
                yield item

    async def _fetch(self, place: Mapping[str, Any], start_in_s: float) -> AgreedPull:
        source = message_in(place["place"])
        channel = self._prefill.get(source.secret)
        if channel is None or channel.closed:
            self._prefill = {of: kept for of, kept in self._prefill.items() if not kept.closed}
            tls = channel_tls(os.environ, listens=False)
            channel = self._prefill[source.secret] = Channel(source, tls)
        arguments = {"key": place["key"], "start_in_s": start_in_s}
        async with asyncio.timeout(FETCH_LIMIT_S):
            held_s, arrives_s = await channel.call("fetch", arguments).result
        return AgreedPull(held_s=held_s, arrives_s=arrives_s)

    async def __del__(self) -> None:
        """Drain, as a prefill server does."""
        await self.drain()
