"""Waiting for a replica's answer, as long as there is a replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from serving.cluster.serve_compat import live_replicas

if TYPE_CHECKING:
    from collections.abc import Awaitable

LOOK_S = 0.1
"""How often to look whether a replica is left."""


Answer = TypeVar("Answer")


class NoReplica(Exception):
    """Ray Serve holds the call until there is a replica again."""


async def while_live(handle: Any, answer: Awaitable[Answer]) -> Answer:  # noqa: ANN401
    """
    Return what a call through *handle* answers.

    A call by gRPC that fails does not take its replica off Serve's list: the next one finds out,
    and then waits inside Serve for another replica, for ever (ray 2.60.0, `route_and_send_request`
    "will block indefinitely if no replicas are available").

    Raises:
        NoReplica: none is left; the call is ended.
    """
    waiting = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
            if live_replicas(handle) == 0:
                raise NoReplica(handle.deployment_name)
        return waiting.result()
    finally:
        waiting.cancel()
