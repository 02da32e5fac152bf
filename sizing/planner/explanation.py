"""The terms of a plan and the memory of its model, each with its equation and source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.kv_cache import kv_bytes_per_token, kv_pages
from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.phases import PREFILL, TTFT_PHASES
from minicluster.specs.parameters import num_active_parameters, parameters
from minicluster.specs.step import StepCoefficients
from minicluster.workload.sources import RequestSource, drawn
from sizing.latency.step import verified
from sizing.latency.work import busiest_share
from sizing.planner import bounds
from sizing.planner.layout import LayoutShape, memory_parts
from sizing.planner.predict import (
    mean_batch,
    planned_models,
    representative_load,
    representative_terms,
)
from sizing.planner.simulated_check import PREDICTION_SEED
from sizing.planner.step_models import StepModels, utilisations
from sizing.simulation.outcome import simulate_system
from sizing.simulation.planned import deployed_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan, Pool, Prediction
    from sizing.latency.term import Term
    from sizing.planner.bounds import OfferedLoad
    from sizing.planner.configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """
    Memory of one GPU of a pool, the fullest one.

    Attributes:
        parts_bytes: what the GPU's memory is divided into (eq. M4), by name; empty on a CPU.
        kv_bytes_per_token: in layers that keep every token (eq. M2).
        state_bytes: that a sequence takes however long it is, in whole blocks (eq. M6, M12).
        block_bytes: of a block of the KV cache in all layers of a group (eq. M12).
        block_tokens: that one holds of layers that keep every token.
        sequences: of mean and of longest length that fit in a replica, by tokens.
    """

    role: str
    parts_bytes: dict[str, float]
    kv_bytes_per_token: float
    state_bytes: float
    block_bytes: float
    block_tokens: int
    sequences: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """
    The model of a plan, and its memory in each pool.

    Attributes:
        parameters: all, without a draft head's.
        active_parameters: that one token is multiplied with.
        layers: that cache, by kind: full, window or chunk, state, draft.
        window_tokens: 0: no layer has a window.
    """

    parameters: int
    active_parameters: int
    layers: dict[str, int]
    window_tokens: int
    pools: tuple[PoolMemory, ...]


def model_memory(plan: Plan, mean_tokens: dict[str, float]) -> ModelMemory:
    """
    Return what a plan's model takes, and the sequences that fit (docs/model.md, eq. M1 to M12).

    Args:
        mean_tokens: of a sequence, by role.
    """
    model = plan.inputs.model
    windows = "chunk" if model.chunked_window else "window"
    layers = {
        "full": model.num_full_layers,
        windows: model.num_window_layers,
        "state": model.num_linear_layers,
        "draft": model.draft.num_layers if model.draft else 0,
    }
    return ModelMemory(
        parameters=parameters(model).total,
        active_parameters=num_active_parameters(model),
        layers={kind: number for kind, number in layers.items() if number},
        window_tokens=model.window_tokens if model.num_window_layers else 0,
        pools=tuple(_pool(plan, pool, mean_tokens[pool.role]) for pool in plan.pools),
    )


def _pool(plan: Plan, pool: Pool, mean_tokens: float) -> PoolMemory:
    model, engine = plan.inputs.model, plan.engine
    pages = kv_pages(
        model,
        slicing=pool.slicing,
        block_size=engine.block_size,
        drafts=engine.speculative_tokens,
    )
    usable = pages.usable_blocks(pool.kv_bytes)
    shape = LayoutShape(slicing=pool.slicing, gpu=pool.gpu)
    lengths = sorted({max(1, round(mean_tokens)), engine.max_model_len})
    return PoolMemory(
        role=pool.role,
        parts_bytes=memory_parts(
            plan.inputs, shape, plan.engine.gpu_memory_utilization, pool.kv_bytes
        ),
        kv_bytes_per_token=kv_bytes_per_token(model, slicing=pool.slicing),
        state_bytes=pages.fixed_blocks * pages.block_bytes,
        block_bytes=pages.block_bytes,
        block_tokens=pages.block_tokens,
        sequences={each: pool.dp * int(usable // pages.blocks(each)) for each in lengths},
    )


TTFT_EQUATION = "Q5"
"""Equation of the phases of TTFT: all are read off the simulation."""

ALONE = "prefill, the mean prompt alone"
OTHERS = "prefill, other lengths and prompts"
"""What the phase takes longer than that: longer prompts, others in its steps, interference."""

STEP = "the decode step below, a token"
WAIT = "waiting for the group's slowest rank"
SHARED = "prompts in steps, uneven batches"
"""What the mean of the simulation is above these: prompts between and in steps, interference."""

WAIT_REQUESTS = 6000
"""Simulated requests of `group_wait_s`: DeepSeek-V3's plan gives 0.227 to 0.238 ms by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTerm:
    """
    One term of a latency or of a step.

    Attributes:
        of: `TTFT`, `TPOT`, `prefill step` or `decode step`.
        share_fraction: of the sum of its group.
        bound: `compute`, `memory bandwidth`, `network` or `launch`; `None` where the term is no op.
        flops: per GPU and step; `None` where the term is no op.
        hbm_bytes: per GPU and step; `None` where the term is no op.
        achieved_fraction: share of the datasheet peak of the resource that binds it.
        hidden_s: of it behind compute, in two-batch overlap; not in `seconds`.
    """

    of: str
    name: str
    equation: str
    seconds: float
    share_fraction: float
    source: str
    bound: str | None = None
    flops: float | None = None
    hbm_bytes: float | None = None
    achieved_fraction: float | None = None
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Shown):
    """
    All terms, and the mean load that they are computed at.

    Attributes:
        mean_batch: sequences in a decode step, averaged over tokens.
        mean_context_tokens: tokens cached per sequence.
        interference: per role, the share by which the other pool slows its steps.
        drafts: of each sequence that a decode step verifies; 0: none.
        tokens_per_step: that a sequence gets of a decode step on average.
        busiest_experts: per step, rows of the busiest rank's experts over the average rank's;
            empty without expert parallelism.
        group_wait_s: added to the mean TPOT because the ranks of a decode group step together.
        memory: parameters, weights and KV cache of the model, and the sequences that fit.
    """

    terms: tuple[ExplainedTerm, ...]
    mean_prompt_tokens: float
    mean_batch: float
    mean_context_tokens: float
    interference: dict[str, float]
    drafts: int
    tokens_per_step: float
    busiest_experts: dict[str, float]
    group_wait_s: float
    memory: ModelMemory


