"""Engine seconds: those of the plan, which pass more slowly than the clock's."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

RESOLUTION_S = 1e-6
"""Seconds by which a timer may be early: times are sums of rounded numbers."""


def check_slowdown(slowdown: float) -> float:
    """Return *slowdown*; raises InputError unless it is a finite number of at least 1."""
    if not (math.isfinite(slowdown) and slowdown >= 1):
        raise InputError("--slowdown", slowdown, "a number, at least 1")
    return slowdown


class EngineClock:
    """
    Seconds of the plan; each takes *slowdown* seconds of the event loop's clock.

    They count from that clock's zero, which is the same in all processes of a machine. Engine time
    never goes back: while the engine is frozen it stands still.
    """

    def __init__(self, slowdown: float) -> None:
        """Start inside the event loop that all calls are made in."""
        self.slowdown = check_slowdown(slowdown)
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._now_s = 0.0

    def now_s(self) -> float:
        """Return the engine time."""
        passed_s = (self._loop.time() - self._origin_s) / self.slowdown
        self._now_s = max(self._now_s, passed_s)
        return self._now_s

    def wait_s(self, until_s: float) -> float:
        """Return the seconds of the clock until an engine time; 0 if it has passed."""
        passed_s = (self._loop.time() - self._origin_s) / self.slowdown
        return max(0.0, (until_s - passed_s) * self.slowdown)

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* of engine time, as long as the engine is not frozen meanwhile."""
        await asyncio.sleep(seconds * self.slowdown)

    def call_at(self, until_s: float, callback: Callable[[], object]) -> EngineTimer:
        """Call back at an engine time, or at once where it has passed."""
        return EngineTimer(self, until_s, callback)

    def reached(self, until_s: float) -> bool:
        """Say whether an engine time has come; from then on `now_s` is not before it."""
        if self.wait_s(until_s) > RESOLUTION_S:
            return False
        self._now_s = max(self._now_s, until_s)
        return True

    def freeze(self, seconds: float) -> None:
        """Let engine time stand still for *seconds* of the clock."""
        self.now_s()
        self._origin_s += seconds


class EngineTimer:
    """A callback at an engine time, which comes later where the engine is frozen meanwhile."""

    def __init__(self, clock: EngineClock, until_s: float, callback: Callable[[], object]) -> None:
        """Start to wait."""
        self._clock = clock
        self._until_s = until_s
        self._callback = callback
        self._wait()

    def cancel(self) -> None:
        """Do not call back."""
        self._handle.cancel()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._clock.wait_s(self._until_s), self._due)

    def _due(self) -> None:
        if self._clock.reached(self._until_s):
            self._callback()
        else:
            self._wait()
