"""Seconds of one engine step, term by term, and the table that a simulation reads them from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.model import draft_layer
from minicluster.specs.step import StepTable
from sizing.latency.collectives import exchange_s
from sizing.latency.communication import step_exchanges
from sizing.latency.op import StepLoad, decode_load, gemm, joined
from sizing.latency.roofline import multiply_dtype, op_time
from sizing.latency.term import Machine, Term, overlapped
from sizing.latency.work import lora_ops, step_ops

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from minicluster.specs.engine import EngineProfile
    from minicluster.specs.slicing import Slicing
    from sizing.latency.communication import Exchange
    from sizing.latency.op import Op


DRAFT = "draft "
"""Begin of the names of the draft head's terms."""


def step_terms(machine: Machine, load: StepLoad, *, slicing: Slicing) -> tuple[Term, ...]:
    """
    Split the seconds of a step into terms.

        t = sum of ops + sum of exchanges + L t_layer + [prompts] L_e t_expert + X t_exchange
            + t_step + B t_seq, at least B t_stream
        (docs/model.md, eq. S5)

    Adapters add the ops of eq. W12. An engine that drafts tokens verifies them in the step, and
    runs its draft head (eq. S10). With two-batch overlap the layers run in two halves where the
    step is large enough (eq. S11).

    Args:
        load: what the step holds on one data-parallel copy, arrays of any shape.
        slicing: how a replica's GPUs share the model.

    Returns:
        Terms whose seconds add up to the step, each of the shape of *load*. With pipeline stages
        that is the way through all of them; `stage_s` is the time between two steps.

    Source:
        Ops run one after another on a stream; sums of op tables predict static batches within
        6 to 12 % (docs/validation.md).

    Ignores:
        Other overlap of communication with compute, and that of the host with the GPU beyond what
        the engine's constants were fitted with.
    """
    engine = machine.engine
    load = verified(load, engine)
    exchanges = _exchanges(machine, load, slicing)
    drafted = _draft_passes(machine, load)
    runs = sum(exchange.repeats for exchange in exchanges)
    for head, passed, repeats in drafted:
        runs += repeats * sum(each.repeats for each in _exchanges(head, passed, slicing))
    terms = (
        *_op_terms(machine, load, slicing),
        *_timed(machine, lora_ops(engine.lora, machine.model, load, tp=slicing.tp)),
        *_network_terms(machine, exchanges),
        *_draft_terms(drafted, slicing),
        *_engine_terms(machine, load, exchanges=runs),
    )
    if engine.two_batch_overlap and slicing.routes_tokens:
        terms = _with_overlap(machine, load, slicing, terms)
    if engine.speculative_tokens:
        exposed = engine.draft_overhead_fraction * (load.sequences > 0)
        waits = exposed * np.asarray(sum(term.seconds for term in terms))
        terms = (*terms, Term("engine between drafts", "S10", waits, launch_s=waits))
    streamed = engine.per_token_stream_s * (load.prompts + load.sequences)
    rest = np.maximum(0.0, streamed - sum(term.seconds for term in terms))
    return *terms, Term("engine streams tokens", "S5", rest, launch_s=rest)


def _with_overlap(
    machine: Machine, load: StepLoad, slicing: Slicing, terms: tuple[Term, ...]
) -> tuple[Term, ...]:
    """
    Return the terms of steps that hold enough tokens in two halves, those of others as they are.

    What a step does once, and its draft head, see all of it (docs/model.md, eq. S11). Kernels for
    prompts run beside compute on SMs of their own, low-latency ones send and receive on all SMs.
    """
    engine, prompts = machine.engine, load.prompts > 0
    least = np.where(prompts, engine.overlap_prompt_tokens, engine.overlap_decode_tokens)
    split = load.tokens >= np.maximum(1, least)
    if not split.any():
        return terms
    layers = machine.model.num_layers
    beside, alone = (
        overlapped(
            _half_terms(each, load.half, slicing),
            layers=layers,
            expert_layers=machine.model.num_expert_layers,
            on_sms=on_sms,
        )
        for each, on_sms in ((_beside_prompts(machine), False), (machine, True))
    )
    halves = {one.name: one.where(prompts, other) for one, other in zip(beside, alone, strict=True)}
    return tuple(
        halves[term.name].where(split, term) if term.name in halves else term for term in terms
    )


