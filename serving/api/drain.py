"""The endpoint's end: new work is refused, and what is under way may finish."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from serving.protocol.messages import Refusal, RequestRefused
from serving.request.prefill import RETRY_AFTER_S

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


STOPPING = Refusal(
    status=503,
    message="The endpoint is stopping; send the request again.",
    code="stopping",
    retry_after_s=RETRY_AFTER_S,
)


class Drain:
    """
    What is under way, and whether more may begin; what only looks (`GET`) is answered to the end.

    `/ready` is refused with the work, so that load balancers send no more.
    """

    def __init__(self) -> None:
        """Start without work."""
        self._draining = False
        self._under_way = 0
        self._idle = asyncio.Event()

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Return *app* until it is drained; then it raises RequestRefused for new work."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] != "/ready"):
                await app(scope, receive, send)
                return
            if self._draining:
                raise RequestRefused(STOPPING)
            self._under_way += 1
            try:
                await app(scope, receive, send)
            finally:
                self._under_way -= 1
                if self._draining and not self._under_way:
                    self._idle.set()

        return answer

    async def finish(self, limit_s: float) -> int:
        """Refuse new work from now on; return how much is under way at the end, or the limit."""
        self._draining = True
        if self._under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._under_way
