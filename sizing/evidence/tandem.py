"""A closed loop over prefill and decode pools."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.kv_cache import kv_bytes_per_token
from sizing.evidence.load import REQUEST_S, REQUESTS_PER_USER, requests
from sizing.evidence.replay import ReplayedRequest, Served
from sizing.evidence.slots import decode_slots
from sizing.evidence.steps import seconds_of
from sizing.latency.collectives import kv_pull_s_per_byte
from sizing.latency.load import decode_load, prefill_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.evidence.row import Group, MeasuredRow
    from sizing.evidence.row_config import RowConfig

ROUNDS = 12
"""Of the fixed point between TPOT and the requests in decode; each halves its error."""
LENGTHS = 5
"""Prompt lengths between which prefill times are interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """
    What the requests of a split row pass.

    Attributes:
        servers: prompts prefilled at once, one an attention rank.
        slots: requests that decode at once.
        request_s: API server.
        prefill_s: seconds of a prompt by its tokens.
        pull_s: seconds until its KV cache has moved.
    """

    servers: int
    slots: int
    request_s: float
    prefill_s: Callable[[int], float]
    pull_s: float


def tandem(row: MeasuredRow, config: RowConfig) -> list[Served]:
    """
    Users at prefill ranks, a KV pull and decode slots (docs/model.md, eq. V4).

        TTFT = request_s + wait for a rank + s + pull + wait for a slot,
        TPOT = t(b, context),  b = min(slots, C D / (D + TTFT)) / ranks,  D = osl TPOT

    Args:
        row: a disaggregated closed row.
        config: its machine.

    Returns:
        Every request.

    Source:
        Dynamo's order: prompt first, then a decode replica; its first token is only seen once
        that has a slot.

    Ignores:
        Prompts prefilled together on a rank, KV cache that prefill keeps until it is pulled.

    """
    mean = 1 - row.length_jitter / 2
    users = max(1, int(row.amount))
    pools = _pools(row, config)
    decode = row.groups[1]
    ranks = decode.replicas * decode.slicing.dp
    drawn = requests(
        users * REQUESTS_PER_USER,
        isl=row.isl,
        osl=row.osl,
        jitter=row.length_jitter,
        prefix=row.prefix_tokens,
    )
    context = mean * (row.isl + row.osl / 2)
    busy, tpot, served = float(min(users, pools.slots)), 0.0, list[Served]()
    for _ in range(ROUNDS):
        load = decode_load(max(1.0, busy / ranks), context)
        tpot = float(seconds_of(config.machine, load, decode.slicing))
        served = passed(pools, drawn, users, tpot)
        stay = mean * row.osl * tpot
        ttft = float(np.mean([each.first_s - each.sent_s for each in served]))
        busy = (busy + min(float(pools.slots), users * stay / (stay + ttft))) / 2
    return served


def passed(
    pools: Pools, drawn: Sequence[ReplayedRequest], users: int, tpot_s: float
) -> list[Served]:
    """Let every request pass both pools, first come first served; all users start at once."""
    sending = [0.0] * users
    prefill = [0.0] * pools.servers
    decode = [0.0] * pools.slots
    served = []
    for request in drawn:
        sent = heapq.heappop(sending)
        begins = max(sent + pools.request_s, heapq.heappop(prefill))
        prefilled = begins + pools.prefill_s(request.computed)
        heapq.heappush(prefill, prefilled)
        first = max(prefilled + pools.pull_s, heapq.heappop(decode))
        last = first + (request.output - 1) * tpot_s
        heapq.heappush(decode, last)
        heapq.heappush(sending, last)
        served.append(Served(sent, first, last, request.output))
    return served


def _pools(row: MeasuredRow, config: RowConfig) -> Pools:
    """Both pools of a split row."""
    prefill, decode = row.groups
    tokens = np.linspace((1 - row.length_jitter) * row.isl, row.isl, LENGTHS) - row.prefix_tokens
    tokens = np.maximum(1.0, tokens)
    times = [_prefill_s(row, config, prefill, each) for each in tokens]
    return Pools(
        servers=prefill.replicas * prefill.slicing.dp,
        slots=decode_slots(row, config),
        request_s=REQUEST_S,
        prefill_s=lambda n: float(np.interp(n, tokens, times)),
        pull_s=_pull_s(config, prefill, decode, (1 - row.length_jitter / 2) * row.isl),
    )


def _prefill_s(row: MeasuredRow, config: RowConfig, group: Group, new: float) -> float:
    """Seconds of one prompt alone, in chunks of the budget."""
    chunks = math.ceil(new / config.token_budget) if config.rules.chunked_prefill else 1
    sizes = np.full(chunks, new / chunks)
    load = prefill_load(sizes, row.prefix_tokens + np.cumsum(sizes) - sizes)
    return float(seconds_of(config.machine, load, group.slicing).sum())


def _pull_s(config: RowConfig, prefill: Group, decode: Group, tokens: float) -> float:
    """Seconds of one KV pull between ranks (eq. N4)."""
    m = config.machine
    per_byte = kv_pull_s_per_byte(prefill.slicing.tp, decode.slicing.tp, m.gpu, m.cluster)
    size = tokens * kv_bytes_per_token(m.model, tp=decode.slicing.tp)
    return m.engine.transfer_base_s + size * per_byte
