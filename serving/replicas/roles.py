"""The servers of the pools by role, with any engine: prefill, and answering."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import serve

from serving.cluster.serve_compat import call_replicas, live_replica_ids
from serving.cluster.token import channel_tls
from serving.protocol.messages import (
    EngineFailed,
    FirstChunk,
    PrefillTiming,
    PromptPath,
    Refusal,
    RequestPhases,
    from_plain,
    late,
    message_in,
)
from serving.replicas.channels import CallListener, whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from serving.protocol.messages import ChannelPlace, Prefilled
    from serving.replicas.channels import Method, ServedCall


class AnswerEngine(Protocol):
    """
    One engine.

    Its requests have attributes `request_id` and `stream`, and are passed on as they are.
    """

    def read(self, kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return the request of *kind* (`chat` or `completions`), or the refusal of the body."""

    async def prompt_tokens(self, request: Any) -> int | None:  # noqa: ANN401
        """Return the tokens of a prompt; `None`: the engine refuses it."""

    def for_decode(self, request: Any, prefilled: Prefilled) -> Any:  # noqa: ANN401
        """Return the request with the place of its KV cache."""

    def answer(self, request: Any) -> AsyncGenerator[Refusal | list[str] | dict[str, Any], None]:  # noqa: ANN401
        """
        Answer; closing the iterator ends the request.

        Yields server-sent events as they come, or the whole answer; a refusal is the last item.
        """

    def first_token_seen(self, request: Any) -> bool:  # noqa: ANN401
        """Return whether a request that is answered in one piece has its first token."""

    def pull_failed(self, request: Any) -> bool:  # noqa: ANN401
        """
        Return whether a request with a first token had its prompt computed here after all.

        Its KV cache was lost on its way.
        """

    async def compute(self, request: Any, *, keep: bool) -> Prefilled | Refusal:  # noqa: ANN401
        """
        Compute the KV cache of a request's prompt, and one token that is dropped.

        It is kept for another engine to fetch if *keep*; raises EngineFailed.
        """

    def died(self) -> bool:
        """Return whether the engine is lost; it is never restarted."""

    async def kv_is_free(self) -> bool:
        """Return whether no request holds KV cache; drops the prefix cache of earlier ones."""

    async def steps(self, begin_unix_s: float, end_unix_s: float) -> list[list[float]]:
        """Return the steps that ended in an interval, as `EngineStep`s; none of simulated ones."""

    def facts(self) -> dict[str, Any]:
        """Return the settings that a plan decides, asked of the engine."""


USAGE = '"choices":[]'
"""Occurs only in the event that holds the usage; the engine writes JSON without blanks."""

DONE = "data: [DONE]"


def with_usage(body: dict[str, Any]) -> dict[str, Any]:
    """
    Ask the engine to report the token counts at the end of a stream.

    Returns *body* itself if it is no stream, or its client asks for them already.
    """
    options = body.get("stream_options") or {}
    if body.get("stream") is not True or not isinstance(options, dict):
        return body
    if options.get("include_usage"):
        return body
    return {**body, "stream_options": {**options, "include_usage": True}}


@dataclass(slots=True)
class EventSplitter:
    """
    Splits the events of one answer into those with tokens and those that end it.

    Attributes:
        keeps_usage: whether the client gets the event with the usage.
        usage: token counts of the engine; `None` until it reports them.
        ending: events without a token so far, which the client gets at the end.
    """

    keeps_usage: bool
    usage: dict[str, Any] | None = None
    ending: str = ""

    def tokens(self, events: list[str]) -> str:
        """Return the events with tokens as one text, and keep the others."""
        text = "".join(events)
        if USAGE not in text and DONE not in text:
            return text
        with_tokens = []
        for event in text.split("\n\n"):
            if event.startswith(DONE):
                self.ending += f"{event}\n\n"
            elif USAGE in event and event.startswith("data: {"):
                self.usage = json.loads(event[6:]).get("usage")
                if self.keeps_usage:
                    self.ending += f"{event}\n\n"
            elif event:
                with_tokens.append(f"{event}\n\n")
        return "".join(with_tokens)


logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Interval at which a replica checks that its engine is alive."""

EXIT_DELAY_S = 1.0
"""Time that a replica without an engine has to answer its clients before it exits."""

FETCH_POLL_S = 0.2
"""Interval at which a draining prefill replica checks whether its KV caches have been fetched."""

STUCK_S = 120.0
"""
Age at which a KV transfer counts as lost. NIXL waits for ever, and only a new engine frees the
blocks.
"""

POLL_S = 0.01
"""Interval at which an engine is asked for the first token of an answer in one piece."""

PROBE = PromptPath(reason="probe")

PROBE_POLL_S = 0.1
"""Interval at which a probe looks whether the prefill replicas are known."""


class EngineServer:
    """
    The common part of the servers of all roles.

    Ray Serve calls `reconfigure` with the endpoint's configuration
    (`serving.protocol.messages`) when a replica has started, and again when another plan is
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


