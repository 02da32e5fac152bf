"""Suspected KV transfer stalls: long first tokens that no queue explains, seen by the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.workload.samples import Sample

MIN_STALL_S = 1.0
"""Least TTFT of a suspected stall; a shorter one is ordinary queueing on any endpoint."""

MEDIANS = 5.0
"""Least TTFT of a suspected stall, as a multiple of the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Indices of the requests with a suspected stall, and the TTFT threshold used."""

    threshold_s: float
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of suspected stalls."""
        return len(self.indices)


def find_stalls(samples: Sequence[Sample]) -> Stalls:
    """
    Find requests whose first token took long although no queue explains it.

    Long means a TTFT from send above 1 s and above five times the median. No queue explains it if
    no other request waited meanwhile, or if one that was sent later, and was not long itself,
    overtook it. A queue delays neighbouring requests and is first come, first served; a stalled
    transfer delays one request alone.

    Ignores:
        Replicas with queues of different lengths, where overtaking is natural: with both
        thresholds that long it is rare, and the count says "suspected".
    """
    if not samples:
        return Stalls(threshold_s=MIN_STALL_S, indices=())
    send = np.array([s.send_s for s in samples])
    first = np.array([s.chunk_s[0] if s.chunk_s else s.end_s for s in samples])
    ttft = first - send
    threshold_s = max(MIN_STALL_S, MEDIANS * float(np.median(ttft)))
    long = ttft > threshold_s
    # A refused connection or a bad status ended the wait; it did not stall.
    waited = np.array([bool(s.chunk_s) or s.outcome in {"timeout", "unfinished"} for s in samples])
    stalled = []
    for i in np.flatnonzero(long & waited):
        others = (send < first[i]) & (first > send[i])
        others[i] = False
        overtaken = others & (send > send[i]) & (first < first[i]) & ~long
        if overtaken.any() or not others.any():
            stalled.append(samples[i].index)
    return Stalls(threshold_s=threshold_s, indices=tuple(stalled))