def _half_terms(machine: Machine, load: StepLoad, slicing: Slicing) -> Iterator[Term]:
    """Yield the terms of all layers; dispatch and combine hold what an exchange adds to a step."""
    exchanges = _exchanges(machine, load, slicing)
    others = [each for each in exchanges if each.library is None]
    terms = (
        *_op_terms(machine, load, slicing),
        *_network_terms(machine, exchanges),
        *_engine_terms(machine, load, exchanges=sum(each.repeats for each in others)),
    )
    waits = {
        each.name: machine.engine.per_exchange_s * each.repeats * np.ones_like(load.tokens)
        for each in exchanges
        if each.library is not None
    }
    for term in terms:
        wait = waits.get(term.name)
        if wait is not None:
            yield term.plus(replace(term.scaled(0.0), seconds=wait, network_s=wait))
        elif term.name not in ONCE:
            yield term


def _beside_prompts(machine: Machine) -> Machine:
    """Return the machine as it computes beside the kernels that send the tokens of prompts."""
    gpu, library = machine.gpu, machine.engine.all_to_all
    if gpu.num_sms is None or library is None:
        return machine
    left = gpu.num_sms - library.prompt_sms
    peaks = {dtype: peak * left / gpu.num_sms for dtype, peak in gpu.peak_flops_per_s.items()}
    return replace(machine, gpu=replace(gpu, num_sms=left, peak_flops_per_s=peaks))


def verified(load: StepLoad, engine: EngineProfile) -> StepLoad:
    """Return the load of a step that verifies the engine's drafts of every decoded sequence."""
    queries = 1.0 + engine.speculative_tokens
    return replace(load, queries=queries, sampled=queries)


def _draft_passes(machine: Machine, load: StepLoad) -> tuple[tuple[Machine, StepLoad, int], ...]:
    """
    Return the draft head as a machine of its own, what its passes see, and how many see it.

    The first pass sees what the step has computed, prompts as well; each further one a token of
    every sequence.

    Source:
        vLLM 0.29.0 v1/spec_decode: one pass over the tokens of the step, then k - 1 of one token a
        sequence; SGLang 0.5 eagle_worker.py: draft extend, then as many draft steps.
    """
    drafts = machine.engine.speculative_tokens
    if not drafts:
        return ()
    head, none = replace(machine, model=draft_layer(machine.model)), np.zeros_like(load.sequences)
    again = replace(
        load, prompts=none, prompt_tokens=none, cached_tokens=none,
        sequences=load.sequences + load.prompts, queries=1.0, sampled=1.0,
    )  # fmt: skip
    return ((head, replace(load, sampled=1.0), 1), (head, again, drafts - 1))[:drafts]


def _draft_terms(
    passes: Iterable[tuple[Machine, StepLoad, int]], slicing: Slicing
) -> tuple[Term, ...]:
    """
    Sum the terms of all passes of the draft head by name.

        t = sum over passes of ops of one layer + W1 of m x 2 h by 2 h x h + lm_head + exchanges
        (docs/model.md, eq. S10)

    Source:
        DeepSeek-V3 (arXiv 2412.19437), section 2.2: a projection of the hidden state beside the
        next token's embedding, one layer of the model, the shared output head.

    Ignores:
        The projection of three layers' hidden states, and the wider input of attention, of EAGLE-3.
    """
    found: dict[str, Term] = {}
    for head, load, repeats in passes:
        for term in _pass_terms(head, load, slicing):
            part = term.scaled(repeats)
            before = found.get(term.name)
            found[term.name] = part if before is None else before.plus(part)
    return tuple(found.values())


