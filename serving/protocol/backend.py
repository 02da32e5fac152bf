"""What the front door asks of the cluster behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from serving.protocol.phases import FirstChunk, PrefillTiming
    from serving.protocol.refusal import Refusal


class EngineFailed(Exception):
    """An engine broke off: of an answer that has begun nothing follows, [DONE] least of all."""


class Backend(Protocol):
    """The pools: Ray Serve's handles, or what a test puts in their place."""

    def answer(
        self, domain: str, kind: str, body: dict[str, Any]
    ) -> AsyncIterator[Refusal | FirstChunk | list[str]]:
        """Answer a request; see `SplitDecodeServer.answer`. Raises `Refused` for want of one."""

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a prompt through the prefill pool alone."""

    async def running(self) -> dict[tuple[str, str], int]:
        """Return how many replicas run, by role and domain."""

    async def facts(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return what one engine of each role and domain really runs with, of those that answer."""
