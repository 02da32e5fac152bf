"""The pools behind Ray Serve's handles, as the front door asks them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serving.cluster.serve_compat import STRAIGHT, live_replicas
from serving.protocol.refusal import Refusal
from serving.replicas.live_replicas import NoReplica, while_live
from serving.request.prefill_eligibility import must_be_local
from serving.request.retry import RETRY_AFTER_S, late_answer, late_prefill
from serving.request.validation import RequestRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from serving.protocol.phases import FirstChunk, PrefillTiming
    from serving.replicas.timeouts import Timeouts
    from serving.request.retry import Local

logger = logging.getLogger(__name__)

NOBODY = (BackPressureError, DeploymentUnavailableError, NoReplica, RayActorError, TimeoutError)
"""What is raised where no replica can take a request, or the one that had it is gone."""

FACTS_LIMIT_S = 5.0
TOLD = (
    *("tp", "pp", "dtype", "kv_dtype", "max_batch_size", "max_batched_tokens", "max_model_len"),
    *("block_size", "kv_bytes", "kv_role", "kv_connector"),
)
"""Of an engine's facts, those that `/plan` tells: no paths, no hosts."""

PARAMS = {
    "beam-search": "use_beam_search",
    "prompt-list": "prompt",
    "prompt-logprobs": "prompt_logprobs",
}
"""Fields that keep a request out of the prefill pool, where the reason has another name."""


class ServeBackend:
    """Implements `serving.protocol.backend.Servers`."""

    def __init__(
        self, servers: Mapping[str, Any], prefill: Mapping[str, Any], patience: Timeouts
    ) -> None:
        """
        Keep a handle per domain, of what answers and of what prefills.

        A decode replica keeps deadlines itself; *patience* is for one that hangs as a whole.
        """
        self._patience = patience
        self._servers = {
            domain: handle.options(stream=True, **STRAIGHT) for domain, handle in servers.items()
        }
        self._prefill = dict(prefill)
        role = "decode" if prefill else "mixed"
        self._handles = {
            (of, domain): handle
            for of, handles in ((role, servers), ("prefill", prefill))
            for domain, handle in handles.items()
        }

    async def answer(
        self, domain: str, kind: str, body: dict[str, Any]
    ) -> AsyncIterator[Refusal | FirstChunk | list[str]]:
        """See `SplitDecodeServer.answer`; whoever stops listening ends it."""
        handle = self._servers[domain]
        if live_replicas(handle) == 0:
            raise RequestRefused(_unavailable())  # Ray Serve would wait for one
        begun = ended = False
        streamed = body.get("stream") is True and not body.get("use_beam_search")
        patience = self._patience
        limit_s = patience.first_token_s if streamed else patience.whole_s(kind, body)
        response = handle.answer.remote(kind, body)
        try:
            async with asyncio.timeout(limit_s):
                first = await while_live(handle, anext(response))
            begun = True
            yield first
            async for item in response:
                yield item
            ended = True
        except NOBODY as error:
            if begun:
                raise
            late = isinstance(error, TimeoutError) and not streamed
            raise RequestRefused(late_answer(limit_s) if late else _unavailable()) from error
        finally:
            if not ended:
                response.cancel()

    async def time_prefill(self, body: dict[str, Any]) -> PrefillTiming | Refusal:
        """Run a prompt through the first domain's prefill pool."""
        if not self._prefill:
            return Refusal(status=404, message="An aggregated plan has no prefill pool.")
        local = must_be_local(body)
        if local is not None:
            return _not_through_prefill(local)
        handle = next(iter(self._prefill.values()))
        if live_replicas(handle) == 0:
            raise RequestRefused(_unavailable())  # Ray Serve would wait for one
        limit_s = self._patience.prefill_s
        response = handle.time_prefill.remote(body)
        ended = False
        try:
            async with asyncio.timeout(limit_s):
                timing: PrefillTiming | Refusal = await while_live(handle, response)
            ended = True
        except NOBODY as error:
            late = isinstance(error, TimeoutError)
            raise RequestRefused(late_prefill(limit_s) if late else _unavailable()) from error
        finally:
            if not ended:
                response.cancel()
        return timing

    async def running(self) -> dict[tuple[str, str], int]:
        """Return how many replicas run, by role and domain."""
        status = await asyncio.to_thread(serve.status)
        found = {
            name: deployment.replica_states.get("RUNNING", 0)
            for app in status.applications.values()
            for name, deployment in app.deployments.items()
        }
        return {key: found.get(h.deployment_name, 0) for key, h in self._handles.items()}

    async def facts(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Ask one engine of each deployment; those that do not answer in time are left out."""

        async def ask(handle: Any) -> dict[str, Any] | None:  # noqa: ANN401
            response = handle.facts.remote()
            try:
                async with asyncio.timeout(FACTS_LIMIT_S):
                    found: dict[str, Any] = await response
            except Exception as error:  # noqa: BLE001  (whatever keeps it, the others still tell)
                logger.warning("%s told no facts: %r", handle.deployment_name, error)
                response.cancel()
                return None
            return {name: found[name] for name in TOLD if name in found}

        answers = await asyncio.gather(*(ask(handle) for handle in self._handles.values()))
        asked = zip(self._handles, answers, strict=True)
        return {key: found for key, found in asked if found is not None}


def _not_through_prefill(local: Local) -> Refusal:
    """Return what a client is told that wants timed what never goes through prefill."""
    param = PARAMS.get(local.reason, local.reason)
    message = f"{param}: expected what the prefill pool computes: one prompt, for one plain answer."
    return Refusal(status=400, message=message, param=param, code="unsupported_value")


def _unavailable() -> Refusal:
    """Return what a client is told that no replica can serve now."""
    return Refusal(
        status=503,
        message="No replica can take the request; try again later.",
        code="no_replica",
        retry_after_s=RETRY_AFTER_S,
    )