def explain_plan(plan: Plan) -> Explanation:
    """
    Recompute a plan's steps from its inputs, term by term, beside the phases of its TTFT.

    Raises:
        InputError: an edited plan, whose pools do not carry its load.
    """
    (models, chosen), predicted = planned_models(plan), plan.prediction
    if max(utilisations(models, chosen).values()) >= 1:
        raise InputError(
            "plan: pools", str(chosen), "pools that carry the plan's load", "plan again"
        )
    load = models.load(chosen)
    batch = mean_batch(load, chosen, predicted.tpot.mean_s)
    steps = {role: _step_terms(plan, models, chosen, role, batch) for role in ("prefill", "decode")}
    alone_s = {role: sum(term.seconds for term in terms) for role, terms in steps.items()}
    waiting_s = _group_wait_s(plan)
    terms = _terms("TTFT", TTFT_EQUATION, _ttft_parts(predicted, alone_s["prefill"]), _source(plan))
    decode_s = alone_s["decode"] / plan.inputs.engine.tokens_per_step
    tpot_parts = {STEP: decode_s, WAIT: waiting_s} if waiting_s else {STEP: decode_s}
    tpot_parts[SHARED] = predicted.tpot.mean_s - sum(tpot_parts.values())
    if predicted.tpot.mean_s:
        terms += _terms("TPOT", TTFT_EQUATION, tpot_parts, _source(plan))
    terms += [*steps["prefill"], *steps["decode"]]
    prompt, context = float(load.computed_tokens.mean()), load.context[0]
    return Explanation(
        terms=tuple(terms),
        mean_prompt_tokens=prompt,
        mean_batch=batch,
        mean_context_tokens=context,
        interference=bounds.interference(
            load,
            chosen.lanes(chosen.last),
            prefill_busy=predicted.utilisation_fraction.get("prefill", 0.0),
            mean_batch=batch,
        ),
        drafts=plan.inputs.engine.speculative_tokens,
        tokens_per_step=plan.inputs.engine.tokens_per_step,
        busiest_experts=dict(_busiest_experts(models, chosen, batch)),
        group_wait_s=waiting_s,
        memory=model_memory(plan, {"prefill": prompt, "decode": context, "mixed": context}),
    )


def _ttft_parts(predicted: Prediction, alone_s: float) -> dict[str, float]:
    """Return the phases of TTFT in their order, prefill as the step below and the rest."""
    parts = {}
    for name in TTFT_PHASES:
        seconds = predicted.ttft_parts_s.get(name, 0.0)
        own = {ALONE: alone_s, OTHERS: seconds - alone_s} if name == PREFILL else {name: seconds}
        parts.update(own)
    return parts


