"""How vLLM may slice a model: tensor-parallel degrees, pairs of them, and groups of experts."""

from __future__ import annotations

from itertools import chain
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from minicluster.specs.model import USUAL_GROUP, draft_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing

VOCABULARY_MULTIPLE = 64
"""To a multiple of this vLLM pads the vocabulary before ranks share it out."""

LEAST_BLOCK = 32
"""Fewest weights that share a scale in vLLM's kernels of experts, which make groups finer."""

COMPRESSED = "compressed-tensors"
"""The format whose blocks of fp8 have to be whole in every output of merged projections, too."""

MOST_NAMED = 1024
"""Largest degree that is named in place of a refused one."""


class Cut(NamedTuple):
    """
    One width that ranks share out.

    Attributes:
        name: ends with the width.
        unit: each rank gets a whole multiple of it, from so many ranks on.
        most_parts: so many at most; further ranks hold copies of them; 0: any number.
    """

    name: str
    width: int
    unit: int = 1
    from_ranks: int = 1
    most_parts: int = 0

    def problem(self, ranks: int, degree: str = "TP") -> str | None:
        """Return why so many ranks cannot share it, if they cannot."""
        parts = min(ranks, self.most_parts or ranks)
        if self.width % parts:
            return f"{self.name} is not divisible by {degree} {ranks}"
        part = self.width // parts
        if ranks >= self.from_ranks and part % self.unit:
            scaled = f"no whole blocks of {self.unit} weights with one scale"
            return f"{degree} {ranks} leaves {part:,} of {self.name} to a rank, {scaled}"
        return None


def tp_rule(model: ModelSpec, tp: int) -> str | None:
    """
    Return the nearest tensor-parallel degrees that *model* takes, and why not *tp*; else `None`.

    Experts, routed and shared, are left to `expert_rule`.

    Source:
        vLLM 0.29.0: `divide` of heads and of every sliced projection (linear.py), and of the padded
        vocabulary (vocab_parallel_embedding.py); KV heads are sliced, or copied whole where there
        are fewer of them than ranks. Slices of a projection's input hold whole blocks or groups of
        scales: `validate_fp8_block_shape` (fp8_utils.py), auto_awq.py, kernels/linear
        `MarlinLinearKernel.can_implement` (GPTQ), `verify_group_size_divides_partition`
        (compressed-tensors), modelopt.py (NVFP4). Projections that are merged may cut blocks of
        fp8 across their outputs, but for compressed-tensors, whose config has no block size for
        `_maybe_allow_fp8_block_shape_mismatch` (linear.py) to ask. mamba_mixer2.py and
        qwen_gdn_linear_attn.py: heads and groups.

    Ignores:
        Machete on Hopper, which takes GPTQ groups that straddle ranks and loads wrong scales.
    """
    return _named(tp, lambda degree: _tp_problem(model, degree))


def expert_rule(model: ModelSpec, slicing: Slicing) -> str | None:
    """
    Return what the copies of attention and groups of experts have to be, if they are not.

    Source:
        vLLM 0.29.0, fused_moe/config.py: with expert parallelism whole experts are divided among
        all tp x dp ranks of a stage, without it each is sliced over all of them; data-parallel
        ranks of a model without experts share nothing, so they are replicas. Slices of an expert:
        see `_expert_problem`. Shared experts are sliced tp ways, and whole where tp, dp and ep are
        all above 1 (config/parallel.py, `use_sequence_parallel_moe`).

    Ignores:
        That vLLM also divides experts unevenly: the sizer knows even groups alone.
    """
    moe, ranks = model.moe, slicing.tp * slicing.dp
    if moe is None:
        if slicing.dp > 1 or slicing.ep > 1:
            return "dp 1 and ep 1: the model has no experts (more replicas instead of dp)"
        return None
    if slicing.ep not in {1, ranks}:
        return f"ep 1, or {ranks}: vLLM divides experts among all tp x dp = {ranks} ranks"
    if moe.num_copies % slicing.ep:
        copies = f" and their {extra} copies" if (extra := moe.redundant_experts) else ""
        return f"an ep that divides the model's {moe.num_experts} experts{copies}"
    if slicing.ep == 1 and _expert_problem(model, ranks):
        rule = _named(ranks, lambda degree: _expert_problem(model, degree), "tp x dp")
        return rule if moe.num_experts % ranks else f"ep {ranks}, or {rule}"
    if slicing.ep > 1 and slicing.tp > 1 and slicing.dp > 1:
        return None
    return _named(slicing.tp, lambda degree: _shared_problem(model, degree))


def _named(asked: int, problem: Callable[[int], str | None], degree: str = "TP") -> str | None:
    found = problem(asked)
    if found is None:
        return None
    below = (each for each in range(asked - 1, 0, -1) if problem(each) is None)
    above = (each for each in range(asked + 1, MOST_NAMED + 1) if problem(each) is None)
    nearest = [str(each) for each in (next(below, 0), next(above, 0)) if each]
    return f"{degree} {' or '.join(nearest) or '(there is none)'}: {found}"


def _tp_problem(model: ModelSpec, tp: int) -> str | None:
    draft = () if model.draft is None else _cuts(draft_layer(model))
    problems = (each.problem(tp) for each in chain(_cuts(model), draft))
    found = next(filter(None, problems), None)
    kv_heads = model.num_kv_heads
    if found is None and model.mla is None and kv_heads % tp and tp % kv_heads:
        return f"the number of KV heads ({kv_heads}) neither divides TP {tp} nor is divided by it"
    return found


