from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from serving.api.readiness import CachedValue
from tests.serving.virtual_time import run

if TYPE_CHECKING:
    from collections.abc import Callable


def _asking(*answers: object) -> tuple[Callable[[], Any], list[object]]:
    """Return what gives these answers in turn, waiting for futures, and what it has given."""
    waiting = list(answers)
    given: list[object] = []

    async def ask() -> Any:  # noqa: ANN401
        answer = waiting.pop(0)
        given.append(answer)
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, asyncio.Future) else answer

    return ask, given


def test_a_good_value_is_not_asked_for_again() -> None:
    """However many want it, at once or later, one question is enough."""
    ask, given = _asking(1, 2)

    async def ask_on() -> list[int]:
        value = CachedValue(ask, initial=0, max_age_s=60.0)
        return [*await asyncio.gather(value.get(), value.get()), await value.get()]

    assert run(ask_on()) == [1, 1, 1]
    assert given == [1]


def test_an_old_value_is_asked_for_again() -> None:
    """A stale value is refreshed first, if that is quick."""
    ask, _ = _asking(1, 2)

    async def ask_on() -> list[int]:
        value = CachedValue(ask, initial=0, max_age_s=-1.0)
        return [await value.get(), await value.get()]

    assert run(ask_on()) == [1, 2]


def test_a_refresh_that_hangs_blocks_no_reader() -> None:
    """The last value has to do meanwhile; it is not asked twice, and its answer counts late."""

    async def ask_on() -> None:
        late: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ask, given = _asking(1, late, 3)
        value = CachedValue(ask, initial=0, max_age_s=-1.0)
        assert [await value.get() for _ in range(4)] == [1] * 4
        assert given == [1, late]
        late.set_result(2)
        assert await value.get() == 2

    run(ask_on())


def test_a_question_that_fails_leaves_the_last_value() -> None:
    """After a failure the value is what it was before, or what it started with."""
    ask, given = _asking(OSError(), 1, OSError())

    async def ask_on() -> list[int]:
        value = CachedValue(ask, initial=0, max_age_s=-1.0)
        return [await value.get() for _ in range(3)]

    assert run(ask_on()) == [0, 1, 1]
    assert len(given) == 3


def test_a_cancelled_reader_does_not_end_the_refresh() -> None:
    """A scrape that is given up has still asked."""

    async def ask_on() -> int:
        late: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        value = CachedValue(_asking(late)[0], initial=0, max_age_s=60.0)
        scrape = asyncio.create_task(value.get())
        await asyncio.sleep(0.001)
        scrape.cancel()
        await asyncio.wait({scrape})
        late.set_result(1)
        return await value.get()

    assert run(ask_on()) == 1
