"""The requests of a measured row's load, drawn the same every time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sizing.evidence.replay import ReplayedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUESTS_PER_USER = 10
"""InferenceX: prompts per unit of concurrency; taken for every closed loop."""
OPEN_REQUESTS = 1500
REQUEST_S = 7.0e-3
"""An engine's own API server: measured rows have no Ray Serve before it (configs/engines)."""
CACHE_BLOCK = 16
"""Tokens that a prefix cache finds or misses together (vLLM)."""
SEED = 20261120


def requests(
    count: int, *, isl: int, osl: int, jitter: float = 0.0, prefix: int = 0
) -> list[ReplayedRequest]:
    """
    Draw requests with lengths uniform in [(1 - j) nominal, nominal].

    Args:
        count: how many.
        isl: nominal prompt tokens.
        osl: nominal output tokens.
        jitter: j, 0 for fixed lengths.
        prefix: prompt tokens that are cached already.

    """
    draw = np.random.default_rng(SEED)
    low_in, low_out = (max(1, math.floor((1 - jitter) * each)) for each in (isl, osl))
    prompts = draw.integers(low_in, isl, count, endpoint=True)
    outputs = draw.integers(low_out, osl, count, endpoint=True)
    cached = np.minimum(prefix, prompts - 1)
    return [
        ReplayedRequest(computed=int(n - p), cached=int(p), output=int(o))
        for n, p, o in zip(prompts, cached, outputs, strict=True)
    ]


def repeated(drawn: Sequence[ReplayedRequest], cold: int) -> list[ReplayedRequest]:
    """
    Prompts that were sent before, and are in the prefix cache: all but the first ones.

    The last token is always computed: a hit is the whole blocks before it (docs/model.md, eq. Q4).

    Args:
        drawn: requests.
        cold: how many of them, from the first, are new.

    """
    found = list(drawn[:cold])
    for each in drawn[cold:]:
        prompt = each.computed + each.cached
        hit = (prompt - 1) // CACHE_BLOCK * CACHE_BLOCK
        found.append(each._replace(computed=prompt - hit, cached=hit))
    return found


def arrivals(count: int, requests_per_s: float) -> list[float]:
    """Draw Poisson arrivals, seconds from the start."""
    draw = np.random.default_rng(SEED + 1)
    return np.cumsum(draw.exponential(1 / requests_per_s, count)).tolist()  # type: ignore[no-any-return]
