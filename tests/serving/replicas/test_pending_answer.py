"""Waiting for a first token, and giving an answer up, on streams of the test."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from serving.replicas.pending_answer import PendingAnswer
from tests.serving.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Engine:
    """A stream that yields when told, and notes how it ended."""

    def __init__(self) -> None:
        """Wait for the word."""
        self.go = asyncio.Event()
        self.ended = ""

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield two tokens, the first when told."""
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


def test_the_first_token_is_waited_for() -> None:
    """A stream has begun with its first item, and nothing of it is lost."""

    async def wait() -> list[str]:
        engine = Engine()
        answer = PendingAnswer(engine.stream(), has_first_token=None, in_flight=True)
        asyncio.get_running_loop().call_later(0.02, engine.go.set)
        await answer.first_token(5.0)
        return [await answer.first_item(), *[item async for item in answer.stream]]

    assert run(wait()) == ["one", "two"]


def test_a_late_first_token_is_reported() -> None:
    """After the limit TimeoutError is raised and the engine still works on the request."""

    async def wait() -> str:
        engine = Engine()
        answer = PendingAnswer(engine.stream(), has_first_token=None, in_flight=True)
        with pytest.raises(TimeoutError):
            await answer.first_token(0.02)
        return engine.ended

    assert run(wait()) == ""


def test_an_answer_as_a_whole_has_begun_before_it_is_there() -> None:
    """The first token of a whole answer counts, not its end."""

    async def wait() -> str:
        engine = Engine()
        begun = asyncio.Event()
        answer = PendingAnswer(engine.stream(), has_first_token=begun.is_set, in_flight=True)
        asyncio.get_running_loop().call_later(0.02, begun.set)
        await answer.first_token(5.0)
        return engine.ended

    assert run(wait()) == ""


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_in_flight_is_given_up(*, whole: bool) -> None:
    """While a KV cache is in flight the engine's request lives on; then it is ended."""

    async def leave() -> tuple[str, str]:
        engine = Engine()
        begun = asyncio.Event()
        answer = PendingAnswer(
            engine.stream(), has_first_token=begun.is_set if whole else None, in_flight=True
        )
        closing = asyncio.create_task(answer.close())
        await asyncio.sleep(0.05)
        before = engine.ended
        (begun if whole else engine.go).set()
        await closing
        return before, engine.ended

    assert run(leave()) == ("", "cancelled" if whole else "closed")


def test_without_a_transfer_it_ends_at_once() -> None:
    """A request whose prompt is computed where it is answered is ended wherever it is."""

    async def leave() -> str:
        engine = Engine()
        answer = PendingAnswer(engine.stream(), has_first_token=None, in_flight=False)
        await asyncio.sleep(0)
        await answer.close()
        return engine.ended

    assert run(leave()) == "cancelled"


def test_a_stream_is_closed_midway() -> None:
    """After its first token a stream is closed where it stands."""

    async def leave() -> str:
        engine = Engine()
        engine.go.set()
        answer = PendingAnswer(engine.stream(), has_first_token=None, in_flight=True)
        await answer.first_token(5.0)
        await answer.close()
        return engine.ended

    assert run(leave()) == "closed"


def test_what_never_arrives_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is stuck if its KV cache is on its way for longer than any takes."""

    async def look() -> tuple[bool, bool, bool, bool]:
        engine = Engine()
        answer = PendingAnswer(engine.stream(), has_first_token=None, in_flight=True)
        local = PendingAnswer(Engine().stream(), has_first_token=None, in_flight=False)
        before = answer.stuck
        monkeypatch.setattr("serving.replicas.pending_answer.STUCK_S", -1.0)
        during = answer.stuck
        engine.go.set()
        await answer.first_token(5.0)
        return before, during, answer.stuck, local.stuck

    assert run(look()) == (False, True, False, False)
