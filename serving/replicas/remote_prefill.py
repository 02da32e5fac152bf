"""How a decode replica gets a prompt prefilled, whatever happens to those who should."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from serving.protocol.phases import Prefilled
from serving.protocol.refusal import Refusal
from serving.request.retry import DIED, TIMEOUT, Try, choose_domain, next_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.request_policy import RequestPolicy
    from serving.request.retry import Local

logger = logging.getLogger(__name__)
SERVER_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A prompt that was prefilled; *failures* are of the attempts before."""

    prefilled: Prefilled
    failures: tuple[str, ...]


class PrefillPool(Protocol):
    """Prefill replicas in domains, the nearest first."""

    def live(self) -> Mapping[str, int | None]:
        """Return by domain how many replicas live; `None`: not known yet."""

    async def call(
        self,
        domain: str,
        kind: str,
        request: Any,  # noqa: ANN401
        asked: list[Any],
    ) -> Prefilled | Refusal:
        """Have one replica of a domain prefill, none of *asked*; note there which one it was."""


async def prefill_elsewhere(
    reach: PrefillPool,
    kind: str,
    request: Any,  # noqa: ANN401
    order: RequestPolicy,
) -> Remote | Local | Refusal:
    """
    Have a prompt prefilled: once more elsewhere if that fails, then by the order's policy.

    Args:
        reach: the replicas.
        kind: `chat` or `completions`.
        request: vLLM's, for prefill.
        order: deadline and policy.

    Returns:
        Where the KV cache is; or that decode computes it; or what the client gets.
    """
    deadline = time.monotonic() + order.prefill_deadline_s
    failures: list[str] = []
    domain: str | None = None
    asked: list[Any] = []
    while True:
        live = reach.live()
        known = [count for count in live.values() if count is not None]
        step = next_step(
            failures,
            live=sum(known) if len(known) == len(live) else None,
            left_s=deadline - time.monotonic(),
            order=order,
        )
        if not isinstance(step, Try):
            return step
        domain = choose_domain(live, domain)
        try:
            async with asyncio.timeout(step.timeout_s):
                answer = await reach.call(domain, kind, request, asked)
        except TimeoutError:
            failures.append(TIMEOUT)
        except Exception:  # whatever it was, another replica may do better
            logger.exception("prefill failed")
            failures.append(DIED)
        else:
            if not isinstance(answer, Refusal):
                return Remote(prefilled=answer, failures=tuple(failures))
            if answer.status < SERVER_ERROR:
                return answer
            failures.append(DIED)
