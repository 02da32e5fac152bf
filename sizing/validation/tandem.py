"""A closed loop over prefill and decode pools."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.collectives import kv_pull_s_per_byte
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.memory import kv_bytes_per_token
from sizing.validation.load import REQUESTS_PER_USER
from sizing.validation.steps import seconds_of

if TYPE_CHECKING:
    from sizing.validation.row import Group, Row
    from sizing.validation.subject import Subject

ROUNDS = 60
"""Of the fixed point; it halves its error a round."""
TAIL = 0.99


def tandem(row: Row, subject: Subject) -> tuple[float, float, float]:
    """
    Users at a prefill pool, a KV pull and a decode pool (docs/model.md, eq. V4).

        TTFT = request_s + W + s + pull,  TPOT = t(b, context),  b = C D / (D + TTFT) / ranks,
        W = waits of a closed network with c servers of s and a think time D (mean value analysis),
        plus the first wave, (C / c - 1) s / 2 of one request in ten

    Args:
        row: a disaggregated closed row.
        subject: its machine.

    Returns:
        Mean TTFT, mean TPOT, p99 of TTFT.

    Source:
        Reiser and Lavenberg (mean value analysis); Seidmann et al. for several servers.

    Ignores:
        Variance of lengths, prompts prefilled together, a decode pool without room.

    """
    prefill, decode = row.groups
    mean = 1 - row.length_jitter / 2
    isl, osl = row.isl * mean, row.osl * mean
    m = subject.machine
    servers = prefill.replicas * prefill.slicing.dp
    ranks = decode.replicas * decode.slicing.dp
    service = _prefill_s(row, subject, prefill, isl)
    pull = _pull_s(subject, prefill, decode, isl)
    users = max(1, int(row.amount))
    ttft, tpot = service, 0.0
    for _ in range(ROUNDS):
        stay = osl * tpot
        batch = max(1.0, users / ranks * (stay / (stay + ttft) if stay else 1.0))
        step = float(seconds_of(m, decode_load(batch, isl + osl / 2), decode.slicing))
        tpot = (tpot + step) / 2 if tpot else step
        steady = _closed_wait_s(users, servers, service, osl * tpot + pull)
        first = max(0.0, users / servers - 1) * service / 2
        wait = steady + max(0.0, first - steady) / REQUESTS_PER_USER
        ttft = m.engine.per_request_s + wait + service + pull
    tail = max(wait, 2 * first * (1 - (1 - TAIL) * REQUESTS_PER_USER))
    return ttft, tpot, ttft - wait + tail


def _prefill_s(row: Row, subject: Subject, group: Group, isl: float) -> float:
    """Seconds of one prompt alone, in chunks of the budget."""
    new = max(1.0, isl - row.prefix_tokens)
    chunks = math.ceil(new / subject.token_budget) if subject.rules.chunks else 1
    sizes = np.full(chunks, new / chunks)
    load = prefill_load(sizes, row.prefix_tokens + np.cumsum(sizes) - sizes)
    return float(seconds_of(subject.machine, load, group.slicing).sum())


def _pull_s(subject: Subject, prefill: Group, decode: Group, tokens: float) -> float:
    """Seconds of one KV pull between ranks (eq. N4)."""
    m = subject.machine
    per_byte = kv_pull_s_per_byte(prefill.slicing.tp, decode.slicing.tp, m.gpu, m.cluster)
    size = tokens * kv_bytes_per_token(m.model, tp=decode.slicing.tp)
    return m.engine.transfer_base_s + size * per_byte


def _closed_wait_s(users: int, servers: int, service: float, think: float) -> float:
    """Mean wait at *servers* of a closed network, by mean value analysis."""
    queue = 0.0
    fast = service / servers
    delay = service - fast
    held = 0.0
    for n in range(1, users + 1):
        held = fast * (1 + queue)
        queue = n * held / (held + delay + think)
    return max(0.0, held + delay - service)
