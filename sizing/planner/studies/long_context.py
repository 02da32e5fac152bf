"""One long prompt in an empty system: GPUs by compute alone, and by the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.engine_model.parallelism import tp_rule
from minicluster.errors import InputError
from minicluster.specs.slicing import Slicing
from sizing.latency.load import prefill_load
from sizing.latency.memory import kv_space_bytes
from sizing.latency.pipeline import chunked_prefill, group_of
from sizing.latency.roofline import multiply_dtype
from sizing.latency.step import step_terms
from sizing.planner.step_models import machine
from sizing.planner.studies.long_decode import token_by_library_s, token_parts_s
from sizing.planner.studies.rule import RuleAnswer, gpus_by_compute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Inputs
    from sizing.planner.studies.rule import ComputeRule

SIZES = "sizes in powers of two"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """
    One layout with one prompt.

    Attributes:
        ttft_s: prefill in chunks through all stages (docs/model.md, eq. S8).
        tpot_s: of this one sequence.
        parts_s: of `ttft_s`; the pipeline bubble is one of them.
        tpot_parts_s: of `tpot_s`, by the same groups.
        tpot_by_library_s: were another library than NCCL to carry all-reduces between HB domains.
        fits: whether memory holds weights and sequence; seconds are given either way.
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
    What makes the rule and the model disagree.

    Attributes:
        at: the model's fastest layout on as many GPUs as the rule takes, or goes up to.
        term: whose seconds differ most, in the direction of the disagreement.
        excess_s: seconds by the model less seconds by the rule, per term.
    """

    at: Timed
    term: str
    excess_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """
    Both answers for one length.

    Attributes:
        flops: of the whole prompt, by group of terms.
        rule: by compute alone.
        layouts: those asked for.
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
    Size an empty system for the TTFT of one prompt, by the rule and by the model.

    Args:
        inputs: model, GPU, cluster and the SLO's TTFT.
        tokens: of the prompt.
        slicings: to be timed as they are.
        rule: of thumb, beside the model.

    Raises:
        InputError: a prompt or layout that cannot be, or no step times on this machine.

    Ignores:
        Request overhead and KV pull: the prefill's own token is the first one.
    """
    _check(inputs, tokens, slicings)
    flops = _flops(inputs, tokens)
    dtype = multiply_dtype(inputs.model.weight_dtype, inputs.gpu)
    peak = inputs.gpu.peak_flops_per_s[dtype]
    by_rule = gpus_by_compute(rule, sum(flops.values()), inputs.scenario.slo.ttft_s, peak)
    fewest = _fewest(inputs, tokens)
    difference = None
    if (fewest and fewest.gpus) != by_rule.gpus:
        shared = by_rule.gpus or rule.most_gpus
        per_flop = 1 / (rule.compute_fraction * peak * shared)
        given = {name: each * per_flop for name, each in flops.items()}
        difference = _difference(inputs, tokens, (shared, by_rule.exact), given, fewest)
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
    on = machine(inputs)
    prefill = chunked_prefill(on, tokens, slicing=slicing)
    token = token_parts_s(on, tokens, slicing=slicing)
    return Timed(
        layout=name_of(slicing),
        gpus=slicing.gpus,
        ttft_s=prefill.seconds,
        tpot_s=sum(token.values()),
        chunks=prefill.chunks,
        parts_s=prefill.parts_s,
        tpot_parts_s=token,
        tpot_by_library_s=token_by_library_s(on, tokens, slicing=slicing),
        fits=_fits(inputs, tokens, slicing),
    )


def name_of(slicing: Slicing) -> str:
    """Write a layout as people do: TP8, TP8xPP2."""
    return f"TP{slicing.tp}" + (f"xPP{slicing.pp}" if slicing.pp > 1 else "")


def preferences(found: LongPrompt) -> tuple[tuple[int, Timed, Timed], ...]:
    """Return sizes that several layouts share: GPUs, fastest to first token, fastest a token."""
    sizes = sorted({each.gpus for each in found.layouts})
    alike = [(size, [each for each in found.layouts if each.gpus == size]) for size in sizes]
    return tuple(
        (size, min(some, key=lambda t: t.ttft_s), min(some, key=lambda t: t.tpot_s))
        for size, some in alike
        if len(some) > 1
    )


def _check(inputs: Inputs, tokens: int, slicings: Sequence[Slicing]) -> None:
    """Refuse what cannot be computed."""
    if inputs.gpu.kind == "cpu":
        raise InputError("cluster.gpu", inputs.gpu.name, "a GPU: layouts need more than TP 1")
    context = inputs.model.max_context_tokens
    if not 1 <= tokens <= context:
        raise InputError(
            "--tokens",
            tokens,
            f"1 to {context:,}, the context of {inputs.model.id}",
            "raise it as an assumption: --set model.assumed_context_tokens=N",
        )
    for slicing in slicings:
        rule = tp_rule(inputs.model, slicing.tp)
        if rule is not None:
            raise InputError("--slicing", name_of(slicing), f"a TP that is {rule}")
        if slicing.pp > inputs.model.num_layers:
            layers = f"at most {inputs.model.num_layers} stages, one a layer"
            raise InputError("--slicing", name_of(slicing), layers)


def _flops(inputs: Inputs, tokens: int) -> dict[str, float]:
    """FLOPs of the whole prompt by group of terms, however many GPUs share them."""
    found: dict[str, float] = {}
    for term in step_terms(machine(inputs), prefill_load(tokens), slicing=Slicing()):
        group = group_of(term)
        found[group] = found.get(group, 0.0) + float(term.flops)
    return {name: each for name, each in found.items() if each}


def _fits(inputs: Inputs, tokens: int, slicing: Slicing) -> bool:
    """Say whether the fullest GPU holds weights and the sequence (eq. M3, M4)."""
    space = kv_space_bytes(inputs.model, inputs.gpu, inputs.engine, slicing=slicing)
    block = inputs.engine.block_size
    return space >= kv_bytes_per_sequence(inputs.model, tokens, slicing=slicing, block_size=block)


def _serves(inputs: Inputs, found: Timed) -> bool:
    """Say whether a layout holds the sequence, and the TPOT promised for it."""
    limit_s = inputs.scenario.slo.tpot_s
    return found.fits and (limit_s is None or found.tpot_s <= limit_s)


def _legal(inputs: Inputs) -> tuple[int, ...]:
    """List the tensor-parallel degrees that divide the model, up to the budget."""
    widest = min(inputs.cluster.max_gpus, inputs.model.num_heads)
    return tuple(tp for tp in range(1, widest + 1) if tp_rule(inputs.model, tp) is None)


def _fewest(inputs: Inputs, tokens: int) -> Timed | None:
    """
    Find the layout with the fewest GPUs that holds TTFT and TPOT, the faster of equals.

    More stages are taken to be no slower: their number is bisected.
    """
    limit_s, layers = inputs.scenario.slo.ttft_s, inputs.model.num_layers
    best: Timed | None = None
    for tp in reversed(_legal(inputs)):
        most = min(layers, (best.gpus if best else inputs.cluster.max_gpus) // tp)
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = timed(inputs, tokens, Slicing(tp=tp, pp=middle))
            if found.ttft_s <= limit_s and _serves(inputs, found):
                high = middle
                if best is None or (found.gpus, found.ttft_s) < (best.gpus, best.ttft_s):
                    best = found
            else:
                low = middle
    return best


def _difference(
    inputs: Inputs,
    tokens: int,
    rule: tuple[int, float],
    given_s: dict[str, float],
    fewest: Timed | None,
) -> CostDifference:
    """
    Compare the rule's seconds with the model's on as many GPUs.

    Args:
        inputs: of the scenario.
        tokens: of the prompt.
        rule: GPUs that both are compared on, and the rule's exact number.
        given_s: seconds that the rule gives each group of terms on them.
        fewest: the model's answer.
    """
    gpus, exact = rule
    legal = [
        tp for tp in _legal(inputs) if gpus % tp == 0 and gpus // tp <= inputs.model.num_layers
    ]
    at = min(
        (timed(inputs, tokens, Slicing(tp=tp, pp=gpus // tp)) for tp in legal),
        key=lambda found: (not _serves(inputs, found), found.ttft_s),
    )
    excess = {name: each - given_s.get(name, 0.0) for name, each in at.parts_s.items()}
    if fewest is not None and exact <= fewest.gpus < gpus:
        return CostDifference(at=at, term=SIZES, excess_s=excess)
    more = fewest is None or fewest.gpus > gpus
    term = (max if more else min)(excess, key=lambda name: excess[name])
    return CostDifference(at=at, term=term, excess_s=excess)