def _pass_terms(head: Machine, load: StepLoad, slicing: Slicing) -> Iterator[Term]:
    """Yield the terms of one pass, `draft` before their names."""
    hidden = head.model.hidden_size
    combine = gemm(
        "combine", "S10", load.tokens, 2 * hidden, hidden, dtype=head.model.attention_dtype,
        repeats=1,
    )  # fmt: skip
    found = (
        *_op_terms(head, load, slicing, combine),
        *_network_terms(head, _exchanges(head, load, slicing)),
    )
    for term in found:
        yield replace(term, name=f"{DRAFT}{term.name}")


def _op_terms(machine: Machine, load: StepLoad, slicing: Slicing, *more: Op) -> Iterator[Term]:
    return _timed(machine, (*more, *_ops(machine, load, slicing)))


def _timed(machine: Machine, ops: Iterable[Op]) -> Iterator[Term]:
    for op in ops:
        time, work = op_time(op, machine.gpu, machine.efficiency), op.total
        yield Term(
            op.name, op.equation, time.seconds, compute_s=time.compute_s, memory_s=time.memory_s,
            launch_s=time.launch_s, flops=work.flops, hbm_bytes=work.hbm_bytes,
            dtype=multiply_dtype(op.dtype, machine.gpu) if "gemm" in op.kind else "bf16",
        )  # fmt: skip


def step_s(machine: Machine, load: StepLoad, *, slicing: Slicing) -> NDArray[np.float64]:
    """Sum the terms of `step_terms` (docs/model.md, eq. S5)."""
    return np.asarray(sum(term.seconds for term in step_terms(machine, load, slicing=slicing)))


def stage_s(machine: Machine, load: StepLoad, *, slicing: Slicing) -> NDArray[np.float64]:
    """
    Seconds between two steps of a pipeline that is kept full: its slowest stage.

        t_stage = (t - t_head) ceil(L / pp) / L + t_head      (docs/model.md, eq. S6)

    Args:
        load: one of the pp batches that are under way at a time.
        slicing: pp stages; one stage is the whole step.

    Returns:
        Seconds; a sequence gets a token every pp times that, or every `step_s` if longer.

    Source:
        Layers dealt out evenly, what is left over to the first stages; lm_head on the last.

    Ignores:
        Bubbles while fewer batches than stages are under way.
    """
    terms = stage_terms(machine, load, slicing=slicing)
    return np.asarray(sum(seconds for _, seconds in terms))


def interval_s(
    machine: Machine, load: StepLoad, *, slicing: Slicing, batches: int
) -> NDArray[np.float64]:
    """
    Seconds between two steps of one batch, with *batches* of them under way in a pipeline.

        max(t, batches t_stage)      (docs/model.md, eq. L5)

    Each has its next step when the slowest stage has served all of them.
    """
    seconds = step_s(machine, load, slicing=slicing)
    if batches == 1:
        return seconds
    return np.maximum(seconds, batches * stage_s(machine, load, slicing=slicing))


