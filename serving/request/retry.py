"""What to do after prefill failed, or before it is tried: one pure decision at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.protocol.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.protocol.request_policy import RequestPolicy

ATTEMPTS = 2
"""The first, and one more on another replica: nothing has been sent to the client yet."""

RETRY_AFTER_S = 5.0
"""Told to clients where prefill fails: the router needs as long to learn of a new replica."""

NO_REPLICA, DIED, TIMEOUT = "no-prefill-replica", "prefill-failed", "prefill-timeout"
"""Why prefill did not answer; words of headers and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Call a prefill replica, for at most so long."""

    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Let the decode replica compute the prompt."""

    path: str
    reason: str


def next_step(
    failures: Sequence[str], *, live: int | None, left_s: float, order: RequestPolicy
) -> Try | Local | Refusal:
    """
    Decide what comes next for a request that no replica has prefilled.

    While another replica lives the first attempt gets half of the time, so that one that hangs
    leaves enough for the second.

    Args:
        failures: reasons of the attempts so far, `DIED` or `TIMEOUT`.
        live: prefill replicas that live; `None`: not known yet.
        left_s: until the prefill deadline.
        order: limits and policy.
    """
    if live == 0:
        return _without_prefill(NO_REPLICA, order)
    if failures and (len(failures) >= ATTEMPTS or left_s <= 0):
        return _without_prefill(failures[-1], order)
    alone = live == 1 or bool(failures)
    return Try(timeout_s=left_s if alone else left_s / 2)


def _without_prefill(reason: str, order: RequestPolicy) -> Local | Refusal:
    """Apply the policy for want of a prefill replica."""
    if order.fallback == "local":
        return Local(path="fallback-local", reason=reason)
    if reason == TIMEOUT:
        return late_prefill(order.prefill_deadline_s)
    message = {
        NO_REPLICA: "No prefill replica is up; try again later.",
        DIED: "Prefill failed; try again later.",
    }[reason]
    return Refusal(status=503, message=message, code=reason, retry_after_s=RETRY_AFTER_S)


def late_prefill(limit_s: float) -> Refusal:
    """Return what a client gets whose prompt no prefill replica computed in time."""
    message = f"No prefill replica answered within {limit_s:g} s."
    return Refusal(status=504, message=message, code=TIMEOUT, retry_after_s=RETRY_AFTER_S)


def late_first_token(order: RequestPolicy) -> Refusal:
    """Return what a client gets whose first token did not come in time."""
    message = f"The first token did not come within {order.kv_wait_deadline_s:g} s of prefill."
    retry_after_s = max(RETRY_AFTER_S, math.ceil(order.kv_wait_deadline_s))
    return Refusal(status=504, message=message, code="kv-wait-timeout", retry_after_s=retry_after_s)


def late_answer(limit_s: float) -> Refusal:
    """Return what a client gets whose answer, wanted in one piece, did not come in time."""
    message = f"The answer did not come within {limit_s:g} s."
    return Refusal(status=504, message=message, code="answer-timeout", retry_after_s=RETRY_AFTER_S)


def choose_domain(live: Mapping[str, int | None], tried: str | None) -> str:
    """
    Return the domain to ask: the nearest that lives and has a replica that did not just fail.

    Args:
        live: replicas that live by domain, the nearest first; `None`: not known yet.
        tried: the domain asked before.
    """
    others = [
        domain
        for domain, count in live.items()
        if count is None or count > (1 if domain == tried else 0)
    ]
    alive = [domain for domain, count in live.items() if count]
    return (others or alive or list(live))[0]
