"""Whether requests would get through now: replicas of every pool, and one answer end to end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from serving.phases import Begun
from serving.requests import Refusal

if TYPE_CHECKING:
    from serving.front import FrontDoor
    from serving.guard import Guard
    from serving.measured import Measured
    from serving.metrics import Metrics
    from serving.servers import Servers

LOOK_S = 5.0
"""How long a look at the cluster is good for; each costs Ray Serve's controller some ms."""

FACTS_S = 60.0
"""How long what the engines say of themselves is good for: it changes with a deployment only."""

PROBE = {"prompt": "ready?", "max_tokens": 1, "temperature": 0}


class ReadyCheck:
    """Looks at the cluster at most every `LOOK_S`, whoever asks how often."""

    def __init__(self, front: FrontDoor, servers: Servers) -> None:
        """Start without having looked."""
        self._front = front
        self._servers = servers
        self._running: dict[tuple[str, str], int] = {}
        self._facts: dict[tuple[str, str], dict[str, Any]] = {}
        self._looked_s = self._probed_s = self._asked_s = float("-inf")
        self._answer: str | None = None
        self._lock = asyncio.Lock()

    @property
    def stale(self) -> bool:
        """Whether the last look was too long ago."""
        return time.monotonic() - self._looked_s > LOOK_S

    async def running(self, guard: Guard, metrics: Metrics) -> dict[tuple[str, str], int]:
        """Return the replicas that run, by role and domain; the guard counts with them too."""
        async with self._lock:
            if self.stale:
                self._running = await self._servers.running()
                self._looked_s = time.monotonic()
                guard.state.resize(self._running)
                metrics.replicas(self._running)
        return self._running

    async def facts(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return what one engine of each role and domain runs with."""
        async with self._lock:
            if time.monotonic() - self._asked_s > FACTS_S:
                self._facts = await self._servers.facts()
                self._asked_s = time.monotonic()
        return self._facts

    async def lacking(self, guard: Guard, metrics: Metrics, measured: Measured) -> list[str]:
        """Return what keeps requests from getting through; nothing: ready."""
        running = await self.running(guard, metrics)
        roles = sorted({pool.role for pool in self._front.pools})
        gone = [
            f"no {role} replica is up"
            for role in roles
            if not any(number for (of, _), number in running.items() if of == role)
        ]
        if gone:
            return gone
        if time.monotonic() - measured.last_s <= LOOK_S:
            return []  # a client has just been answered: nothing proves it better
        async with self._lock:
            if time.monotonic() - self._probed_s > LOOK_S:
                self._answer = await self._probe()
                self._probed_s = time.monotonic()
        return [] if self._answer is None else [self._answer]

    async def _probe(self) -> str | None:
        """Send one request the way of all; return what went wrong."""
        front = self._front
        limit_s = front.prefill_deadline_s + front.kv_wait_deadline_s
        body: dict[str, Any] = {**PROBE, "model": front.model_id}
        domain = next(iter(front.pairing), "")
        try:
            async with asyncio.timeout(limit_s):
                begun = await anext(aiter(self._servers.answer(domain, "completions", body)))
        except TimeoutError:
            return f"a probe got no token within {limit_s:g} s"
        except Exception:  # noqa: BLE001  (whatever it is, clients would meet it too)
            return "a probe failed"
        if isinstance(begun, Refusal):
            return f"a probe was refused: {begun.message}"
        if isinstance(begun, Begun) and begun.phases.path == "fallback-local":
            return "a probe found no prefill replica"
        return None
