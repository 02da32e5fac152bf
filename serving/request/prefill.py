"""Where a prompt is computed: which prompts decode computes alone, and the retries of prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.protocol.messages import LocalPrefill, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.protocol.endpoint_config import EndpointConfig

ATTEMPTS = 2
"""Attempts per request: the client has received nothing yet, so another replica may be tried."""

RETRY_AFTER_S = 5.0
"""Retry-After where prefill fails: Ray Serve needs as long for a new replica."""

NO_REPLICA, DIED, TIMEOUT = "no-prefill-replica", "prefill-failed", "prefill-timeout"
"""Why prefill did not answer; values of headers and metrics."""

DECODE_FAILED = "decode-failed"
"""Why a request was answered by a second replica: the first was gone before its first token."""

PULL_FAILED = "kv-pull-failed"
"""Why decode computed a prompt that prefill had computed: its KV cache was lost on its way."""

UNAVAILABLE = {
    code: Refusal(
        status=503, message=f"{what}; try again later.", code=code, retry_after_s=RETRY_AFTER_S
    )
    for code, what in {
        "no_replica": "No replica can take the request",
        "engine-died": "The engine died",
        NO_REPLICA: "No prefill replica is up",
        DIED: "Prefill failed",
    }.items()
}
"""The refusals of requests that another replica, or a later one, could answer, by their codes."""

NO_ANSWERING_REPLICA, ENGINE_DIED = UNAVAILABLE["no_replica"], UNAVAILABLE["engine-died"]

LATE = {
    TIMEOUT: "No prefill replica answered within {:g} s.",
    "kv-wait-timeout": "The first token did not come within {:g} s of prefill.",
    "answer-timeout": "The answer did not come within {:g} s.",
    "token-timeout": "No event came within {:g} s of the one before.",
}
"""The message for a client whose request exceeded a time limit, by the code of the refusal."""

MAX_TOKEN_BYTES = 64
"""Longest usual token of any tokenizer: a text longer than this times the threshold exceeds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttempt:
    """
    The decision to call a prefill replica.

    Attributes:
        patience_s: after which the call is given up if its replica answers no other meanwhile.
        timeout_s: after which it is given up.
    """

    patience_s: float
    timeout_s: float


def must_be_local(body: Mapping[str, Any]) -> LocalPrefill | None:
    """
    Return why decode has to compute the prompt itself; `None`: prefill may.

    A KV cache can be fetched only once, so several answers cannot share one; log-probabilities of
    the prompt need its logits, which stay where they were computed (vllm #50792: asking decode for
    them stops it).

    Args:
        body: a request that `serving.request.validation.check` accepted.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    reasons = {
        "beam-search": bool(body.get("use_beam_search")),
        "n": (body.get("n") or 1) > 1,
        "prompt-list": several,
        "prompt-logprobs": body.get("prompt_logprobs") is not None,
        "echo": bool(body.get("echo")),
    }
    return next((LocalPrefill(reason=reason) for reason, holds in reasons.items() if holds), None)


def may_be_short(body: Mapping[str, Any], threshold_tokens: int) -> bool:
    """Return whether counting a prompt's tokens could find it within the threshold."""
    if threshold_tokens <= 0:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt) <= threshold_tokens
    if isinstance(prompt, str):
        return len(prompt) <= threshold_tokens * MAX_TOKEN_BYTES
    messages = body.get("messages")
    length = sum(len(str(each)) for each in messages) if isinstance(messages, list) else 0
    return length <= threshold_tokens * MAX_TOKEN_BYTES


def next_step(
    failures: Sequence[str], *, live: int | None, spent_s: float, config: EndpointConfig
) -> PrefillAttempt | LocalPrefill | Refusal:
    """
    Decide the next step of a request whose prompt is not computed yet.

    If another replica is live, the first attempt has half of the time to answer, so that a replica
    that hangs leaves enough for the second attempt. One that answers other requests meanwhile does
    not hang: it has a queue, as the others have, and a second attempt would double its load.

    Args:
        failures: reasons of the attempts so far, `DIED` or `TIMEOUT`.
        live: live prefill replicas; `None`: not known yet.
        spent_s: seconds since the first attempt began.
        config: deadline and fallback.
    """
    if live == 0:
        return _without_prefill(NO_REPLICA, spent_s, config)
    left_s = config.prefill_deadline_s - spent_s
    if failures and (len(failures) >= ATTEMPTS or left_s <= 0):
        return _without_prefill(failures[-1], spent_s, config)
    last = live == 1 or bool(failures)
    return PrefillAttempt(patience_s=left_s if last else left_s / 2, timeout_s=left_s)


def _without_prefill(reason: str, spent_s: float, config: EndpointConfig) -> LocalPrefill | Refusal:
    if config.routing.fallback == "local":
        return LocalPrefill(path="fallback-local", reason=reason, seconds=spent_s)
    return UNAVAILABLE.get(reason) or late(reason, config.prefill_deadline_s)


def may_retry(refusal: Refusal, spent_s: float, config: EndpointConfig) -> bool:
    """
    Return whether another replica may answer a request that one has refused.

    Only where the replica is gone, and while there is time for another attempt: 504 and refusals
    of the request itself would be the same elsewhere.

    Args:
        refusal: before the first token.
        spent_s: seconds since the request arrived.
        config: deadlines.
    """
    return refusal in (NO_ANSWERING_REPLICA, ENGINE_DIED) and spent_s < config.prefill_deadline_s


def late(code: str, limit_s: float) -> Refusal:
    """Return the refusal of a request that missed the time limit of *code*, a key of `LATE`."""
    message = LATE[code].format(limit_s)
    waits_s = math.ceil(limit_s) if code == "kv-wait-timeout" else 0
    return Refusal(
        status=504, message=message, code=code, retry_after_s=max(RETRY_AFTER_S, waits_s)
    )


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