def stage_terms(
    machine: Machine, load: StepLoad, *, slicing: Slicing
) -> Iterator[tuple[Term, NDArray[np.float64]]]:
    """Yield each term of a step with its seconds on the slowest stage of a pipeline (eq. S6)."""
    layers = machine.model.num_layers
    share = -(-layers // slicing.pp) / layers
    for term in step_terms(machine, load, slicing=slicing):
        once = term.name in ONCE or term.name.startswith(DRAFT)
        yield term, term.seconds * (1.0 if once else share)


ONCE = (
    "lm_head", "logits gather", "engine per step", "engine per draft", "engine per sequence",
    "engine between drafts", "engine streams tokens",
)  # fmt: skip
"""Terms that one stage of a pipeline pays alone, or every stage pays in full."""


def _ops(machine: Machine, load: StepLoad, slicing: Slicing) -> Iterator[Op]:
    """
    Yield the ops of a step as the engine's kernels do them.

        Q = B min(s, w) 2 N H w / tp instead of 2 K' H where heads are not shared
        (docs/model.md, eq. S7)
    """
    model = machine.model
    group = model.num_heads / model.num_kv_heads
    for op in step_ops(model, load, slicing=slicing):
        unshared = op.kind == "decode attention" and op.name.startswith("window")
        if op.dtype == "fp8" and model.block_scaled:
            yield replace(op, block_scaled=True)
        elif unshared and machine.engine.window_per_query_head:
            yield replace(op, work=replace(op.work, hbm_bytes=op.work.hbm_bytes * group))
        else:
            yield op


def _exchanges(machine: Machine, load: StepLoad, slicing: Slicing) -> tuple[Exchange, ...]:
    engine = machine.engine
    return step_exchanges(
        machine.model, load, slicing=slicing, sends_to_experts=engine.sends_to_experts,
        library=engine.all_to_all,
    )  # fmt: skip


def _network_terms(machine: Machine, exchanges: Iterable[Exchange]) -> tuple[Term, ...]:
    """Every exchange of the step, its fixed part apart (eq. N1, N2, N5)."""
    terms = []
    for exchange in exchanges:
        size = exchange.size_bytes
        tiny = replace(exchange, size_bytes=np.where(size > 0, 1.0, 0.0))
        seconds, fixed = (
            exchange.repeats
            * exchange_s(one, machine.gpu, machine.cluster, engine=machine.engine.name)
            for one in (exchange, tiny)
        )
        fixed, sent = np.minimum(fixed, seconds), np.maximum(0.0, seconds - fixed)
        terms.append(
            Term(exchange.name, exchange.equation, seconds, network_s=sent, launch_s=fixed)
        )
    return tuple(terms)


def _engine_terms(machine: Machine, load: StepLoad, *, exchanges: int) -> tuple[Term, ...]:
    """Host time that the GPU waits for, constants of the engine version (eq. S5)."""
    engine, one = machine.engine, np.ones_like(load.tokens)
    expert_layers = machine.model.num_expert_layers
    prompts = np.where(load.prompts > 0, 1.0, 0.0)
    eager = np.where(load.tokens > engine.captured_tokens, prompts, 0.0)
    terms = {
        "engine per layer": engine.per_layer_s * machine.model.num_layers * one,
        "engine per exchange": engine.per_exchange_s * exchanges * one,
        "engine per expert layer": engine.prompt_expert_layer_s * expert_layers * eager,
        "engine per step": engine.per_step_s * one,
        "engine per draft": engine.per_step_s * engine.speculative_tokens * one,
        "engine per sequence": engine.per_sequence_s * (load.prompts + load.sequences),
    }
    linear = machine.model.linear
    if engine.prompt_compile_s and linear is not None and linear.kind == "delta":
        terms["engine compiles a kernel"] = engine.prompt_compile_s * prompts
    return tuple(Term(name, "S5", seconds, launch_s=seconds) for name, seconds in terms.items())


POINTS_PER_OCTAVE = 3
WHOLE_PROMPTS = 4
"""Typical prompts, one to so many, that the grid holds: steps often compute just these."""
FAR_TOKENS = 4096.0
"""Cached tokens at which the attention of prompts to earlier tokens is evaluated."""
DIGITS = 6
"""Digits of a number in the table: finer than its interpolation."""


def step_table(
    machine: Machine,
    slicing: Slicing,
    *,
    most: tuple[int, int],
    contexts: tuple[float, float],
    prompt_tokens: float,
    batches: int,
) -> StepTable:
    """
    Tabulate the step model (docs/model.md, eq. S9).

    Args:
        most: prompt tokens, and sequences decoded, of a step.
        contexts: shortest and longest mean context of a batch, tokens.
        prompt_tokens: m, computed of a typical prompt: more tokens in a step are several prompts.
        batches: under way in a pipeline at a time (eq. L5).

    Source:
        Of our step model: GEMMs see n + B rows, attention sees prompts and sequences apart.

    Ignores:
        Curvature between grid points, about 1 %, and that of attention over the contexts.
    """
    tokens, sequences = (_octaves(largest) for largest in most)
    whole = prompt_tokens * np.arange(1, WHOLE_PROMPTS + 1)
    tokens = np.unique(_rounded(np.append(tokens, whole[whole < most[0]])))
    if machine.engine.two_batch_overlap and slicing.routes_tokens:
        tokens = _with_step(tokens, machine.engine.overlap_prompt_tokens)
        each = 1 + machine.engine.speculative_tokens
        sequences = _with_step(sequences, -(-machine.engine.overlap_decode_tokens // each))

    n, b = (each.ravel() for each in np.meshgrid(tokens, sequences))
    prompts, batch = tokens[1:], sequences[1:]
    short, long = contexts[0], max(contexts[1], contexts[0] + 1)
    loads = (
        replace(_prompts(n, prompt_tokens, 0.0), sequences=b),
        _prompts(prompts, prompt_tokens, FAR_TOKENS),
        _prompts(prompts, prompt_tokens, 0.0),
        decode_load(batch, short),
        decode_load(batch, long),
    )
    # All at once: most of an op's time is numpy's, however few steps there are.
    seconds = interval_s(machine, joined(loads), slicing=slicing, batches=batches)
    ends = np.cumsum([len(load.prompts) for load in loads])
    fixed_s, behind_s, alone_s, low_s, high_s = np.split(seconds, ends[:-1])
    fixed_s = fixed_s.reshape(len(sequences), len(tokens))
    fixed_s[0, 0] = min(fixed_s[0, 1], fixed_s[1, 0])  # no step holds nothing: only interpolated
    # Where the floors of S5 bind, two contexts cost the same, up to rounding.
    key_s = np.maximum(0.0, behind_s - alone_s) / FAR_TOKENS
    fixed_s[:, 1:] -= key_s * (np.minimum(prompts, prompt_tokens) + 1) / 2
    context_s = np.maximum(0.0, high_s - low_s) / (long - short) / batch
    fixed_s[1:] += (low_s - fixed_s[1:, 0] - context_s * batch * short)[:, None]
    return StepTable(
        tokens=_rounded(tokens),
        sequences=_rounded(sequences),
        fixed_s=tuple(_rounded(row) for row in fixed_s),
        per_key_s=_rounded(np.append(key_s[:1], key_s)),
        per_context_token_s=_rounded(np.append(context_s[:1], context_s)),
    )


def _prompts(tokens: NDArray[np.float64], each: float, cached: float) -> StepLoad:
    """*tokens* of prompts of length *each*, or one chunk of such a prompt, after *cached* ones."""
    none = np.zeros_like(tokens)
    return StepLoad(
        prompts=np.where(tokens > 0, np.maximum(1.0, tokens / each), 0.0),
        prompt_tokens=np.minimum(tokens, each),
        cached_tokens=none + cached,
        sequences=none,
        context_tokens=none + 1,
    )


def _octaves(largest: int) -> NDArray[np.float64]:
    """0, then 1 to *largest*, evenly in its logarithm."""
    points = int(np.ceil(np.log2(largest) * POINTS_PER_OCTAVE)) + 1
    return np.append(0.0, np.geomspace(1.0, largest, points))


def _with_step(grid: NDArray[np.float64], at: int) -> NDArray[np.float64]:
    """Add both sides of a step at *at*, where halves begin, to a grid that reaches it."""
    if not 1 < at <= grid[-1]:
        return grid
    return np.unique(_rounded(np.append(grid, [at - 1, at])))  # as they are written


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Round, so that plans are short."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
