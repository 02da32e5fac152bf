"""Whether requests would get through now: replicas of every pool, and one answer end to end."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

from serving.api.cached_value import Lately
from serving.protocol.phases import FirstChunk
from serving.protocol.refusal import Refusal
from serving.request.validation import RequestRefused

if TYPE_CHECKING:
    from serving.admission.controller import AdmissionController
    from serving.api.metrics import Metrics
    from serving.protocol.backend import Backend
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.phases import RequestPhases

    Running = dict[tuple[str, str], int]
    Facts = dict[tuple[str, str], dict[str, Any]]

LOOK_S = 5.0
"""How long a look at the cluster is good for; each costs Ray Serve's controller some ms."""

FACTS_S = 60.0
"""How long what the engines say of themselves is good for: it changes with a deployment only."""

PROBE_TOKEN = 100
"""A token that every vocabulary has; what it means does not matter."""

THROUGH_PREFILL = ("remote", "retried")
"""Ways on which prefill, the KV transfer and decode have all done their part."""


class ReadyCheck:
    """
    Looks at the cluster at most every `LOOK_S`, whoever asks how often.

    A probe may take as long as both deadlines; who wants to know what runs does not wait for it.
    """

    def __init__(
        self, front: EndpointConfig, servers: Backend, guard: AdmissionController, metrics: Metrics
    ) -> None:
        """Start without having looked; *guard* and *metrics* are told how many replicas run."""

        async def look() -> Running:
            running = await servers.running()
            guard.state.resize(running)
            metrics.replicas(running)
            return running

        self._front = front
        self._servers = servers
        self._running: Lately[Running] = Lately(look, nothing={}, good_s=LOOK_S)
        self._facts: Lately[Facts] = Lately(servers.facts, nothing={}, good_s=FACTS_S)
        self._probing = asyncio.Lock()
        self._known = dict.fromkeys(front.pairing, (float("-inf"), ""))
        self._prompt = [PROBE_TOKEN] * _probe_tokens(front)
        self._splits = front.split and len(self._prompt) > front.local_threshold_tokens

    @property
    def stale(self) -> bool:
        """Whether the last look was too long ago."""
        return self._running.stale

    async def running(self) -> Running:
        """Return the replicas that run, by role and domain."""
        return await self._running.get()

    async def facts(self) -> Facts:
        """Return what one engine of each role and domain runs with."""
        return await self._facts.get()

    def saw(self, domain: str, phases: RequestPhases, first_s: float) -> None:
        """Note an answer's way and the moment of its first token, by `time.perf_counter`."""
        if self._proves(phases):
            self._note(domain, first_s, "")

    async def lacking(self) -> list[str]:
        """Return what keeps requests from getting through; nothing: ready."""
        running = await self.running()
        if not running:
            return ["Ray Serve does not say what runs"]
        roles = sorted({pool.role for pool in self._front.pools})
        gone = [
            f"no {role} replica is up"
            for role in roles
            if not any(number for (of, _), number in running.items() if of == role)
        ]
        if gone:
            return gone
        async with self._probing:
            now_s = time.perf_counter()
            # A client who has just been answered proves as much, of that domain.
            due = [at for at, (when_s, _) in self._known.items() if now_s - when_s > LOOK_S]
            await asyncio.gather(*(self._probe(domain) for domain in due))
        return [wrong for _, wrong in self._known.values() if wrong]

    async def _probe(self, domain: str) -> None:
        """Send one request the way of all, and note what is wrong."""
        wrong = await self._tried(domain)
        if wrong and len(self._known) > 1:
            wrong = f"{domain}: {wrong}"
        self._note(domain, time.perf_counter(), wrong)

    async def _tried(self, domain: str) -> str:
        """Return what went wrong with a request; nothing: its first token came."""
        front = self._front
        limit_s = front.prefill_deadline_s + front.kv_wait_deadline_s
        body = {
            "model": front.model_id,
            "prompt": self._prompt,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": uuid.uuid4().hex,  # computed and transferred anew, every time
        }
        try:
            async with asyncio.timeout(limit_s):
                begun = await anext(aiter(self._servers.answer(domain, "completions", body)))
        except TimeoutError:
            return f"a probe got no token within {limit_s:g} s"
        except RequestRefused as refused:
            return f"a probe was refused: {refused.refusal.message}"
        except Exception:  # noqa: BLE001  (whatever it is, clients would meet it too)
            return "a probe failed"
        if isinstance(begun, Refusal):
            return f"a probe was refused: {begun.message}"
        if isinstance(begun, FirstChunk) and not self._proves(begun.phases):
            return f"a probe was answered without prefill: {begun.phases.way}"
        return ""

    def _proves(self, phases: RequestPhases) -> bool:
        """Tell whether an answer took the way that prompts beyond the threshold take."""
        return not self._splits or phases.path in THROUGH_PREFILL

    def _note(self, domain: str, when_s: float, wrong: str) -> None:
        """Keep the latest that is known of a domain: what is wrong there, or nothing."""
        self._known[domain] = max(self._known[domain], (when_s, wrong))


def _probe_tokens(front: EndpointConfig) -> int:
    """Return the length of a probe: beyond what decode computes itself, if there is room."""
    return min(front.local_threshold_tokens + 1, front.max_model_len - 1)