def replica_name() -> str:
    """Return Ray Serve's name of this replica."""
    return str(serve.get_replica_context().replica_id.unique_id)


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
        """Compute a prompt, and keep its KV cache for decode; raises EngineFailed."""
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal):
            return request
        computed = await self.answers.compute(request, keep=True)
        self._kept_until_s = time.monotonic() + self._kv_deadline_s
        if isinstance(computed, Refusal):
            return computed
        return replace(computed, replica=replica_name())

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


class PendingAnswer:
    """
    An engine's answer, from its start.

    While blocks of its KV cache are in flight a request must not be aborted: that can stop the
    engine (vllm #43226), and the blocks that still arrive would overwrite those of other requests.
    Such a request runs to its first token and is closed then; all others are closed at once.
    """

    def __init__(
        self,
        stream: AsyncGenerator[Any, None],
        *,
        has_first_token: Callable[[], bool] | None,
        in_flight: bool,
    ) -> None:
        """
        Start an engine's *stream*, whose KV cache may be *in_flight* from another replica.

        *has_first_token* says so of an answer in one piece; `None`: it is streamed.
        """
        self.stream = stream
        self._has_first_token = has_first_token
        self._in_flight = in_flight
        self._first = asyncio.ensure_future(anext(stream))
        self._started = time.monotonic()

    @property
    def stuck(self) -> bool:
        """Whether its KV cache counts as lost."""
        waited_s = time.monotonic() - self._started
        return self._in_flight and waited_s > STUCK_S and not self._started_answering()

    async def first_token(self, limit_s: float) -> None:
        """
        Wait for the first token or an error.

        Raises:
            TimeoutError: neither came in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while not self._started_answering():
            left_s = end - loop.time()
            if left_s <= 0:
                raise TimeoutError
            await self._poll(left_s)

    async def first_item(self) -> Any:  # noqa: ANN401
        """Return the first event, or the whole answer; raises what the engine raised."""
        return await self._first

    async def close(self) -> None:
        """End the engine's request as soon as that is safe; may take until its first token."""
        while self._in_flight and not self._started_answering():
            await self._poll(None)
        if not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        if not self._first.cancelled():
            self._first.exception()  # retrieved, so that asyncio does not warn
        await self.stream.aclose()

    def _started_answering(self) -> bool:
        seen = self._has_first_token
        return self._first.done() or (seen is not None and seen())

    async def _poll(self, left_s: float | None) -> None:
        poll_s = left_s if self._has_first_token is None else min(POLL_S, left_s or POLL_S)
        await asyncio.wait({self._first}, timeout=poll_s)