def _cuts(model: ModelSpec) -> Iterator[Cut]:
    if model.num_attention_layers:
        yield Cut(f"the number of attention heads ({model.num_heads})", model.num_heads)
        yield from _attention_cuts(model)
    if model.linear is not None:
        yield from _linear_cuts(model)
    if model.ffn_size:
        name = f"the feed-forward width {model.ffn_size:,}"
        quantised, merged = model.dense_quantised, model.gated_mlp
        yield _input_cut(model, name, model.ffn_size, quantised=quantised, merged=merged)
    padded = -(-model.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    padding = (
        f"(padded to {VOCABULARY_MULTIPLE})"
        if padded == model.vocab_size
        else f"(padded to {padded:,})"
    )
    yield Cut(f"vocabulary {model.vocab_size:,} {padding}", padded)


def _attention_cuts(model: ModelSpec) -> Iterator[Cut]:
    mla, heads = model.mla, model.num_heads
    quantised = model.attention_quantised
    size = heads * (mla.v_head_dim if mla else model.head_dim)
    name = f"the attention output's width {size:,}"
    yield _input_cut(model, name, size, quantised=quantised, merged=mla is None)
    if mla is None and _fp8_blocks(model) and quantised and model.weight_format == COMPRESSED:
        size = model.num_kv_heads * model.head_dim
        cut = _input_cut(model, f"the width {size:,} of keys", size, quantised=True, merged=True)
        yield cut._replace(most_parts=model.num_kv_heads)
    if mla is not None and _fp8_blocks(model) and quantised:  # single outputs, in whole blocks
        for name, head in (
            ("queries", mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            ("keys and values", mla.qk_nope_head_dim + mla.v_head_dim),
        ):
            size = heads * head
            yield _input_cut(model, f"the width {size:,} of {name}", size, quantised=True)


def _linear_cuts(model: ModelSpec) -> Iterator[Cut]:
    linear = model.linear
    assert linear is not None  # noqa: S101
    keys, heads = linear.num_key_heads, linear.num_value_heads
    if linear.kind == "delta" or (linear.kind == "mamba2" and keys > 1):
        of = "groups of Mamba-2" if linear.kind == "mamba2" else "key heads of linear attention"
        yield Cut(f"the number of {of} ({keys})", keys)
    yield Cut(f"the number of heads of linear layers ({heads})", heads)
    size = heads * linear.value_head_dim
    name = f"the linear layers' width {size:,}"
    quantised, merged = model.attention_quantised, linear.kind == "delta"
    yield _input_cut(model, name, size, quantised=quantised, merged=merged)
    if merged and _fp8_blocks(model) and model.weight_format == COMPRESSED:
        size = keys * linear.key_head_dim
        name = f"the width {size:,} of linear attention's keys"
        yield _input_cut(model, name, size, quantised=quantised, merged=True)


def _fp8_blocks(model: ModelSpec) -> bool:
    return bool(model.weight_format and model.weight_dtype == "fp8" and model.weight_group)


def _input_cut(
    model: ModelSpec, name: str, width: int, *, quantised: bool, merged: bool = False
) -> Cut:
    """
    Return the cut of a projection's input, whose slices hold whole blocks of scales.

    Args:
        merged: several projections of the same width, merged, come before it.
    """
    if not (quantised and model.weight_format) or model.weight_format == "mxfp4":
        return Cut(name, width)
    group = model.weight_group or (USUAL_GROUP["fp4"] if model.weight_dtype == "fp4" else 1)
    # vLLM looks at the blocks of fp8 where ranks share them; groups have to be whole on one, too.
    shared = model.weight_dtype == "fp8" and not (merged and model.weight_format == COMPRESSED)
    return Cut(name, width, group, 2 if shared else 1)


def _shared_problem(model: ModelSpec, tp: int) -> str | None:
    size = model.moe.shared_ffn_size if model.moe else 0
    name = f"the shared experts' width {size:,}"
    quantised, merged = model.shared_quantised, model.gated_mlp
    return _input_cut(model, name, size, quantised=quantised, merged=merged).problem(tp)


def _expert_problem(model: ModelSpec, ranks: int) -> str | None:
    """
    Return why so many ranks cannot share every routed expert, if they cannot.

    Source:
        vLLM 0.29.0: fused_moe/oracle/fp8.py, `refine_fp8_moe_block_shape`, makes blocks of fp8
        finer, and moe_wna16.py groups of AWQ and GPTQ, both down to 32 weights;
        compressed_tensors_moe/ does not; of MXFP4 the slices are padded (mxfp4.py).
    """
    size = model.moe.expert_ffn_size if model.moe else 0
    cut = _input_cut(model, f"an expert's width {size:,}", size, quantised=True)
    cut = cut._replace(from_ranks=1)
    found = cut.problem(ranks, "tp x dp")
    if found is None or size % ranks or model.weight_format not in {"fp8", "awq", "gptq"}:
        return found
    part, hidden, finer = size // ranks, model.hidden_size, cut.unit
    if model.weight_format == "fp8":
        finer = gcd(cut.unit, part, hidden)
    else:
        while part % finer or hidden % finer:
            finer //= 2
    return found if finer < LEAST_BLOCK else None


def nixl_rule(model: ModelSpec, *, prefill_tp: int, decode_tp: int) -> str | None:
    """
    Return what the degrees of a pair have to be for NIXL, if they are not; else `None`.

    Source:
        vLLM 0.29.0, nixl/base_worker.py: a rank of one pool reads from whole ranks of the other,
        and a decode rank that reads from several of prefill's finds no KV head on two of them.
    """
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        return "degrees of which one is a multiple of the other (NIXL)"
    if prefill_tp > decode_tp and model.mla is None and prefill_tp > model.num_kv_heads:
        return (
            f"a prefill TP of at most the model's {model.num_kv_heads} KV heads, where it is wider"
            " than decode's (NIXL)"
        )
    return None