def _busiest_experts(
    models: StepModels, chosen: Configuration, batch: float
) -> Iterator[tuple[str, float]]:
    """Yield the imbalance that the experts of each step are timed with (eq. W11)."""
    moe = models.inputs.model.moe
    for role in ("prefill", "decode"):
        shape, load = representative_load(models, chosen, role, batch)
        if moe is not None and shape.slicing.ep > 1:
            tokens = verified(load, models.inputs.engine).tokens * shape.slicing.dp
            yield role, float(busiest_share(moe, tokens, groups=shape.slicing.ep))


def _group_wait_s(plan: Plan) -> float:
    """
    Return how much longer mean TPOT is because the ranks of a decode group step together.

    Simulates the plan, and the same ranks with steps of their own (docs/model.md, eq. Q11).
    """
    system = deployed_system(plan.deployment, plan.step_model)
    if system.decode.group == 1:
        return 0.0
    load = plan.inputs.scenario.workload
    arrivals = drawn(load, RequestSource(), count=WAIT_REQUESTS, seed=PREDICTION_SEED)
    together, apart = (
        simulate_system(each, arrivals, seed=PREDICTION_SEED)
        for each in (system, replace(system, decode=replace(system.decode, group=1)))
    )
    return float(
        np.nanmean(together.tpot_s[together.counts]) - np.nanmean(apart.tpot_s[apart.counts])
    )


def _step_terms(
    plan: Plan, models: StepModels, chosen: Configuration, role: str, batch: float
) -> list[ExplainedTerm]:
    inputs, source, load = plan.inputs, _source(plan), models.load(chosen)
    step = load.step_model.of(role)
    if isinstance(step, StepCoefficients):
        return _fitted_terms(step, load, role, batch, source)
    found = representative_terms(models, chosen, role, batch)
    total = sum(float(np.sum(term.seconds)) for term in found)
    return [
        ExplainedTerm(
            of=f"{role} step",
            name=term.name,
            equation=term.equation,
            seconds=float(term.seconds),
            share_fraction=float(term.seconds) / total,
            source=f"engine {inputs.engine.name} {inputs.engine.version}"
            if term.name.startswith("engine")
            else source,
            bound="network" if float(term.hidden_s) else term.bound,
            flops=float(term.flops),
            hbm_bytes=float(term.hbm_bytes),
            achieved_fraction=_achieved(term, plan),
            hidden_s=float(term.hidden_s),
        )
        for term in found
        if float(term.seconds) + float(term.hidden_s) > 0
    ]


def _achieved(term: Term, plan: Plan) -> float | None:
    gpu, seconds = plan.inputs.gpu, float(term.seconds)
    if not seconds:  # all of it is hidden behind others
        return None
    if term.bound == "compute":
        return float(term.flops) / seconds / gpu.peak_flops_per_s[term.dtype]
    if float(term.hbm_bytes) > 0:
        return float(term.hbm_bytes) / seconds / gpu.require("hbm_bytes_per_s")
    return None


def _fitted_terms(
    step: StepCoefficients, load: OfferedLoad, role: str, batch: float, source: str
) -> list[ExplainedTerm]:
    """Return the terms of eq. S1 at the load's mean lengths."""
    if role == "prefill":
        n = float(load.computed_tokens.mean())
        cached = float(load.cached_tokens.mean())
        work, equation = step.per_prefill_token_s * n, "S2"
        beyond = step.beside(0)(n, 0) - step.base_s - max(step.stream_s, work)
        parts = {"compute beyond": beyond} if step.knee_tokens else {}
        parts["attention"] = step.per_pair_s * n * (cached + (n + 1) / 2)
    else:
        work, equation = step.per_sequence_s * batch, "S3"
        read = step.per_context_token_s * batch * load.context[0]
        parts = {"KV cache": read}
    parts = {"base": step.base_s, "weights or compute": max(step.stream_s, work), **parts}
    return _terms(f"{role} step", equation, parts, source)


def _terms(of: str, equation: str, parts_s: dict[str, float], source: str) -> list[ExplainedTerm]:
    """Return the parts of one sum that have one equation and one source."""
    total = sum(parts_s.values())
    return [
        ExplainedTerm(
            of=of,
            name=name,
            equation=equation,
            seconds=value,
            share_fraction=value / total,
            source=source,
        )
        for name, value in parts_s.items()
    ]


def _source(plan: Plan) -> str:
    note = plan.calibration
    return f"{note.name}, {note.date}"
