"""The endpoint's end: new work is refused, and what is under way may finish."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.requests import Request

from serving.api.errors import REQUEST_ID, error_response, request_id_of
from serving.protocol.messages import Refusal
from serving.request.prefill import RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

STOPPING = Refusal(
    status=503,
    message="The endpoint is stopping; send the request again.",
    code="stopping",
    retry_after_s=RETRY_AFTER_S,
)


class DrainingApp:
    """
    An application that answers until it is drained; what only looks (`GET`) it answers on.

    `/ready` is refused with the work, so that load balancers send no more.
    """

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        """Take an application, and what is told the status of each refusal."""
        self._app = app
        self._count = count
        self._draining = False
        self._under_way = 0
        self._idle = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] != "/ready"):
            await self._app(scope, receive, send)
            return
        if self._draining:
            self._count(STOPPING.status)
            headers = {REQUEST_ID: request_id_of(Request(scope)), "Connection": "close"}
            await error_response(STOPPING, headers)(scope, receive, send)
            return
        self._under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1
            if self._draining and not self._under_way:
                self._idle.set()

    async def drain(self, limit_s: float) -> int:
        """Refuse new work from now on; return how much is under way at the end, or the limit."""
        self._draining = True
        if self._under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._under_way
