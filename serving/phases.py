"""Where a request's time goes, as the servers saw it: plain values that cross processes."""

from __future__ import annotations

from dataclasses import dataclass

STALL_S = 1.0
"""A KV transfer that takes longer is counted as stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """
    The two halves of a request's time to first token.

    Attributes:
        prefill_s: from decode's call to prefill's answer: routing, queue and prefill.
        handoff_s: from there to the first token: KV transfer, queue and one decode step.
    """

    prefill_s: float
    handoff_s: float

    @property
    def server_timing(self) -> str:
        """The value of a Server-Timing header (W3C), in milliseconds as it wants them."""
        return f"prefill;dur={self.prefill_s * 1e3:.1f}, handoff;dur={self.handoff_s * 1e3:.1f}"


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
