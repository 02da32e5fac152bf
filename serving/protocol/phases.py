"""Where a request's time goes, as the servers saw it: plain values that cross processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STALL_S = 1.0
"""A KV transfer that takes longer is counted as stalled."""

PATH_HEADER = "X-Minicluster-Path"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPhases:
    """
    The halves of a request's time to first token, and the way it took.

    Attributes:
        prefill_s: from decode's first call to prefill's answer: routing, queue, prefill and
            attempts that failed; 0 where decode computes the prompt.
        handoff_s: from there to the first token: KV transfer, queue and one decode step; where
            decode computes the prompt, queue and prefill.
        path: `remote`, `retried` (remote, on the second replica), `local` (decode computes the
            prompt, as it should) or `fallback-local` (decode computes it for want of a prefill
            replica).
        reason: why it is not plainly remote; one of few words, fit for a metric's label.
        prefill_replica: name of the replica that prefilled; empty: none.
        decode_replica: name of the replica that answers.
        prefill_queue_s: of `prefill_s`, waiting inside prefill's engine.
        prefill_step_s: of `prefill_s`, from being scheduled there to its token.
    """

    prefill_s: float
    handoff_s: float
    path: str = "remote"
    reason: str = ""
    prefill_replica: str = ""
    decode_replica: str = ""
    prefill_queue_s: float = 0.0
    prefill_step_s: float = 0.0

    @property
    def server_timing(self) -> str:
        """
        The value of a Server-Timing header (W3C), in milliseconds as it wants them.

        `queue` and `step` are parts of `prefill`, by the prefill engine's own clock; a `step` of 0:
        decode computed the prompt.
        """
        parts = {
            "prefill": self.prefill_s,
            "queue": self.prefill_queue_s,
            "step": self.prefill_step_s,
            "handoff": self.handoff_s,
        }
        return ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in parts.items())

    @property
    def way(self) -> str:
        """Path and reason in one line: `retried; reason=prefill-failed`."""
        return f"{self.path}; reason={self.reason}" if self.reason else self.path

    @property
    def headers(self) -> dict[str, str]:
        """What every answer says of its time and way."""
        return {"Server-Timing": self.server_timing, PATH_HEADER: self.way}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChunk:
    """
    An answer with its first token, in one message: each takes milliseconds between processes.

    Attributes:
        first: the first server-sent events, or the whole answer.
    """

    phases: RequestPhases
    first: list[str] | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """
    What a prefill replica answers: where its KV cache is, and where the time went.

    Attributes:
        kv_transfer_params: what decode fetches it with.
        replica: name of the replica.
        queue_s: inside the engine, waiting.
        step_s: inside the engine, from being scheduled to the token.
    """

    kv_transfer_params: dict[str, object]
    replica: str
    queue_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiming:
    """
    One prompt through the prefill pool alone.

    Attributes:
        seconds: inside the replica, everything included.
        queue_s: inside the engine, waiting.
        step_s: inside the engine, from being scheduled to the first token.
    """

    prompt_tokens: int
    seconds: float
    queue_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """
    What the probes saw.

    Attributes:
        stalls: transfers that took longer than `STALL_S` before some rounds in a row did not.
        handoff_s: slowest transfer of the last round, first decode step included.
        ttft_s: of the streamed completion at the end.
    """

    stalls: int
    handoff_s: float
    ttft_s: float
