"""Prefill on a replica of a pool, and its retries."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from serving.protocol.messages import Refusal, RemotePrefill
from serving.request.prefill import DIED, TIMEOUT, PrefillAttempt, choose_domain, next_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.protocol.messages import LocalPrefill, Prefilled

logger = logging.getLogger(__name__)
SERVER_ERROR = 500


class PrefillPool(Protocol):
    """The prefill replicas, in domains."""

    def live(self, domain: str) -> int | None:
        """Return the number of replicas that can be called now; `None`: not known yet."""

    async def answered_within(self, domain: str, replica: str, age_s: float) -> bool:
        """Return whether a replica has answered any request in the last *age_s*."""

    async def call(
        self, domain: str, kind: str, body: dict[str, Any], tried: list[str]
    ) -> Prefilled | Refusal:
        """
        Prefill on one replica of a domain, none of *tried*, to which its name is appended.

        Cancelling this cancels the call.
        """


class _Attempts:
    """The attempts of one request: those that failed, and the replicas tried."""

    def __init__(self, pool: PrefillPool, kind: str, body: dict[str, Any]) -> None:
        self._pool = pool
        self._kind, self._body = kind, body
        self._tried: list[str] = []
        self.failures: list[str] = []

    async def attempt(self, domain: str, step: PrefillAttempt) -> Prefilled | Refusal | None:
        """Call one replica; `None`: it failed, which is noted."""
        begun_s, tried = time.monotonic(), len(self._tried)
        call = asyncio.ensure_future(self._pool.call(domain, self._kind, self._body, self._tried))
        try:
            await asyncio.wait({call}, timeout=step.patience_s)
            if not call.done() and await self._is_busy(domain, begun_s, tried):
                await asyncio.wait({call}, timeout=step.timeout_s - step.patience_s)
            if not call.done():
                self.failures.append(TIMEOUT)
                return None
            answer = call.result()
        except Exception:  # any error: another replica may succeed
            logger.exception("prefill of request %s failed", self._body.get("request_id"))
            self.failures.append(DIED)
            return None
        finally:
            call.cancel()
        if isinstance(answer, Refusal) and answer.status >= SERVER_ERROR:
            self.failures.append(DIED)
            return None
        return answer

    async def _is_busy(self, domain: str, begun_s: float, tried: int) -> bool:
        """Return whether the replica answers others meanwhile, or the call waits for a place."""
        if len(self._tried) == tried:
            return True
        age_s = time.monotonic() - begun_s
        return await self._pool.answered_within(domain, self._tried[-1], age_s)


async def prefill_remotely(
    pool: PrefillPool,
    domains: Sequence[str],
    kind: str,
    body: dict[str, Any],
    config: EndpointConfig,
) -> RemotePrefill | LocalPrefill | Refusal:
    """
    Prefill a prompt, with the retries that `serving.request.prefill` decides.

    Args:
        pool: the prefill replicas.
        domains: where to try, in this order.
        kind: `chat` or `completions`.
        body: a request that `serving.request.validation.check` accepted.
        config: deadlines and fallback.

    Returns:
        Where the KV cache is, or that decode computes the prompt, or the client's error.
    """
    begun_s = time.monotonic()
    attempts = _Attempts(pool, kind, body)
    domain: str | None = None
    while True:
        live = {each: pool.live(each) for each in domains}
        known = [count for count in live.values() if count is not None]
        step = next_step(
            attempts.failures,
            live=sum(known) if len(known) == len(live) else None,
            spent_s=time.monotonic() - begun_s,
            config=config,
        )
        if not isinstance(step, PrefillAttempt):
            return step
        domain = choose_domain(live, domain)
        answer = await attempts.attempt(domain, step)
        if isinstance(answer, Refusal):
            return answer
        if answer is not None:
            return RemotePrefill(
                prefilled=answer,
                failures=tuple(attempts.failures),
                seconds=time.monotonic() - begun_s,
            )