class AnswerRole(EngineServer):
    """Answers requests: the decode engine of a split plan, or the mixed one of another."""

    def called(self) -> dict[str, Method]:
        """Return what may be called through a channel, by name."""
        counts = whole(self.prompt_tokens)
        return super().called() | {"answer": self.answer, "prompt_tokens": counts}

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take the deadlines from the plan."""
        self._config = from_plain(config)

    async def answer(
        self, call: ServedCall, kind: str, body: dict[str, Any], prefill: dict[str, Any]
    ) -> Refusal | FirstChunk | None:
        """
        Answer a checked request; *prefill*, a message, says where its prompt was computed.

        *call* gets the phases with the first events of a stream, then the others as they come.

        Returns:
            A refusal, or the phases with the whole answer; `None`: it was streamed.

        Raises:
            EngineFailed: the engine failed, usually after the first token.
        """
        counted = with_usage(body)
        async with aclosing(self.events(kind, counted, message_in(prefill))) as items:
            begun = await anext(items)
            if isinstance(begun, Refusal):
                return begun
            phases, first = begun
            if not isinstance(first, list):
                return FirstChunk(phases=phases, first=first)
            splitter = EventSplitter(keeps_usage=counted is body)
            call.begin(FirstChunk(phases=phases, first=splitter.tokens(first)))
            async for events in items:
                call.events(splitter.tokens(events).encode())
                if call.must_wait:
                    await call.room()
            call.end(usage=splitter.usage, text=splitter.ending)
            return None

    async def events(
        self, kind: str, body: dict[str, Any], prefill: PromptPath
    ) -> AsyncGenerator[Any, None]:
        """
        Compute the answer of a request; errors as of `answer`, whose arguments these are.

        Yields:
            A refusal; or the phases with the whole answer or with the first events of a stream,
            and then lists of events as they come.
        """
        request = self._engine_request(kind, body, prefill)
        if isinstance(request, Refusal):
            yield request
            return
        seen = partial(self.answers.first_token_seen, request)
        answer = PendingAnswer(
            self.answers.answer(request),
            has_first_token=None if request.stream else seen,
            in_flight=prefill.prefilled is not None,
        )
        try:
            started = time.perf_counter()
            try:
                await answer.first_token(self._first_token_limit_s(body, prefill))
            except TimeoutError:
                yield late("kv-wait-timeout", self._config.kv_wait_deadline_s)
                return
            first_token_s = time.perf_counter() - started
            first = await answer.first_item()
            if isinstance(first, Refusal):
                yield first
                return
            lost = self.answers.pull_failed(request)
            yield prefill.phases(first_token_s, replica_name(), lost=lost), first
            async for item in answer.stream:
                if isinstance(item, Refusal):
                    raise EngineFailed(item.message)  # noqa: TRY301  (closed as any failure)
                yield item
        except EngineFailed:
            raise
        except Exception as error:
            # An exception of vLLM's must not leave this process: unpickling it would import vLLM
            # in the endpoint, which then answers nothing for seconds and takes half a gigabyte.
            raise EngineFailed(repr(error)) from error
        finally:
            # In a task of its own, because this one may be cancelled.
            closing = asyncio.create_task(answer.close())
            self._closing[closing] = answer
            closing.add_done_callback(self._closing.pop)

    def _engine_request(self, kind: str, body: dict[str, Any], prefill: PromptPath) -> Any:  # noqa: ANN401
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal) or prefill.prefilled is None:
            return request
        return self.answers.for_decode(request, prefill.prefilled)

    def _first_token_limit_s(self, body: dict[str, Any], prefill: PromptPath) -> float:
        config = self._config
        if prefill.prefilled is not None:
            return config.kv_wait_deadline_s
        if body.get("use_beam_search"):
            return math.inf  # its first token is its last: the endpoint's limit applies
        return config.prefill_deadline_s + config.kv_wait_deadline_s - prefill.seconds

    async def prompt_tokens(self, kind: str, body: dict[str, Any]) -> int | None:
        """Return the tokens of a request's prompt; `None`: the engine refuses the request."""
        request = self.answers.read(kind, body)
        if isinstance(request, Refusal):
            return None
        return await self.answers.prompt_tokens(request)

    async def probe(self, prompts: list[list[int]], prefill: Sequence[Any]) -> list[RequestPhases]:
        """
        Run one prompt through each prefill replica (handles of their pools) and this one.

        The prompts differ, because a cached one is not fetched; without prefill there is one.

        Raises:
            RuntimeError: a replica refused its prompt.
        """
        bodies = [{"prompt": prompt, "max_tokens": 2} for prompt in prompts]
        waiting = iter(bodies)
        started = time.perf_counter()
        places: list[PromptPath] = []
        for handle in prefill:
            while live_replica_ids(handle) is None:  # noqa: ASYNC110  (there is no event for it)
                await asyncio.sleep(PROBE_POLL_S)
            calls = call_replicas(handle, "prefill", lambda: ["completions", next(waiting)])
            answers = await asyncio.gather(*calls)
            failed = [pair for pair in answers if isinstance(pair, Refusal)]
            if failed:
                raise RuntimeError(f"a prefill replica refused its probe: {failed[0].message}")
            seconds = time.perf_counter() - started
            places += [
                PromptPath(path="remote", prefilled=answer, seconds=seconds) for answer in answers
            ]
        places = places or [PROBE]
        if len(places) != len(bodies):
            raise RuntimeError(f"{len(places)} of {len(bodies)} prefill replicas answered")
        return [await self._probed(*pair) for pair in zip(bodies, places, strict=True)]

    async def _probed(self, body: dict[str, Any], prefill: PromptPath) -> RequestPhases:
        """Return the phases of a whole answer; all of it counts as its first token."""
        request = self._engine_request("completions", body, prefill)
        if isinstance(request, Refusal):
            raise RuntimeError(request.message)  # noqa: TRY004  (an answer, not a wrong argument)
        started = time.perf_counter()
        answer = await anext(self.answers.answer(request))
        if isinstance(answer, Refusal):
            raise RuntimeError(answer.message)  # noqa: TRY004
        return prefill.phases(time.perf_counter() - started, replica_name())

    async def check_health(self) -> None:
        """Fail Ray Serve's health check, which replaces this replica, if KV transfers are lost."""
        stuck = sum(answer.stuck for answer in self._closing.values())
        if stuck:
            raise RuntimeError(f"{stuck} KV transfers do not end; only a new engine frees them")
        await super().check_health()  # type: ignore[misc]
