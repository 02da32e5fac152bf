"""Waiting for an engine's first token, and letting go of an answer that nobody waits for."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

STUCK_S = 120.0
"""
A KV cache that has not arrived by then never will, and only a new engine gives its blocks back:
NIXL waits for ever.
"""

LOOK_S = 0.01
"""How often an engine is asked whether an answer that comes as a whole has begun."""


class PendingAnswer:
    """
    An engine's answer from its start.

    While blocks of its KV cache are in flight a request must not be given up: that can bring the
    engine down (vllm #43226), and what arrives then would be written into blocks of others. So it
    is let run to its first token and ended then. Everything else ends at once.
    """

    def __init__(
        self,
        stream: AsyncGenerator[Any, None],
        *,
        begun: Callable[[], bool] | None,
        in_flight: bool,
    ) -> None:
        """
        Start it.

        Args:
            stream: of the engine.
            begun: tells of an answer that comes as a whole whether its first token is there;
                `None`: it comes token by token.
            in_flight: its KV cache comes from elsewhere.
        """
        self.stream = stream
        self._begun = begun
        self._in_flight = in_flight
        self._first = asyncio.ensure_future(anext(stream))
        self._started = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the first event, or the whole answer, is there; or an error."""
        return self._first.done()

    @property
    def stuck(self) -> bool:
        """Whether its KV cache will never arrive."""
        waited_s = time.monotonic() - self._started
        return self._in_flight and waited_s > STUCK_S and not self._has_begun()

    async def first_token(self, limit_s: float) -> None:
        """
        Wait for the first token, or for the answer to have failed.

        Raises:
            TimeoutError: neither came in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while not self._has_begun():
            left_s = end - loop.time()
            if left_s <= 0:
                raise TimeoutError
            await self._look(left_s)

    async def first_item(self) -> Any:  # noqa: ANN401
        """Return the first event, or the whole answer; raises what the engine raised."""
        return await self._first

    async def let_go(self) -> None:
        """End it as soon as that does no harm; whoever calls this need not wait for it."""
        while self._in_flight and not self._has_begun():
            await self._look(None)
        if not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        if not self._first.cancelled():
            self._first.exception()  # seen: nobody waits for it any more
        await self.stream.aclose()

    def _has_begun(self) -> bool:
        """Tell whether the first token is there."""
        return self._first.done() or (self._begun is not None and self._begun())

    async def _look(self, left_s: float | None) -> None:
        """Sleep until it is worth looking again; leaves the answer running."""
        look_s = left_s if self._begun is None else min(LOOK_S, left_s or LOOK_S)
        await asyncio.wait({self._first}, timeout=look_s)
