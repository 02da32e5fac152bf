"""The servers of the pools by role, with any engine: what is common to all, and prefill."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from serving.cluster.token import channel_tls
from serving.protocol.endpoint_config import from_plain
from serving.protocol.messages import PrefillTiming, Refusal
from serving.replicas.call_listener import CallListener, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.protocol.answer_engine import AnswerEngine
    from serving.protocol.messages import ChannelPlace, Prefilled
    from serving.replicas.call_listener import Method
    from serving.replicas.pending_answer import PendingAnswer

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Interval at which a replica checks that its engine is alive."""

EXIT_DELAY_S = 1.0
"""Time that a replica without an engine has to answer its clients before it exits."""

FETCH_POLL_S = 0.2
"""Interval at which a draining prefill replica checks whether its KV caches have been fetched."""


class EngineServer:
    """
    The common part of the servers of all roles.

    Ray Serve calls `reconfigure` with the endpoint's configuration
    (`serving.protocol.endpoint_config`) when a replica has started, and again when another plan is
    deployed over the same engines.
    """

    answers: AnswerEngine
    listeners: Sequence[CallListener]

    async def begin(self) -> None:
        """Begin to watch the engine, and to listen for calls."""
        self._closing: dict[asyncio.Task[None], PendingAnswer] = {}
        self._watch = asyncio.create_task(self._exit_with_engine())
        self.listeners = self.made_listeners()
        tls = channel_tls(os.environ, listens=True)
        for listener in self.listeners:
            await listener.listen(ray.util.get_node_ip_address(), tls)

    def made_listeners(self) -> Sequence[CallListener]:
        """Return what will take calls: one listener for each engine of this replica."""
        gang = serve.get_replica_context().gang_context
        return [CallListener(self.called(), group=None if gang is None else gang.gang_id)]

    def called(self) -> dict[str, Method]:
        """Return what may be called through a channel, by name."""
        return {"facts": whole(self.facts), "steps": whole(self.steps)}

    async def channel_places(self) -> list[ChannelPlace]:
        """Return where each engine of this replica takes calls; it is called through Ray."""
        return [listener.place for listener in self.listeners]

    async def drain(self) -> None:
        """Wait until the calls under way have ended, of which Ray Serve does not know."""
        await asyncio.gather(*(listener.drain() for listener in self.listeners))

    async def _exit_with_engine(self) -> None:
        """
        Exit this process when its engine has died.

        Ray Serve would notice after three failed health checks and send it requests until then,
        more than its share, because it fails them at once.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if self.answers.died():
                logger.error("the engine died; this replica exits, Ray Serve starts another")
                await asyncio.sleep(EXIT_DELAY_S)
                os._exit(1)

    async def facts(self) -> dict[str, Any]:
        """Return the settings of this replica's engine, asked of the engine itself."""
        return self.answers.facts()

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> list[list[float]]:
        """Return the steps of this replica's engine that ended in an interval."""
        return await self.answers.steps(begin_unix_s, end_unix_s)

    async def kv_is_free(self) -> bool:
        """Return whether no request holds KV cache; drops the prefix cache of earlier ones."""
        return await self.answers.kv_is_free()


class PrefillRole(EngineServer):
    """Computes prompts, and keeps their KV caches until decode has fetched them."""

    _kept_until_s = 0.0

    def called(self) -> dict[str, Method]:
        """Return what may be called through a channel, by name."""
        prefills = {"prefill": whole(self.prefill), "time_prefill": whole(self.time_prefill)}
        return super().called() | prefills

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take from the plan the deadline until which decode may fetch a KV cache."""
        self._kv_deadline_s = from_plain(config).kv_wait_deadline_s

    async def drain(self) -> None:
        """
        Wait until the last KV cache has been fetched, or its deadline has passed.

        A prefilled prompt has no request here any more, while decode still fetches its KV cache.
        """
        await super().drain()
        while time.monotonic() < self._kept_until_s:
            if await self.kv_is_free():
                break
            await asyncio.sleep(FETCH_POLL_S)

    async def prefill(self, kind: str, body: dict[str, Any]) -> Prefilled | Refusal:
        """
        Compute the KV cache of a prompt and keep it until decode has fetched it.

        Args:
            kind: `chat` or `completions`.
            body: a request that `serving.request.validation.check` accepted.

        Raises:
            EngineFailed: the engine failed.
        """
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal):
            return request
        computed = await self.answers.compute(request, keep=True)
        self._kept_until_s = time.monotonic() + self._kv_deadline_s
        if isinstance(computed, Refusal):
            return computed
        return replace(computed, replica=serve.get_replica_context().replica_id.unique_id)

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a completion's prompt without handing its KV cache on, and time it."""
        started = time.perf_counter()
        request = self.answers.read("completions", body)
        if isinstance(request, Refusal):
            return request
        computed = await self.answers.compute(request, keep=False)
        if isinstance(computed, Refusal):
            return computed
        return PrefillTiming(
            prompt_tokens=computed.prompt_tokens,
            seconds=time.perf_counter() - started,
            queue_s=computed.queue_s,
            step_s=computed.step_s,
        )
