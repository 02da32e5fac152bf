"""The servers of the pools with simulated engines. This module must not import torch or vLLM."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray import serve

from minicluster.engine_model.step_seconds import PlannedStep
from serving.cluster.serve_compat import DIRECT_CALLS, keep_log_open, live_replica_ids
from serving.protocol.messages import LocalPrefill
from serving.replicas.generation import AnswerRole
from serving.replicas.roles import EngineServer, PrefillRole
from serving.simulated.answering import SimulatedAnswers
from serving.simulated.clock import EngineClock
from serving.simulated.engine import SimulatedEngine
from serving.simulated.gang import join_gang
from serving.simulated.kv_transfer import AgreedPull, KvLost, KvSink, KvSource
from serving.simulated.request import AnswerRules, read_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping

    from serving.protocol.app_spec import SimulatedSettings
    from serving.protocol.messages import RemotePrefill

FETCH_LIMIT_S = 5.0
"""Longest wait for the word of a prefill replica; after it its KV cache counts as lost."""


class SimulatedServer(EngineServer):
    """A simulated engine."""

    _source: KvSource | None = None

    async def __init__(self, settings: SimulatedSettings) -> None:  # type: ignore[misc]
        """Start the engine."""
        keep_log_open()
        self._settings = settings
        context = serve.get_replica_context()
        gang = context.gang_context
        self._engine = SimulatedEngine(
            settings.limits,
            PlannedStep(settings.step),
            EngineClock(settings.slowdown),
            prefill_only=settings.role == "prefill",
            lanes=settings.lanes,
            group=gang and await join_gang(gang.gang_id, gang.rank, gang.world_size),
            lora=settings.lora,
        )
        if settings.role == "prefill":
            self._source = KvSource(self._engine, settings.path)
        labels = settings.places[context.rank.rank % len(settings.places)]
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
            domain=settings.domain,
            lease_s=settings.lease_s,
        )
        await self.begin()

    async def check_health(self) -> None:
        """Pass: an engine that died ends this process."""

    async def routed(self) -> None:
        """Wait as long as the plan says that routing a request takes."""
        path = self._settings.path
        seconds = path.request_s + path.request_spread_s
        await asyncio.sleep(seconds * self._settings.slowdown)

    async def inside(self) -> dict[str, Any]:
        """Return name, process and gang of this replica, and what its engine has inside."""
        gang = serve.get_replica_context().gang_context
        named = {"replica": _name(), "pid": os.getpid(), "gang": gang and gang.gang_id}
        return named | asdict(self._engine.load())

    async def fault(
        self, kind: str, value: float = 1.0, *, replicas: Collection[str] | None = None
    ) -> None:
        """
        Let something go wrong; for tests of what then happens.

        Args:
            kind: `die`, `exit`, `fail-pulls`, `freeze`, `lose-streams` or `slow`.
            value: seconds of a freeze, the factor of slow steps (1: as planned), or the number of
                pulls that fail and streams that break after their first token.
            replicas: names of those that it is for, where all are called; `None`: this one.
        """
        if replicas is not None and _name() not in replicas:
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


def _name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


class SimulatedPrefillServer(PrefillRole, SimulatedServer):
    """A simulated prefill engine."""

    async def prefill(self, kind: str, body: dict[str, Any], *, tried: object = None) -> Any:  # noqa: ANN401
        """Compute a prompt as `PrefillRole.prefill` does."""
        await self.routed()
        return await super().prefill(kind, body, tried=tried)

    async def fetch(self, key: str, start_in_s: float, *, only: str) -> AgreedPull:  # noqa: ARG002
        """Agree on a pull of the KV cache of *key*; the router reads *only*: this replica."""
        assert self._source is not None  # noqa: S101  (a prefill engine has one)
        return self._source.fetch(key, start_in_s)

    async def __del__(self) -> None:
        """Drain; Ray Serve awaits this once a replica that ends has no requests."""
        await self.drain()


class SimulatedAnswerServer(AnswerRole, SimulatedServer):
    """A simulated decode engine, or the simulated mixed engine of an aggregated plan."""

    async def __init__(  # type: ignore[misc]
        self, settings: SimulatedSettings, *, prefill: Mapping[str, Any]
    ) -> None:
        """Keep the handles of the prefill pools by domain, to pull from; then start."""
        self._prefill = prefill
        await super().__init__(settings)
        if prefill:
            self._simulated.pull_by(KvSink(self._engine, self._fetch))

    async def events(
        self, kind: str, body: dict[str, Any], prefill: RemotePrefill | LocalPrefill
    ) -> AsyncGenerator[Any, None]:
        """Compute an answer as `AnswerRole.events` does."""
        if isinstance(prefill, LocalPrefill):
            await self.routed()
        async with aclosing(super().events(kind, body, prefill)) as items:
            async for item in items:
                yield item

    async def _fetch(self, place: Mapping[str, Any], start_in_s: float) -> AgreedPull:
        handle = self._prefill[place["domain"]].options(**DIRECT_CALLS)
        known = live_replica_ids(handle)
        if known is not None and place["replica"] not in known:
            raise KvLost(place["key"])
        response = handle.fetch.remote(place["key"], start_in_s, only=place["replica"])
        try:
            async with asyncio.timeout(FETCH_LIMIT_S):
                transfer: AgreedPull = await response
        except BaseException:
            response.cancel()
            raise
        return transfer
