"""Waiting for a first token, and giving an answer up, on streams of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from serving.replicas.roles import PendingAnswer
from tests.serving.virtual_time import run


class Engine:
    """An engine's answer that yields when told, and notes how it ended."""

    def __init__(self, *, whole: bool = False, in_flight: bool = True) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.ended = ""
        seen = self.begun.is_set if whole else None
        self.answer = PendingAnswer(self._stream(), has_first_token=seen, in_flight=in_flight)

    async def _stream(self) -> AsyncGenerator[str, None]:
        try:
            await self.go.wait()
            yield "one"
            yield "two"
            self.ended = "finished"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        except GeneratorExit:
            self.ended = "closed"
            raise


@pytest.mark.parametrize("whole", [False, True])
def test_the_first_token_is_waited_for(*, whole: bool) -> None:
    """It may be late; then nothing of the answer is lost. Of a whole one not the end counts."""

    async def wait() -> tuple[str, list[str]]:
        engine = Engine(whole=whole)
        with pytest.raises(TimeoutError):
            await engine.answer.first_token(0.02)
        (engine.begun if whole else engine.go).set()
        await engine.answer.first_token(5.0)
        before = engine.ended
        engine.go.set()
        first = await engine.answer.first_item()
        return before, [first, *[item async for item in engine.answer.stream]]

    assert run(wait()) == ("", ["one", "two"])


@pytest.mark.parametrize(
    ("in_flight", "whole", "ended"),
    [(True, False, "closed"), (True, True, "cancelled"), (False, False, "cancelled")],
)
def test_nothing_in_flight_is_given_up(*, in_flight: bool, whole: bool, ended: str) -> None:
    """While a KV cache is in flight the engine's request lives on; all others end at once."""

    async def leave() -> tuple[str, str]:
        engine = Engine(whole=whole, in_flight=in_flight)
        closing = asyncio.create_task(engine.answer.close())
        await asyncio.sleep(0.05)
        before = engine.ended
        (engine.begun if whole else engine.go).set()
        await closing
        return before, engine.ended

    assert run(leave()) == ("" if in_flight else ended, ended)


def test_what_never_arrives_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is stuck if its KV cache is on its way for longer than any takes."""

    async def look() -> tuple[bool, bool, bool, bool]:
        engine, local = Engine(), Engine(in_flight=False)
        before = engine.answer.stuck
        monkeypatch.setattr("serving.replicas.roles.STUCK_S", -1.0)
        during = engine.answer.stuck
        engine.go.set()
        await engine.answer.first_token(5.0)
        return before, during, engine.answer.stuck, local.answer.stuck

    assert run(look()) == (False, True, False, False)
