"""The requests of a measured row's load, drawn the same every time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import length_quantiles
from minicluster.workload.sources import RequestSource, drawn
from sizing.evidence.protocol import protocol_of

if TYPE_CHECKING:
    from minicluster.workload.arrivals import Arrivals
    from sizing.evidence.row import MeasuredRow

REQUESTS_PER_USER = 10
"""InferenceX: prompts per unit of concurrency; taken for every closed loop."""
OPEN_REQUESTS = 1500
"""Requests of an open loop whose row does not say how many or how long."""
MOST_REQUESTS = 20_000
"""Requests of an open loop that are simulated: enough for a load that settles or never does."""
SEED = 20261120


def row_arrivals(row: MeasuredRow, *, queues: int) -> Arrivals:
    """
    Draw the requests that one of *queues* equal queues of a row has.

    A static batch and the first request of every user arrive at once. An open loop has as many
    requests as the row or its protocol says (`requests`, or `duration_s` times the rate).
    """
    share = row.amount / queues
    if row.load == "static":
        return _drawn(row, math.ceil(share), RequestSource(users=math.ceil(share)))
    if row.load == "closed":
        users = math.ceil(share)
        return _drawn(row, users * REQUESTS_PER_USER, RequestSource(users=users))
    protocol = protocol_of(row)
    if protocol is not None:
        arrivals = _drawn(row, math.ceil(share * protocol.stage_s), RequestSource(), share)
        return sent_before(arrivals, but=protocol.cold(row.amount))
    count = OPEN_REQUESTS if row.num_requests is None else math.ceil(row.num_requests / queues)
    return _drawn(row, min(count, MOST_REQUESTS), RequestSource(), share)


def one_request(row: MeasuredRow) -> Arrivals:
    """Return one request of a row, alone."""
    return _drawn(row, 1, RequestSource(users=1))


def sent_before(arrivals: Arrivals, *, but: int) -> Arrivals:
    """Return requests whose prompts were sent before, and are cached, *but* the first ones."""
    prefix_tokens = arrivals.input_tokens.copy()
    if arrivals.prefix_tokens is not None:
        prefix_tokens[:but] = arrivals.prefix_tokens[:but]
    return replace(arrivals, prefix_tokens=prefix_tokens)


def _drawn(
    row: MeasuredRow, count: int, source: RequestSource, requests_per_s: float = 1.0
) -> Arrivals:
    """Draw requests; lengths are quantiles in random order, so that a short run has their mean."""
    inputs, outputs = (_lengths(each, row.length_jitter) for each in (row.isl, row.osl))
    workload = WorkloadSpec(
        requests_per_s=requests_per_s,
        input_tokens=inputs,
        output_tokens=outputs,
        prefix_tokens=row.prefix_tokens,
    )
    rng = np.random.default_rng(SEED)
    input_tokens, output_tokens = (
        rng.permutation(length_quantiles(each, count)).astype(np.int64)
        for each in (inputs, outputs)
    )
    arrivals = drawn(workload, source, count=count, seed=SEED)
    return replace(arrivals, input_tokens=input_tokens, output_tokens=output_tokens)


def _lengths(nominal: int, jitter: float) -> Lengths:
    """Lengths uniform in [(1 - j) nominal, nominal]."""
    if not jitter:
        return Lengths.fixed(nominal)
    low = max(1, math.floor((1 - jitter) * nominal))
    return Lengths(distribution="uniform", low=low, high=nominal)
