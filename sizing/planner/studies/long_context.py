"""One long prompt on an idle system: GPUs by a rule of thumb, and by the whole model."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.config import parse, read_toml
from minicluster.engine_model.kv_cache import kv_pages
from minicluster.engine_model.parallelism import expert_rule, tp_rule
from minicluster.errors import InputError
from minicluster.specs.checks import Count, Fraction, Spec
from minicluster.specs.gpu import NumberSource
from minicluster.specs.slicing import Slicing
from sizing.catalog.folder import find_file
from sizing.latency.collectives import CROSSES
from sizing.latency.memory import kv_space_bytes
from sizing.latency.op import decode_load, prefill_load
from sizing.latency.roofline import multiply_dtype
from sizing.latency.step import DRAFT, stage_terms, step_s, step_terms
from sizing.latency.term import Machine
from sizing.planner.edge import least
from sizing.planner.layout import legal_degrees, takes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Inputs
    from sizing.latency.term import Term


FINEST = 512
"""Tokens of the smallest chunk that is tried: finer ones read the weights too often to pay."""

GROUPS = ("matrix multiplications", "attention", "elementwise", "collectives", "engine")
BUBBLE = "pipeline bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrefill:
    """
    One prompt on its way through all stages.

    Attributes:
        seconds: from the first chunk's start to the last one's end.
        parts_s: by group of terms and the pipeline bubble; they add up to `seconds`.
    """

    seconds: float
    chunks: int
    parts_s: dict[str, float]


def chunked_prefill(machine: Machine, tokens: int, *, slicing: Slicing) -> ChunkedPrefill:
    """
    Time the prefill of one prompt in an empty system, in the number of chunks that is fastest.

        TTFT = sum_i s_i + (pp - 1) max_i s_i, s_i = t_stage of chunk i after the chunks before
        it; the last term is the pipeline bubble      (docs/model.md, eq. S8)

    Args:
        machine: model, GPU, cluster, engine; no chunk exceeds what it takes of a prompt in a step.

    Source:
        Makespan of a proportionate flow shop: every stage takes as long for a chunk as the
        others. Chunked pipeline parallelism: Mooncake (arXiv 2407.00079), section 5.1.

    Ignores:
        Stages that wait for the link while they could compute; chunks of unequal length, which
        would even out what later chunks attend to.
    """
    fewest = -(-tokens // machine.engine.prompt_tokens_per_step)
    most = max(fewest, tokens // FINEST) if slicing.pp > 1 else fewest
    counts = sorted({*np.geomspace(fewest, most, 12).round().astype(int).tolist()})
    tried = (_in_chunks(machine, tokens, count, slicing) for count in counts)
    return min(tried, key=lambda found: found.seconds)


def _in_chunks(machine: Machine, tokens: int, count: int, slicing: Slicing) -> ChunkedPrefill:
    size = tokens / count
    load = prefill_load(np.full(count, size), np.arange(count) * size)
    stage = np.zeros(count)
    parts = dict.fromkeys((*GROUPS, BUBBLE), 0.0)
    for term, seconds in stage_terms(machine, load, slicing=slicing):
        stage += seconds
        parts[group_of(term)] += float(np.sum(seconds))
    parts[BUBBLE] = (slicing.pp - 1) * float(stage.max())
    return ChunkedPrefill(seconds=sum(parts.values()), chunks=count, parts_s=parts)


def group_of(term: Term) -> str:
    """Name the group of a term, of `GROUPS`."""
    if term.equation[0] in "NX":
        return "collectives"
    if term.name.startswith("engine"):
        return "engine"
    name = term.name.removeprefix(DRAFT)
    if "attention" in name or name.startswith(("index", "linear")):
        return "attention"
    return "elementwise" if term.equation == "W6" else "matrix multiplications"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRule(Spec):
    """
    One file of `configs/presets`.

    Attributes:
        compute_fraction: of the dense peak that every GPU achieves.
        powers_of_two: whether GPUs come in powers of two only.
        most_gpus: no answer is wider.
    """

    name: str
    compute_fraction: Fraction
    powers_of_two: bool
    most_gpus: Count
    sources: tuple[NumberSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAnswer:
    """GPUs by the rule: exactly, and as they come; `None`: more than the rule goes to."""

    exact: float
    gpus: int | None


def find_rule(name: str) -> ComputeRule:
    """
    Read a rule by its name, or from a file like those of `configs/presets`.

    Raises:
        InputError: no such rule; the nearest name is said.
    """
    expectation = "a rule of configs/presets"
    path = find_file("presets", name, place="--preset", expectation=expectation)
    return parse(ComputeRule, read_toml(path), place=path.name)


def gpus_by_compute(
    rule: ComputeRule, flops: float, seconds: float, peak_flops_per_s: float
) -> RuleAnswer:
    """
    Count the GPUs whose compute does *flops* in *seconds*.

        g = F / (e P T), up to the next power of two      (docs/model.md, eq. E1)

    Args:
        rule: e.
        flops: F, of the whole prompt.
        seconds: T, the limit on TTFT.
        peak_flops_per_s: P, dense.

    Source:
        `configs/presets`.

    Ignores:
        Memory, networks, queues, kernels that achieve more or less.
    """
    exact = flops / (rule.compute_fraction * peak_flops_per_s * seconds)
    gpus = -int(-exact // 1)
    if rule.powers_of_two:
        gpus = 1 << max(0, gpus - 1).bit_length()
    return RuleAnswer(exact=exact, gpus=gpus if gpus <= rule.most_gpus else None)


SIZES = "sizes in powers of two"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """
    The times of one prompt on one layout.

    Attributes:
        ttft_s: prefill in chunks through all stages (docs/model.md, eq. S8).
        tpot_s: seconds per token of this one sequence.
        parts_s: `ttft_s` by group of terms; the pipeline bubble is one of them.
        tpot_parts_s: `tpot_s` by the same groups.
        tpot_by_library_s: `tpot_s` if another library than NCCL ran the all-reduces between HB
            domains.
        fits: whether memory holds weights and sequence; the times are computed in any case.
    """

    layout: str
    gpus: int
    ttft_s: float
    tpot_s: float
    chunks: int
    parts_s: dict[str, float]
    tpot_parts_s: dict[str, float]
    tpot_by_library_s: dict[str, float]
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CostDifference:
    """
    The term on which the rule and the model disagree.

    Attributes:
        at: the model's fastest layout on as many GPUs as the rule takes, or goes up to.
        term: the term with the largest excess in the direction of the disagreement.
        excess_s: seconds by the model less seconds by the rule, per term.
    """

    at: Timed
    term: str
    excess_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """
    The GPUs for one prompt length, by rule and by model.

    Attributes:
        flops: FLOPs of the whole prompt by group of terms.
        rule: GPUs by compute only.
        fewest: layout with the fewest GPUs that holds TTFT and TPOT; `None`: none in the budget.
        difference: `None` where both answers are the same number of GPUs, or both none.
    """

    tokens: int
    flops: dict[str, float]
    rule: RuleAnswer
    layouts: tuple[Timed, ...]
    fewest: Timed | None
    difference: CostDifference | None


def long_prompt(
    inputs: Inputs, tokens: int, slicings: Sequence[Slicing], rule: ComputeRule
) -> LongPrompt:
    """
    Size an idle system for the TTFT of one prompt, by the rule and by the model.

    Args:
        inputs: model, GPU, cluster and the SLO's TTFT.

    Raises:
        InputError: an impossible prompt or layout, or a machine without step times.

    Ignores:
        Request overhead and KV transfer: the prefill replica emits the first token.
    """
    _check(inputs, tokens, slicings)
    counted: dict[str, float] = defaultdict(float)
    for term in step_terms(Machine.of(inputs), prefill_load(tokens), slicing=Slicing()):
        counted[group_of(term)] += float(term.flops)
    flops = {name: each for name, each in counted.items() if each}
    dtype = multiply_dtype(inputs.model.weight_dtype, inputs.gpu)
    peak = inputs.gpu.peak_flops_per_s[dtype]
    by_rule = gpus_by_compute(rule, sum(flops.values()), inputs.scenario.slo.ttft_s, peak)
    fewest = _fewest(inputs, tokens)
    difference = None
    if (fewest and fewest.gpus) != by_rule.gpus:
        shared = by_rule.gpus or rule.most_gpus
        per_flop = 1 / (rule.compute_fraction * peak * shared)
        by_rule_s = {name: each * per_flop for name, each in flops.items()}
        difference = _difference(inputs, tokens, (shared, by_rule.exact), by_rule_s, fewest)
    return LongPrompt(
        tokens=tokens,
        flops=flops,
        rule=by_rule,
        layouts=tuple(timed(inputs, tokens, slicing) for slicing in slicings),
        fewest=fewest,
        difference=difference,
    )


def timed(inputs: Inputs, tokens: int, slicing: Slicing) -> Timed:
    """Time one layout."""
    on = Machine.of(inputs)
    prefill = chunked_prefill(on, tokens, slicing=slicing)
    token = token_parts_s(on, tokens, slicing=slicing)
    return Timed(
        layout=str(slicing),
        gpus=slicing.gpus,
        ttft_s=prefill.seconds,
        tpot_s=sum(token.values()),
        chunks=prefill.chunks,
        parts_s=prefill.parts_s,
        tpot_parts_s=token,
        tpot_by_library_s=token_by_library_s(on, tokens, slicing=slicing),
        fits=_fits(inputs, tokens, slicing),
    )


def token_parts_s(on: Machine, tokens: int, *, slicing: Slicing) -> dict[str, float]:
    """
    Return the seconds of one token after *tokens* others by group of terms, through all stages.

    Weights and KV cache are read by tp GPUs at a time, however many stages there are; every
    layer ends in all-reduces over these tp GPUs, dearer where they share no HB domain
    (docs/model.md, eq. S5, N2). What an engine adds to each collective counts as engine.
    """
    parts = dict.fromkeys(GROUPS, 0.0)
    for term in step_terms(on, decode_load(1, tokens), slicing=slicing):
        parts[group_of(term)] += float(term.seconds)
    return parts


def token_by_library_s(on: Machine, tokens: int, *, slicing: Slicing) -> dict[str, float]:
    """
    Return the seconds of the same token with other libraries than NCCL between HB domains.

    Returns:
        Seconds by library, for those measured on tp GPUs of as many domains; empty where the tp
        GPUs share a domain.

    Source:
        configs/collectives (docs/model.md, eq. H4).
    """
    domains = math.ceil(slicing.tp / on.cluster.gpus_per_hb_domain)
    if domains == 1:
        return {}
    measured, load = on.gpu.collectives.measured, decode_load(1, tokens)
    libraries = {
        table.library
        for table in measured
        if table.pattern == "all-reduce" and (table.gpus, table.domains) == (slicing.tp, domains)
    }
    found = {}
    for name in sorted(libraries - {CROSSES}):
        # Its measurements in place of NCCL's.
        tables = tuple(replace(each, library=CROSSES) for each in measured if each.library == name)
        gpu = replace(on.gpu, collectives=replace(on.gpu.collectives, measured=tables))
        found[name] = float(step_s(replace(on, gpu=gpu), load, slicing=slicing))
    return found


def preferences(found: LongPrompt) -> tuple[tuple[int, Timed, Timed], ...]:
    """Return the sizes of several layouts: GPUs, the layouts with least TTFT and least TPOT."""
    sizes = sorted({each.gpus for each in found.layouts})
    by_size = [(size, [each for each in found.layouts if each.gpus == size]) for size in sizes]
    return tuple(
        (size, min(some, key=lambda t: t.ttft_s), min(some, key=lambda t: t.tpot_s))
        for size, some in by_size
        if len(some) > 1
    )


def _check(inputs: Inputs, tokens: int, slicings: Sequence[Slicing]) -> None:
    if inputs.gpu.kind == "cpu":
        raise InputError("cluster.gpu", inputs.gpu.name, "a GPU: layouts need more than TP 1")
    context = inputs.model.max_context_tokens
    if not 1 <= tokens <= context:
        expected = f"1 to {context:,}, the context of {inputs.model.id}"
        way_out = "raise it as an assumption: --set model.assumed_context_tokens=N"
        raise InputError("--tokens", tokens, expected, way_out)
    for slicing in slicings:
        rule = tp_rule(inputs.model, slicing.tp) or expert_rule(inputs.model, slicing)
        if rule is not None:
            raise InputError("--slicing", str(slicing), rule)
        if slicing.pp > inputs.model.num_layers:
            layers = f"at most {inputs.model.num_layers} stages, one a layer"
            raise InputError("--slicing", str(slicing), layers)


def _fits(inputs: Inputs, tokens: int, slicing: Slicing) -> bool:
    """Return whether the fullest GPU holds weights and the sequence (eq. M4, M12)."""
    engine, drafts = inputs.engine.on(inputs.gpu), inputs.engine.speculative_tokens
    pages = kv_pages(inputs.model, slicing=slicing, block_size=engine.block_size, drafts=drafts)
    needed = pages.block_bytes * (pages.blocks(tokens) + 1)
    return kv_space_bytes(inputs.model, inputs.gpu, engine, slicing=slicing) >= needed


def _serves(inputs: Inputs, found: Timed) -> bool:
    limit_s = inputs.scenario.slo.tpot_s
    return found.fits and (limit_s is None or found.tpot_s <= limit_s)


def _degrees(inputs: Inputs) -> list[int]:
    """Return the tensor-parallel degrees of replicas that slice everything, experts too."""
    degrees = legal_degrees(inputs.model, inputs.cluster.max_gpus)
    return [tp for tp in degrees if takes(inputs.model, Slicing(tp=tp))]


def _fewest(inputs: Inputs, tokens: int) -> Timed | None:
    """
    Find the layout with the fewest GPUs that holds TTFT and TPOT, the faster of equals.

    More stages are taken to be no slower: their number is bisected.
    """
    limit_s, layers = inputs.scenario.slo.ttft_s, inputs.model.num_layers
    best: Timed | None = None
    for tp in reversed(_degrees(inputs)):

        def served(stages: int, tp: int = tp) -> Timed | None:
            found = timed(inputs, tokens, Slicing(tp=tp, pp=stages))
            return found if found.ttft_s <= limit_s and _serves(inputs, found) else None

        most = min(layers, (best.gpus if best else inputs.cluster.max_gpus) // tp)
        fewest = least(lambda stages: served(stages) is not None, most // 2, 1, most)
        found = served(fewest) if most and fewest else None
        if found and (best is None or (found.gpus, found.ttft_s) < (best.gpus, best.ttft_s)):
            best = found
    return best


def _difference(
    inputs: Inputs,
    tokens: int,
    rule: tuple[int, float],
    by_rule_s: dict[str, float],
    fewest: Timed | None,
) -> CostDifference:
    """
    Compare the rule's seconds with the model's on as many GPUs.

    Args:
        rule: GPUs that both are compared on, and the rule's exact number.
        by_rule_s: seconds of each group of terms on them by the rule.
    """
    gpus, exact = rule
    legal = [
        tp for tp in _degrees(inputs) if gpus % tp == 0 and gpus // tp <= inputs.model.num_layers
    ]
    at = min(
        (timed(inputs, tokens, Slicing(tp=tp, pp=gpus // tp)) for tp in legal),
        key=lambda found: (not _serves(inputs, found), found.ttft_s),
    )
    excess = {name: each - by_rule_s.get(name, 0.0) for name, each in at.parts_s.items()}
    if fewest is not None and exact <= fewest.gpus < gpus:
        return CostDifference(at=at, term=SIZES, excess_s=excess)
    more = fewest is None or fewest.gpus > gpus
    term = (max if more else min)(excess, key=lambda name: excess[name])
    return CostDifference(at=at, term=term, excess_s=excess)
