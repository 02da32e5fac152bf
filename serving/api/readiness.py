"""Readiness: whether every pool has a replica, and whether a request gets an answer end to end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from serving.protocol.messages import Refusal, RequestRefused
from serving.request.prefill import DECODE_FAILED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from serving.admission.controller import AdmissionController
    from serving.api.metrics import Metrics
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import Backend, RequestPhases

    Running = dict[tuple[str, str], int]
    Facts = dict[tuple[str, str], dict[str, Any]]

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Age at which the number of replicas is stale; a query costs Serve's controller some ms."""

FACTS_REFRESH_S = 60.0
"""Age at which the engines' settings are stale; they change with a deployment only."""

WAIT_S = 1.0
"""Longest wait for a refresh before the stale value is returned."""

FIRST_WAIT_S = 10.0
"""Longest wait for the first value."""

PROBE_TOKEN = 100
"""A token id that every vocabulary has; its meaning does not matter."""

THROUGH_PREFILL = ("remote", "retried")
"""Paths on which prefill, the KV transfer and decode have all worked."""

Value = TypeVar("Value")


class CachedValue(Generic[Value]):
    """
    A stale-while-revalidate cache for one slow async value.

    At most one refresh runs at a time. A refresh that hangs is not cancelled, because a thread may
    block in it and each new one would take another. One that fails leaves the last value.
    """

    def __init__(
        self, refresh: Callable[[], Awaitable[Value]], *, initial: Value, max_age_s: float
    ) -> None:
        """Start with *initial*, which is stale; a refreshed value is fresh for *max_age_s*."""
        self._refresh = refresh
        self._value = initial
        self._max_age_s = max_age_s
        self._refreshed_s = float("-inf")
        self._has_value = False
        self._task: asyncio.Task[None] | None = None

    def refresh(self) -> None:
        """Begin to refresh a stale value."""
        if self._task is None and time.monotonic() - self._refreshed_s > self._max_age_s:
            self._task = asyncio.create_task(self._run())

    async def get(self) -> Value:
        """Return the value, a fresh one if it comes soon enough."""
        self.refresh()
        if self._task is not None:
            wait_s = WAIT_S if self._has_value else FIRST_WAIT_S
            await asyncio.wait({self._task}, timeout=wait_s)
        return self._value

    async def _run(self) -> None:
        try:
            self._value = await self._refresh()
            self._has_value = True
        except Exception:  # any error: the last value stays
            logger.exception("the cluster did not answer")
        finally:
            self._refreshed_s = time.monotonic()
            self._task = None


class ReadyCheck:
    """
    The state of the cluster, queried at most once per `REFRESH_S`, however often it is read.

    A probe may take as long as both deadlines; the other two do not wait for it.

    Attributes:
        running: the number of running replicas, by role and domain.
        facts: the settings of one engine of each role and domain.
    """

    def __init__(
        self,
        config: EndpointConfig,
        backend: Backend,
        admission: AdmissionController,
        metrics: Metrics,
    ) -> None:
        """Start without a query; *admission* and *metrics* receive the number of replicas."""

        async def query() -> Running:
            found = await backend.running()
            admission.inflight.set_replicas(found)
            metrics.replicas(found)
            return found

        self._config = config
        self._backend = backend
        self.running: CachedValue[Running] = CachedValue(query, initial={}, max_age_s=REFRESH_S)
        self.facts: CachedValue[Facts] = CachedValue(
            backend.facts, initial={}, max_age_s=FACTS_REFRESH_S
        )
        self._probing = asyncio.Lock()
        self._known = dict.fromkeys(config.pairing, (float("-inf"), ""))
        threshold = config.routing.local_threshold_tokens
        # Beyond what decode computes itself, if there is room.
        self._prompt = [PROBE_TOKEN] * min(threshold + 1, config.max_model_len - 1)
        self._splits = config.split and len(self._prompt) > threshold

    def answered(self, domain: str, phases: RequestPhases, first_s: float) -> None:
        """Record a client's answer: its path, and its first token's time by `perf_counter`."""
        if self._proves_ready(phases):
            self._record(domain, first_s, "")

    async def check(self) -> tuple[bool, list[str]]:
        """Return whether requests get through in any domain, and what is lacking in the others."""
        running = await self.running.get()
        if not running:
            return False, ["Ray Serve does not say what runs"]
        roles = sorted({pool.role for pool in self._config.pools})
        missing = [
            f"no {role} replica is up"
            for role in roles
            if not any(number for (of, _), number in running.items() if of == role)
        ]
        if missing:
            return False, missing
        async with self._probing:
            now_s = time.perf_counter()
            # A client that has just been answered proves as much, for its domain.
            due = [at for at, (when_s, _) in self._known.items() if now_s - when_s > REFRESH_S]
            await asyncio.gather(*(self._probe(domain) for domain in due))
        errors = [error for _, error in self._known.values()]
        return not all(errors), [error for error in errors if error]

    async def _probe(self, domain: str) -> None:
        error = await self._probe_error(domain)
        if error and len(self._known) > 1:
            error = f"{domain}: {error}"
        self._record(domain, time.perf_counter(), error)

    async def _probe_error(self, domain: str) -> str:
        """Send one request; return what went wrong, or nothing if its first token came."""
        config = self._config
        limit_s = config.prefill_deadline_s + config.kv_wait_deadline_s
        body = {
            "model": config.model_id,
            "prompt": self._prompt,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": uuid.uuid4().hex,  # no prefix-cache hit: computed and transferred anew
        }
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._backend.answer(domain, "completions", body)
        except TimeoutError:
            return f"a probe got no token within {limit_s:g} s"
        except RequestRefused as refused:
            answer = refused.refusal
        except Exception:  # noqa: BLE001  (a client would meet any of them, too)
            return "a probe failed"
        if isinstance(answer, Refusal):
            return f"a probe was refused: {answer.message}"
        phases = answer.chunk.phases
        if not self._proves_ready(phases):
            return f"a probe was answered without prefill: {phases.path_and_reason}"
        return ""

    def _proves_ready(self, phases: RequestPhases) -> bool:
        """Return whether an answer took the path of prompts beyond the local threshold."""
        proves = phases.path in THROUGH_PREFILL and phases.reason != DECODE_FAILED
        return proves or not self._splits

    def _record(self, domain: str, when_s: float, error: str) -> None:
        self._known[domain] = max(self._known[domain], (when_s, error))
