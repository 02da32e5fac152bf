"""Prefill on another replica: the call through Ray Serve, and its retries."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.cluster.serve_compat import DIRECT_CALLS, NoReplica, live_replicas, while_live
from serving.protocol.messages import Prefilled, Refusal
from serving.request.prefill import DIED, TIMEOUT, PrefillAttempt, choose_domain, next_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.request.prefill import LocalPrefill

logger = logging.getLogger(__name__)
SERVER_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """A prompt that was prefilled; *failures* are those of the attempts before."""

    prefilled: Prefilled
    failures: tuple[str, ...]


class PrefillHandles:
    """Prefill replicas behind Ray Serve's handles, in domains; the router chooses inside one."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """Keep a handle per domain, in the order in which to try them."""
        self._handles = {each: handle.options(**DIRECT_CALLS) for each, handle in handles.items()}

    def live(self) -> Mapping[str, int | None]:
        """Return the replicas that can be called now, by domain; `None`: not known yet."""
        return {domain: live_replicas(handle) for domain, handle in self._handles.items()}

    async def call(
        self,
        domain: str,
        request: Any,  # noqa: ANN401
        tried: list[Any],
    ) -> Prefilled | Refusal:
        """
        Prefill on one replica of a domain, none of *tried*, to which the router appends it.

        Cancelling this cancels the call.
        """
        handle = self._handles[domain]
        response = handle.prefill.remote(request, tried=tried)
        try:
            answer: Prefilled | Refusal = await while_live(handle, response)
        except (asyncio.CancelledError, NoReplica):
            response.cancel()
            raise
        return answer


async def prefill_remotely(
    pool: PrefillHandles,
    request: Any,  # noqa: ANN401
    config: EndpointConfig,
) -> RemotePrefill | LocalPrefill | Refusal:
    """
    Prefill a prompt in *pool*, with the retries that `serving.request.prefill` decides.

    *request* is the engine's, for prefill. Returns where the KV cache is, or that decode computes
    the prompt, or the client's error.
    """
    deadline = time.monotonic() + config.prefill_deadline_s
    failures: list[str] = []
    domain: str | None = None
    tried: list[Any] = []
    while True:
        live = pool.live()
        known = [count for count in live.values() if count is not None]
        step = next_step(
            failures,
            live=sum(known) if len(known) == len(live) else None,
            left_s=deadline - time.monotonic(),
            config=config,
        )
        if not isinstance(step, PrefillAttempt):
            return step
        domain = choose_domain(live, domain)
        try:
            async with asyncio.timeout(step.timeout_s):
                answer = await pool.call(domain, request, tried)
        except TimeoutError:
            failures.append(TIMEOUT)
        except Exception:  # any error: another replica may succeed
            logger.exception("prefill failed")
            failures.append(DIED)
        else:
            if not isinstance(answer, Refusal):
                return RemotePrefill(prefilled=answer, failures=tuple(failures))
            if answer.status < SERVER_ERROR:
                return answer
            failures.append(DIED)
