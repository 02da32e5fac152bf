"""An endpoint in one process, on its own clock: simulated engines whose step times are drawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minicluster.engine_model.planned_limits import planned_limits
from minicluster.engine_model.true_steps import TrueSteps
from minicluster.plan import Deployment
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.engine_steps import EngineStep
from serving.measurement.step_benchmark import TimedStream
from serving.simulated.engine import EngineClock, Sequence, SimulatedEngine
from serving.simulated.kv_transfer import AgreedPull, KvSink, KvSource

LEASE_S = 1e6


@dataclass(slots=True)
class Answer(TimedStream):
    """A streamed answer; `prefilled_s` is when its prompt was computed."""

    prefilled_s: float = 0.0


class ForeignEndpoint:
    """One prefill and one decode engine, and the path between them, as `TimingClient` has it."""

    def __init__(self, deployment: Deployment, truth: TrueSteps) -> None:
        clock = EngineClock(1.0)
        self._prefill, self._decode = (
            SimulatedEngine(
                planned_limits(deployment, deployment.pool(role)),
                truth.step(role),
                clock,
                prefill_only=role == "prefill",
                keeps_steps=True,
            )
            for role in ("prefill", "decode")
        )
        self._path = truth.steps.path
        self._source = KvSource(self._prefill, self._path)
        self._sink = KvSink(self._decode, self._fetch)

    async def prefill(self, input_tokens: int) -> float:
        """Compute a prompt; return its seconds."""
        begin_s = time.monotonic()
        self._prefill.release(await self._computed(input_tokens))
        return time.monotonic() - begin_s

    async def stream(
        self, input_tokens: int, output_tokens: int, into: TimedStream | None = None
    ) -> TimedStream:
        """Answer a request; *into* has the time of each token."""
        stream = into or TimedStream()
        stream.sent_s = time.monotonic()
        computed = await self._computed(input_tokens)
        if isinstance(stream, Answer):
            stream.prefilled_s = time.monotonic()
        place = {"key": self._source.keep(computed, LEASE_S)}
        answer = self._sink.add(input_tokens, (), output_tokens, place)
        try:
            while stream.tokens < output_tokens:
                tokens = await answer.more_than(stream.tokens)
                stream.stamps.append((time.monotonic(), tokens))
                stream.started.set()
        finally:
            self._decode.abort(answer)
        return stream

    async def load(self, arrivals: Arrivals) -> list[Answer]:
        """Send requests as they are due; return their times."""
        begin_s = time.monotonic()

        async def send(due_s: float, input_tokens: int, output_tokens: int) -> Answer:
            await asyncio.sleep(begin_s + due_s - time.monotonic())
            answer = Answer()
            await self.stream(input_tokens, output_tokens, answer)
            return answer

        columns = (arrivals.due_s, arrivals.input_tokens, arrivals.output_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return await asyncio.gather(*(send(*row) for row in rows))

    @property
    def steps(self) -> dict[str, tuple[EngineStep, ...]]:
        """Steps of both engines so far, in seconds of the clock."""
        engines = {"prefill": self._prefill, "decode": self._decode}
        return {role: tuple(engine.steps or ()) for role, engine in engines.items()}

    async def _computed(self, input_tokens: int) -> Sequence:
        await asyncio.sleep(self._path.request_s)
        computed = self._prefill.add(input_tokens, (), 1)
        await computed.more_than(0)
        return computed

    async def _fetch(self, place: Mapping[str, Any], start_in_s: float) -> AgreedPull:
        return self._source.fetch(place["key"], start_in_s)
