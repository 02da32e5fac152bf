"""KV transfers that stalled, as far as a client can tell them from a queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.workload.samples import Sample

MIN_STALL_S = 1.0
MEDIANS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Requests suspected of a stalled transfer, by index, and the TTFT beyond which one is."""

    threshold_s: float
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many."""
        return len(self.indices)


def find_stalls(samples: Sequence[Sample]) -> Stalls:
    """
    Find requests whose first token took long for no reason that a queue explains.

    Long: TTFT from send above 1 s and above five times the median. No queue: while it waited,
    nobody else did, or somebody sent later and not long overtook it. A queue delays its
    neighbours too and is not overtaken; a transfer that stalls hits one request alone.

    Ignores:
        Several replicas with queues of unlike length, where overtaking is natural: with both
        thresholds that long it is rare, and the count says "suspected".

    """
    if not samples:
        return Stalls(threshold_s=MIN_STALL_S, indices=())
    send = np.array([s.send_s for s in samples])
    first = np.array([s.chunk_s[0] if s.chunk_s else s.end_s for s in samples])
    ttft = first - send
    threshold_s = max(MIN_STALL_S, MEDIANS * float(np.median(ttft)))
    long = ttft > threshold_s
    # A connection refused or a bad status ended the wait, it did not stall.
    waited = np.array([bool(s.chunk_s) or s.outcome in {"timeout", "unfinished"} for s in samples])
    stalled = []
    for i in np.flatnonzero(long & waited):
        others = (send < first[i]) & (first > send[i])
        others[i] = False
        overtaken = others & (send > send[i]) & (first < first[i]) & ~long
        if overtaken.any() or not others.any():
            stalled.append(samples[i].index)
    return Stalls(threshold_s=threshold_s, indices=tuple(stalled))
