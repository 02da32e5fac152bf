"""An engine's answer before its first token, and its end where a KV transfer is in flight."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

STUCK_S = 120.0
"""
Age at which a KV transfer counts as lost. NIXL waits for ever, and only a new engine frees the
blocks.
"""

POLL_S = 0.01
"""Interval at which an engine is asked for the first token of an answer in one piece."""


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
        Start it.

        Args:
            stream: of the engine.
            has_first_token: for an answer in one piece, whether its first token is there; `None`:
                the answer is streamed.
            in_flight: its KV cache comes from another replica.
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
        """Wait until the next look; the answer goes on."""
        poll_s = left_s if self._has_first_token is None else min(POLL_S, left_s or POLL_S)
        await asyncio.wait({self._first}, timeout=poll_s)
