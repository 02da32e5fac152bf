"""How requests are to be handled: the limits and choices that a plan gives the decode servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.protocol.endpoint_config import EndpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPolicy:
    """
    What a decode server keeps to.

    Attributes:
        prefill_deadline_s: from the first call of a prefill replica to an answer of any.
        kv_wait_deadline_s: from there to the first token: transfer, queue and one decode step.
        local_threshold_tokens: prompts up to this skip the prefill pool.
        fallback: where no prefill replica answers, `fail` or `local`.
    """

    prefill_deadline_s: float
    kv_wait_deadline_s: float
    local_threshold_tokens: int = 0
    fallback: str = "fail"


def order_of(front: EndpointConfig) -> RequestPolicy:
    """Take from what the front door knows what decode needs."""
    return RequestPolicy(
        prefill_deadline_s=front.prefill_deadline_s,
        kv_wait_deadline_s=front.kv_wait_deadline_s,
        local_threshold_tokens=front.local_threshold_tokens,
        fallback=front.fallback,
    )
