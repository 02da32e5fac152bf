"""A value that takes a while to ask for: the last that came, and a newer one asked for beside."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""How long somebody waits for a newer value before the last one has to do."""

FIRST_S = 10.0
"""Likewise while there is none yet."""

Value = TypeVar("Value")


class Lately(Generic[Value]):
    """
    Asks again when the value is old, one question at a time; nobody waits long for the answer.

    A question that hangs is not given up: a thread may wait in it, and each new one would take
    another. What fails leaves the last value as it is.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Value]], *, nothing: Value, good_s: float
    ) -> None:
        """Start with *nothing*; an answer is good for *good_s*."""
        self._ask = ask
        self._value = nothing
        self._good_s = good_s
        self._asked_s = float("-inf")
        self._answered = False
        self._asking: asyncio.Task[None] | None = None

    @property
    def stale(self) -> bool:
        """Whether the last answer, or failure, was too long ago."""
        return time.monotonic() - self._asked_s > self._good_s

    async def get(self) -> Value:
        """Return the value, a fresh one if it comes soon enough."""
        if self._asking is None and self.stale:
            self._asking = asyncio.create_task(self._again())
        if self._asking is not None:
            patience_s = PATIENCE_S if self._answered else FIRST_S
            await asyncio.wait({self._asking}, timeout=patience_s)
        return self._value

    async def _again(self) -> None:
        """Ask."""
        try:
            self._value = await self._ask()
            self._answered = True
        except Exception:  # whatever it was, what is known stays known
            logger.exception("the cluster did not answer")
        finally:
            self._asked_s = time.monotonic()
            self._asking = None
