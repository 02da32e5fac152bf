"""The retry rule of prefill: one pure decision before and after each attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.protocol.messages import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.protocol.endpoint_config import EndpointConfig

ATTEMPTS = 2
"""Attempts per request: the client has received nothing yet, so another replica may be tried."""

RETRY_AFTER_S = 5.0
"""Retry-After where prefill fails: the router needs as long to learn of a new replica."""

NO_REPLICA, DIED, TIMEOUT = "no-prefill-replica", "prefill-failed", "prefill-timeout"
"""Why prefill did not answer; values of headers and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttempt:
    """The decision to call a prefill replica, with its time limit."""

    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefill:
    """The decision that the decode replica computes the prompt."""

    path: str
    reason: str


def next_step(
    failures: Sequence[str], *, live: int | None, left_s: float, config: EndpointConfig
) -> PrefillAttempt | LocalPrefill | Refusal:
    """
    Decide the next step of a request whose prompt is not computed yet.

    If another replica is live, the first attempt gets half of the time, so that a replica that
    hangs leaves enough for the second attempt.

    Args:
        failures: reasons of the attempts so far, `DIED` or `TIMEOUT`.
        live: live prefill replicas; `None`: not known yet.
        left_s: seconds until the prefill deadline.
        config: deadline and fallback.
    """
    if live == 0:
        return _without_prefill(NO_REPLICA, config)
    if failures and (len(failures) >= ATTEMPTS or left_s <= 0):
        return _without_prefill(failures[-1], config)
    last = live == 1 or bool(failures)
    return PrefillAttempt(timeout_s=left_s if last else left_s / 2)


def _without_prefill(reason: str, config: EndpointConfig) -> LocalPrefill | Refusal:
    if config.routing.fallback == "local":
        return LocalPrefill(path="fallback-local", reason=reason)
    if reason == TIMEOUT:
        return late_prefill(config.prefill_deadline_s)
    message = {
        NO_REPLICA: "No prefill replica is up; try again later.",
        DIED: "Prefill failed; try again later.",
    }[reason]
    return Refusal(status=503, message=message, code=reason, retry_after_s=RETRY_AFTER_S)


def late_prefill(limit_s: float) -> Refusal:
    """Return the refusal of a prompt that no prefill replica computed in time."""
    message = f"No prefill replica answered within {limit_s:g} s."
    return Refusal(status=504, message=message, code=TIMEOUT, retry_after_s=RETRY_AFTER_S)


def late_first_token(limit_s: float) -> Refusal:
    """Return the refusal of a request whose first token did not come within *limit_s*."""
    message = f"The first token did not come within {limit_s:g} s of prefill."
    retry_after_s = max(RETRY_AFTER_S, math.ceil(limit_s))
    return Refusal(status=504, message=message, code="kv-wait-timeout", retry_after_s=retry_after_s)


def late_answer(limit_s: float) -> Refusal:
    """Return the refusal of a request whose answer, in one piece, did not come in time."""
    message = f"The answer did not come within {limit_s:g} s."
    return Refusal(status=504, message=message, code="answer-timeout", retry_after_s=RETRY_AFTER_S)


def choose_domain(live: Mapping[str, int | None], tried: str | None) -> str:
    """
    Return the domain to call: the nearest with a live replica that did not just fail.

    Args:
        live: live replicas by domain, the nearest first; `None`: not known yet.
        tried: the domain called before.
    """
    others = [
        domain
        for domain, count in live.items()
        if count is None or count > (1 if domain == tried else 0)
    ]
    alive = [domain for domain, count in live.items() if count]
    return (others or alive or list(live))[0]
