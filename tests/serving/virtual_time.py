"""Time that passes only while nothing else is left to do: what takes hours takes no time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import ParamSpec, TypeVar
from unittest.mock import patch

Value = TypeVar("Value")
Given = ParamSpec("Given")


class _Selector(selectors.DefaultSelector):
    """Adds to the clock what the loop would have waited; waits for nothing but sockets."""

    now_s = 0.0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, selectors._EventMask]]:
        """Return what is ready at once; without a timer wait for it."""
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """Ends sleeps, timeouts and deadlines in the order of their times, on a machine of any pace."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now_s


def run(main: Coroutine[None, None, Value]) -> Value:
    """
    Run *main* as `asyncio.run` does, on a clock that starts at 0 and that only timers move.

    `time.monotonic` and `time.perf_counter` are that clock, too. Not for code that waits for
    threads or other processes: its deadlines would pass before they answer.
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        clock = runner.get_loop().time
        with patch.object(time, "monotonic", clock), patch.object(time, "perf_counter", clock):
            return runner.run(main)


@asynccontextmanager
async def ticking() -> AsyncIterator[None]:
    """Have the clock go in small steps: what is under way between sockets takes time."""

    async def tick() -> None:
        while True:  # noqa: ASYNC110  (there is nothing to wait for)
            await asyncio.sleep(0.01)

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        await asyncio.sleep(0.1)  # what was cut is closed
        ticker.cancel()


def in_virtual_time(
    test: Callable[Given, Coroutine[None, None, Value]],
) -> Callable[Given, Value]:
    """Have an async test run as `run` does."""

    @wraps(test)
    def ran(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        return run(test(*args, **kwargs))

    return ran
