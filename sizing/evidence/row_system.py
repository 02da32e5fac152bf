"""What simulates a measured row: its system, and its requests, drawn the same every time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.limits import LOOKAHEAD_STEPS
from minicluster.engine_model.planned_limits import kv_bytes_for, pool_pages
from minicluster.plan import EngineRules, Inputs
from minicluster.routing import ROUND_ROBIN
from minicluster.specs.scenario import ClusterChoice, ModelChoice, ScenarioSpec, SearchChoice
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.lengths import length_quantiles
from minicluster.workload.sources import RequestSource, drawn
from sizing.evidence.protocol import PoolSettings, prompt_range_of, protocol_of, sent_earlier
from sizing.planner.configuration import Configuration
from sizing.planner.deployment import deployment
from sizing.planner.error_model import StepErrors
from sizing.planner.layout import Layout, LayoutShape, kv_space
from sizing.planner.step_models import StepModels
from sizing.simulation.planned import deployed_system

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Deployment, Pool
    from minicluster.workload.arrivals import Arrivals
    from sizing.evidence.measured_row import MeasuredRow
    from sizing.evidence.row_config import RowConfig
    from sizing.simulation.system import SimulatedPool, System

LEAST_KV_FRACTION = 0.02
"""Least share of GPU memory taken as KV cache: a row that ran had some, whatever our sum says."""
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
RATES = -500.0, 501.0
"""Bounds of the rate of a cut exponential distribution, per length of its range. They are not
symmetric, so that no bisection tries the rate 0, which has no exponential."""
BISECTIONS = 50
SEED = 20261120


def row_system(
    row: MeasuredRow, config: RowConfig, *, spare: float = 1.0, slowness: float = 1.0
) -> System:
    """
    Return the system of a row, deployed and simulated as a plan is (docs/model.md, eq. V2 to V4).

    Of an aggregated row, one of the equal queues that share its load: a copy of attention, and a
    batch under way in a pipeline. Of split pools, every queue; requests go to them in turn.

    Args:
        spare: factor on the KV cache.
        slowness: factor on steps.
    """
    inputs = row_inputs(row, config)
    chosen = _configuration(row, config, inputs)
    whole = 1 if row.load == "static" else None  # a static batch is one in all stages
    models = StepModels(inputs, batches=whole, sequences=chosen.batch_limit)
    model = models.of(chosen.layout, errors=StepErrors(prefill=slowness, decode=slowness))
    system = deployed_system(_deployment(row, config, inputs, chosen, spare), model)
    if system.prefill is None:
        return replace(system, decode=replace(system.decode, replicas=1, group=1))
    look_s = _look_s(row, config, system.decode)
    return replace(
        system,
        prefill=replace(system.prefill, group=1),
        decode=replace(system.decode, group=1),
        path=replace(system.path, request_s=system.path.request_s + look_s),
        decode_policy=ROUND_ROBIN,
    )


def row_inputs(row: MeasuredRow, config: RowConfig) -> Inputs:
    """Return what a scenario of the row would name; the rate, which no step depends on, is 1."""
    machine = config.machine
    engine = machine.engine
    budgets = [each.max_num_batched_tokens or 0 for each in config.pools.values()]
    budget = max(config.token_budget, *budgets, 0)
    if row.load == "static":  # whole prompts share a step
        batch = math.ceil(row.amount / queues_of(row))
        prompts = 0 if engine.scheduling.chunked_prefill else batch * row.isl
        budget = max(budget, prompts, batch * (1 + engine.speculative_tokens))
    return Inputs(
        scenario=ScenarioSpec(
            model=ModelChoice(id=row.model),
            cluster=ClusterChoice(gpu=machine.gpu.name),
            workload=_workload(row),
            search=SearchChoice(routing=ROUND_ROBIN),
        ),
        model=machine.model,
        gpu=machine.gpu,
        cluster=machine.cluster,
        engine=replace(
            engine,
            max_num_batched_tokens=budget,
            max_num_seqs=config.max_num_seqs,
            # Its own API server, with the tokenisation of a mean prompt.
            per_request_s=REQUEST_S + TOKENISE_S * (1 - row.length_jitter / 2) * row.isl
            if row.load != "static"
            else 0.0,
        ),
        calibration=None,
    )


def _configuration(row: MeasuredRow, config: RowConfig, inputs: Inputs) -> Configuration:
    """Return the pools of a row; of an aggregated one a replica, which stands for all."""
    shapes = {
        each.role: LayoutShape(slicing=each.slicing, gpu=inputs.gpu.name) for each in row.groups
    }
    split = len(row.groups) > 1
    return Configuration(
        layout=Layout(prefill=shapes.get("prefill"), decode=shapes["decode" if split else "mixed"]),
        replicas={each.role: each.replicas if split else 1 for each in row.groups},
        max_batch={each.role: _sequences(row, config, inputs, each.role) for each in row.groups},
    )


def _sequences(row: MeasuredRow, config: RowConfig, inputs: Inputs, role: str) -> int:
    """Return the most sequences of one queue: of a loop no more than its users."""
    engine = inputs.engine_on(inputs.gpu.name)
    own, protocol = config.pools.get(role, PoolSettings()), protocol_of(row)
    most = own.max_num_seqs or engine.max_num_seqs
    if protocol is not None:
        most = protocol.max_batch_size
    if role == "mixed" and row.load != "open":
        most = min(most, math.ceil(row.amount / queues_of(row)))
    budget = own.max_num_batched_tokens or engine.max_num_batched_tokens
    return min(most, max(1, budget // (1 + engine.speculative_tokens)))


def _deployment(
    row: MeasuredRow, config: RowConfig, inputs: Inputs, chosen: Configuration, spare: float
) -> Deployment:
    """Return what a row ran: a plan's deployment with the settings and the rules of its engine."""
    engine, recipe = inputs.engine_on(inputs.gpu.name), config.recipe
    least = inputs.gpu.require("hbm_bytes") * LEAST_KV_FRACTION
    kept = {
        role: spare * max(least, kv_space(inputs, shape, sequences=engine.max_num_seqs))
        for role, shape in chosen.layout.shapes.items()
    }
    found = deployment(inputs, chosen, kv_bytes=kept)
    rules = EngineRules(
        mixed_steps=engine.scheduling.mixed_steps,
        chunked_prefill=engine.scheduling.chunked_prefill,
        kv_reserved_fraction=engine.scheduling.kv_reserved_fraction,
        one_kv_pool=engine.one_kv_pool,
        scheduled_ahead=config.async_scheduling,
        receive_steps=recipe.receive_steps or 1,
        wait_steps=recipe.wait_steps or 0,
        wait_fraction=recipe.wait_fraction or 0.0,
    )
    found = replace(found, engine=replace(found.engine, rules=rules))
    pools = [_measured(row, found, each, config.pools.get(each.role)) for each in found.pools]
    return replace(found, pools=tuple(pools))


