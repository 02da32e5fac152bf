"""What simulates a measured row: its system, and its requests, drawn the same every time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.limits import LOOKAHEAD_STEPS, EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.routing import ROUND_ROBIN
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.lengths import length_quantiles
from minicluster.workload.sources import RequestSource, drawn
from sizing.evidence.protocol import PoolSettings, prompt_range_of, protocol_of, sent_earlier
from sizing.latency.collectives import path_coefficients
from sizing.latency.step_table import step_table
from sizing.simulation.system import Path, SimulatedPool, System

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.workload.arrivals import Arrivals
    from sizing.evidence.row import Group, MeasuredRow
    from sizing.evidence.row_config import RowConfig

REQUEST_S = 6.15e-3
"""
An engine's own API server: measured rows have no Ray Serve before it. The 7 ms of configs/engines
are of prompts of some 500 tokens; their tokenisation is counted apart.
"""
TOKENISE_S = 1.7e-6
"""
Per token of a prompt: a byte-level BPE on one core, texts of 100 kB (docs/validation.md, "Prompt
length at the endpoint", 2026-11-23).
"""
REQUESTS_PER_USER = 10
"""InferenceX: prompts per unit of concurrency; of every closed loop whose row does not say."""
OPEN_REQUESTS = 1500
"""Requests of an open loop whose row does not say how many or how long."""
MOST_REQUESTS = 20_000
"""Requests of an open loop that are simulated: enough for a load that settles or never does."""
LARGEST_STEP_TOKENS = 65_536
RATES = -500.0, 501.0
"""Bounds of the rate of a cut exponential distribution, per length of its range. They are not
symmetric, so that no bisection tries the rate 0, which has no exponential."""
BISECTIONS = 50
SEED = 20261120


def row_system(
    row: MeasuredRow, config: RowConfig, *, spare: float = 1.0, slowness: float = 1.0
) -> System:
    """
    Return the system of a row (docs/model.md, eq. V2 to V4).

    Of an aggregated row, one of the equal queues that share its load: a copy of attention, and a
    batch under way in a pipeline. Of split pools, every queue; requests go to them in turn.

    Args:
        spare: factor on the KV cache of an aggregated row.
        slowness: factor on its steps.
    """
    if row.load == "static":
        return System(decode=_static_pool(row, config), path=Path())
    if len(row.groups) == 1:
        [group], protocol = row.groups, protocol_of(row)
        seqs = protocol.max_batch_size if protocol else config.max_num_seqs
        blocks = _kv_blocks(row, config, group, spare)
        pool = _pool(row, config, group, max_num_seqs=seqs, blocks=blocks, slowness=slowness)
        return System(decode=pool, path=Path(request_s=_request_s(row)))
    prefill, decode = row.groups
    pull = path_coefficients(
        config.machine,
        prefill_tp=prefill.slicing.tp,
        decode_tp=decode.slicing.tp,
        tokens=(1 - row.length_jitter / 2) * row.isl,
    )
    decode_pool = _split_pool(row, config, decode)
    return System(
        prefill=_split_pool(row, config, prefill),
        decode=decode_pool,
        path=Path(
            request_s=_request_s(row) + _look_s(row, config, decode_pool),
            transfer_base_s=pull.transfer_base_s,
            transfer_per_token_s=pull.transfer_per_token_s,
        ),
        decode_policy=ROUND_ROBIN,
        prefill_policy=ROUND_ROBIN,
    )


def _request_s(row: MeasuredRow) -> float:
    """Seconds of the API server, with the tokenisation of a mean prompt."""
    return REQUEST_S + TOKENISE_S * (1 - row.length_jitter / 2) * row.isl


def queues_of(row: MeasuredRow) -> int:
    """
    Queues of an aggregated row: replicas, copies of attention, batches under way in a pipeline.

    A static batch is one in all stages.
    """
    [group] = row.groups
    copies = group.replicas * group.slicing.dp
    return copies if row.load == "static" else copies * group.slicing.pp


def _static_pool(row: MeasuredRow, config: RowConfig) -> SimulatedPool:
    """One batch that was measured, so that there was room for it; whole prompts share a step."""
    group = row.groups[0]
    batch = math.ceil(row.amount / queues_of(row))
    prompts = 0 if config.rules.chunked_prefill else batch * row.isl
    tokens = batch * (1 + config.machine.engine.speculative_tokens)
    config = replace(config, token_budget=max(config.token_budget, prompts, tokens))
    blocks = batch * _most_blocks(row, config)
    return _pool(row, config, group, max_num_seqs=batch, blocks=blocks)


def _split_pool(row: MeasuredRow, config: RowConfig, group: Group) -> SimulatedPool:
    """One queue for each attention rank of the role, with what its recipe sets."""
    own = config.pools.get(group.role, PoolSettings())
    config = replace(config, token_budget=own.max_num_batched_tokens or config.token_budget)
    blocks = _kv_blocks(row, config, group, 1.0)
    if own.kv_tokens is not None:
        blocks = min(blocks, own.kv_tokens // config.machine.engine.block_size)
    return _pool(
        row, config, group, max_num_seqs=own.max_num_seqs or config.max_num_seqs, blocks=blocks
    )


def _look_s(row: MeasuredRow, config: RowConfig, decode: SimulatedPool) -> float:
    """Seconds until decode looks at a request, which its prefill waits for (eq. V4)."""
    steps = config.pools.get("decode", PoolSettings()).receive_steps
    if not steps:
        return 0.0
    batch = math.ceil(row.amount / decode.replicas)
    context = round(batch * (1 - row.length_jitter / 2) * (row.isl + row.osl / 2))
    return steps / 2 * decode.step.step_s([], batch, context)


def _kv_blocks(row: MeasuredRow, config: RowConfig, group: Group, spare: float) -> int:
    """Blocks of one queue's KV cache; a row that was measured had room for one request."""
    size = config.machine.engine.block_size
    tokens = row.isl + (row.osl / 2 if group.role == "mixed" else row.osl)
    whole = size * math.ceil(tokens / size)
    kept = config.kv_tokens(group.slicing, tokens) * spare / group.slicing.pp
    return max(math.floor(kept / tokens * whole / size), _most_blocks(row, config))


def _most_blocks(row: MeasuredRow, config: RowConfig) -> int:
    """Blocks of a row's longest request, with the drafts beyond its last step's tokens."""
    engine = config.machine.engine
    ahead = (1 + LOOKAHEAD_STEPS) * engine.speculative_tokens
    known = prompt_range_of(row)
    prompt = row.isl if known is None else known.longest
    return math.ceil((prompt + row.osl + ahead) / engine.block_size)


def _pool(
    row: MeasuredRow,
    config: RowConfig,
    group: Group,
    *,
    max_num_seqs: int,
    blocks: int,
    slowness: float = 1.0,
) -> SimulatedPool:
    """Return the queues of one role; of an aggregated row one, which stands for all."""
    rules, queues = config.rules, group.replicas * group.slicing.dp
    engine = config.machine.engine
    most = max(1, config.token_budget // (1 + engine.speculative_tokens))
    sequences = max_num_seqs = min(max_num_seqs, most)
    if row.load != "open":
        sequences = min(sequences, math.ceil(row.amount / queues))
    mean = 1 - row.length_jitter / 2
    table = step_table(
        config.machine,
        group.slicing,
        most=(LARGEST_STEP_TOKENS, sequences),
        contexts=(mean * row.isl, mean * (row.isl + row.osl)),
        prompt_tokens=max(1.0, mean * row.isl - row.prefix_tokens),
        batches=1 if row.load == "static" else group.slicing.pp,
    )
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        kv_blocks=blocks,
        block_size=engine.block_size,
        mixed_steps=rules.mixed_steps,
        chunked_prefill=rules.chunked_prefill,
        kv_reserved_fraction=rules.kv_reserved_fraction,
        scheduled_ahead=config.async_scheduling,
        receive_steps=config.recipe.receive_steps or 1,
        wait_steps=config.recipe.wait_steps or 0,
        wait_fraction=config.recipe.wait_fraction or 0.0,
        speculative_tokens=engine.speculative_tokens,
        mean_accepted_tokens=engine.mean_accepted_tokens,
    )
    replicas = 1 if group.role == "mixed" else queues
    return SimulatedPool(replicas=replicas, limits=limits, step=PlannedStep(table.scaled(slowness)))


def row_arrivals(row: MeasuredRow, *, queues: int) -> Arrivals:
    """
    Draw the requests that one of *queues* equal queues of a row has.

    A static batch and the first request of every user arrive at once. A loop has as many requests
    as the row or its protocol says (`requests`, or of an open one `duration_s` times the rate).
    """
    share = row.amount / queues
    if row.load == "static":
        return _drawn(row, math.ceil(share), RequestSource(users=math.ceil(share)))
    if row.load == "closed":
        users = math.ceil(share)
        count = users * REQUESTS_PER_USER
        if row.num_requests is not None:
            count = max(users, math.ceil(row.num_requests / queues))
        return _drawn(row, count, RequestSource(users=users))
    protocol = protocol_of(row)
    if protocol is not None:
        arrivals = _drawn(row, math.ceil(share * protocol.stage_s), RequestSource(), share)
        return sent_before(arrivals, but=protocol.cold(row.amount))
    count = OPEN_REQUESTS if row.num_requests is None else math.ceil(row.num_requests / queues)
    arrivals = _drawn(row, min(count, MOST_REQUESTS), RequestSource(), share)
    return sent_before(arrivals, but=0) if sent_earlier(row) else arrivals


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
    known = prompt_range_of(row)
    if known is not None and count > 1:
        quantiles = cut_exponential(row.isl, known.shortest, known.longest, count)
        input_tokens = rng.permutation(quantiles).astype(np.int64)
    arrivals = drawn(workload, source, count=count, seed=SEED)
    return replace(arrivals, input_tokens=input_tokens, output_tokens=output_tokens)


def cut_exponential(mean: float, low: float, high: float, count: int) -> NDArray[np.float64]:
    """
    Return *count* equally likely lengths of an exponential distribution cut to [low, high].

    Of all distributions on a range it is the one of maximum entropy that has the mean: it assumes
    nothing else (docs/model.md, eq. V2).
    """
    share = (mean - low) / (high - low)
    least, most = RATES  # per range; the mean falls with the rate
    for _ in range(BISECTIONS):
        rate = (least + most) / 2
        higher = 1 / rate - 1 / math.expm1(rate) > share
        least, most = (rate, most) if higher else (least, rate)
    levels = (np.arange(count) + 0.5) / count
    return np.rint(low - (high - low) * np.log1p(levels * math.expm1(-rate)) / rate)


def _lengths(nominal: int, jitter: float) -> Lengths:
    """Lengths uniform in [(1 - j) nominal, nominal]."""
    if not jitter:
        return Lengths.fixed(nominal)
    low = max(1, math.floor((1 - jitter) * nominal))
    return Lengths(distribution="uniform", low=low, high=nominal)
