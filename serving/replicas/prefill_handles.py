"""The prefill replicas that a decode replica reaches through Ray Serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from serving.cluster.serve_compat import STRAIGHT, live_replicas
from serving.replicas.live_replicas import NoReplica, while_live

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.phases import Prefilled
    from serving.protocol.refusal import Refusal


class PrefillHandles:
    """Prefill replicas behind Ray Serve's handles; which one of a domain, the router decides."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """Keep a handle per domain, in the order in which to try them."""
        self._handles = {each: handle.options(**STRAIGHT) for each, handle in handles.items()}

    def live(self) -> Mapping[str, int | None]:
        """Return by domain how many replicas can be called now."""
        return {domain: live_replicas(handle) for domain, handle in self._handles.items()}

    async def call(
        self,
        domain: str,
        kind: str,
        request: Any,  # noqa: ANN401
        asked: list[Any],
    ) -> Prefilled | Refusal:
        """Have one replica of a domain prefill; the call ends with whoever waits for it."""
        handle = self._handles[domain]
        response = handle.prefill.remote(kind, request, asked=asked)
        try:
            answer: Prefilled | Refusal = await while_live(handle, response)
        except (asyncio.CancelledError, NoReplica):
            response.cancel()
            raise
        return answer