def _measured(row: MeasuredRow, deployed: Deployment, pool: Pool, own: PoolSettings | None) -> Pool:
    """Return a pool with its recipe's settings; it has room for a request, as it was measured."""
    own, kept = own or PoolSettings(), pool.kv_bytes
    size = pool_pages(deployed, pool).block_tokens
    if own.kv_tokens is not None:
        kept = min(kept, kv_bytes_for(deployed, pool, own.kv_tokens // size))
    ahead = (1 + LOOKAHEAD_STEPS) * deployed.engine.speculative_tokens
    known = prompt_range_of(row)
    prompt = row.isl if known is None else known.longest
    blocks = math.ceil((prompt + row.osl + ahead) / size)
    if row.load == "static":
        blocks *= pool.max_num_seqs
    return replace(
        pool,
        max_num_batched_tokens=own.max_num_batched_tokens or pool.max_num_batched_tokens,
        kv_bytes=max(kept, kv_bytes_for(deployed, pool, blocks)),
    )


def queues_of(row: MeasuredRow) -> int:
    """
    Queues of an aggregated row: replicas, copies of attention, batches under way in a pipeline.

    A static batch is one in all stages.
    """
    [group] = row.groups
    copies = group.replicas * group.slicing.dp
    return copies if row.load == "static" else copies * group.slicing.pp


def _look_s(row: MeasuredRow, config: RowConfig, decode: SimulatedPool) -> float:
    """Seconds until decode looks at a request, which its prefill waits for (eq. V4)."""
    steps = config.pools.get("decode", PoolSettings()).receive_steps
    if not steps:
        return 0.0
    batch = math.ceil(row.amount / decode.replicas)
    context = round(batch * (1 - row.length_jitter / 2) * (row.isl + row.osl / 2))
    return steps / 2 * decode.step.step_s([], batch, context)


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
    workload = _workload(row, requests_per_s)
    rng = np.random.default_rng(SEED)
    input_tokens, output_tokens = (
        rng.permutation(length_quantiles(_lengths(each, row.length_jitter), count)).astype(np.int64)
        for each in (row.isl, row.osl)
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


def _workload(row: MeasuredRow, requests_per_s: float = 1.0) -> WorkloadSpec:
    inputs, outputs = (_lengths(each, row.length_jitter) for each in (row.isl, row.osl))
    return WorkloadSpec(
        requests_per_s=requests_per_s,
        input_tokens=inputs,
        output_tokens=outputs,
        prefix_tokens=row.prefix_tokens,
    )


def _lengths(nominal: int, jitter: float) -> Lengths:
    """Lengths uniform in [(1 - j) nominal, nominal]."""
    if not jitter:
        return Lengths.fixed(nominal)
    low = max(1, math.floor((1 - jitter) * nominal))
    return Lengths(distribution="uniform", low=low, high=nominal)
