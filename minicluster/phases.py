"""
The phases of the time to first token: one vocabulary from the prediction to the verdict.

`plan.json` (`ttft_parts_s`), `sizing simulate`, `Server-Timing`, Prometheus metrics,
`samples.jsonl`, `verdict.json` and pages use these names; a screen shows them by `label`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, "NDArray[np.float64]")

INGRESS = "ingress"
"""Everything outside the engines: network, HTTP, routing, failed attempts."""

PREFILL_QUEUE = "prefill_queue"
"""Waiting in the engine that computes the prompt."""

PREFILL = "prefill"
"""The steps that compute the prompt, steps for other prompts between them included."""

DECODE_QUEUE = "decode_queue"
"""Waiting in the decode engine for a place in its batch and its KV cache."""

KV_TRANSFER = "kv_transfer"
"""The pull of the KV cache from the prefill to the decode replica."""

FIRST_DECODE_STEP = "first_decode_step"
"""From the end of the pull to the token: the step in progress, and the request's own."""

TTFT_PHASES = (INGRESS, PREFILL_QUEUE, PREFILL, DECODE_QUEUE, KV_TRANSFER, FIRST_DECODE_STEP)
"""In the order of the system. The last three take nothing where decode computes the prompt."""

DECODE = "decode"
"""From the first token to the last: with `TTFT_PHASES` it makes up the E2E latency."""

QUEUED_PREFILL = "queued_prefill"
KV_FETCH = "kv_fetch"
HANDOFF = "handoff"
SUMS = {
    QUEUED_PREFILL: (PREFILL_QUEUE, PREFILL),
    KV_FETCH: (DECODE_QUEUE, KV_TRANSFER),
    HANDOFF: (KV_FETCH, FIRST_DECODE_STEP),
}
"""
Sums of phases that a server cannot always observe apart.

The endpoint knows when prefill's engine answered, and when the first token came: of a prompt that
decode computes it reports `queued_prefill`, of any other `handoff`. A decode engine that reports
when it scheduled a request splits either. No engine separates the two parts of `kv_fetch`.
"""


def phase_s(phases_s: Mapping[str, Seconds], name: str) -> Seconds | None:
    """
    Return the seconds of a phase or sum, by what is known of its parts; `None`: not known.

    *phases_s* are numbers, or columns of many requests.
    """
    if name in phases_s or name not in SUMS:
        return phases_s.get(name)
    first, second = (phase_s(phases_s, part) for part in SUMS[name])
    return None if first is None or second is None else first + second


def label(name: str) -> str:
    """Return a phase's name as screens and pages write it."""
    return " ".join(word.upper() if word in {"kv", "ttft"} else word for word in name.split("_"))
