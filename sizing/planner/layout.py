"""Layouts: how the GPUs of a replica share the model, the rules, and the sequences that fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import KvPages, kv_pages
from minicluster.engine_model.limits import LOOKAHEAD_STEPS
from minicluster.engine_model.parallelism import expert_rule, nixl_rule, tp_rule
from minicluster.errors import InputError
from minicluster.specs.slicing import Slicing
from minicluster.units import gigabytes
from sizing.latency.memory import kv_space_bytes, slot_bytes, weight_bytes

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from minicluster.specs.model import ModelSpec

MARGIN = 3.0
"""Standard deviations of the total context that a full batch leaves free: it never preempts."""

STEPS_IN_FLIGHT = 2
"""Steps whose tokens' blocks vLLM holds, with the next one scheduled ahead."""

MOST_DOMAINS = 4
"""HB domains that one replica may span, where no engine profile limits it."""

PIPELINES = (2, 4, 8)
"""Stages of the pipelines that are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutShape:
    """
    One replica.

    Attributes:
        gpu: catalog name.
    """

    slicing: Slicing
    gpu: str

    def __str__(self) -> str:
        """Write as `sizing predict` takes it, without the kind of GPU."""
        return str(self.slicing)

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.slicing.gpus

    @property
    def lanes(self) -> int:
        """Concurrent batches: one for each copy of attention and each pipeline stage."""
        return self.slicing.dp * self.slicing.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The replica shape of each pool; without prefill one aggregated pool (`mixed`)."""

    prefill: LayoutShape | None
    decode: LayoutShape

    @classmethod
    def split(cls, prefill_tp: int, decode_tp: int, gpu: str) -> Layout:
        """Return tensor-parallel pools of one kind of GPU."""
        return cls(
            prefill=LayoutShape(slicing=Slicing(tp=prefill_tp), gpu=gpu),
            decode=LayoutShape(slicing=Slicing(tp=decode_tp), gpu=gpu),
        )

    @property
    def shapes(self) -> dict[str, LayoutShape]:
        """Replicas by role."""
        if self.prefill is None:
            return {"mixed": self.decode}
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def order(self) -> tuple[str, ...]:
        """Sort key of layouts where all else is equal: narrow replicas first."""
        return tuple(f"{shape.gpus:6d} {shape} {shape.gpu}" for shape in self.shapes.values())

    def __str__(self) -> str:
        """Write the shape of each pool: `prefill TP4, decode TP8`."""
        return ", ".join(f"{role} {shape}" for role, shape in self.shapes.items())


def legal_degrees(model: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the tensor-parallel degrees, up to *most*, that divide the model."""
    widest = min(most, model.num_heads)
    return tuple(tp for tp in range(1, widest + 1) if tp_rule(model, tp) is None)


def legal_shapes(inputs: Inputs) -> tuple[LayoutShape, ...]:
    """
    List the replica shapes that may be searched.

    Without `[search] tp` these are all degrees that divide the model and fit the HB domain. Models
    with experts also have copies of attention around experts that are divided among all GPUs of
    the group. With `layouts = "any"` pipelines are added.

    Raises:
        InputError: a degree that the scenario asks for cannot be had.
    """
    asked = inputs.scenario.search.tp
    if inputs.calibration is not None or inputs.gpu.kind == "cpu":
        for tp in asked:
            if tp != 1:
                raise InputError(
                    "search.tp", tp, "1: step times come from a calibration, measured at TP 1"
                )
        return (LayoutShape(slicing=Slicing(), gpu=inputs.gpu.name),)
    cluster, layers = inputs.cluster, inputs.model.num_layers
    degrees = tuple(sorted(set(asked))) or legal_degrees(inputs.model, cluster.gpus_per_hb_domain)
    most = min(cluster.max_gpus, MOST_DOMAINS * cluster.gpus_per_hb_domain)
    cuts = [Slicing(tp=tp) for tp in degrees if takes(inputs.model, Slicing(tp=tp))]
    sliced = [cut.tp for cut in cuts]
    for tp in degrees:  # data-parallel ranks that divide whole experts among their GPUs
        copies = (1 << doublings for doublings in range((most // tp).bit_length()))
        groups = [Slicing(tp=tp, dp=dp, ep=tp * dp) for dp in copies]
        cuts += [each for each in groups if each.ep > 1 and takes(inputs.model, each)]
    if inputs.scenario.search.layouts == "any":
        stages = [pp for pp in PIPELINES if pp <= layers]
        cuts += [Slicing(tp=tp, pp=pp) for tp in sliced for pp in stages if tp * pp <= most]
    for tp in asked or ([] if cuts else [1]):
        if tp not in {cut.tp for cut in cuts}:
            check_slicing(inputs, Slicing(tp=tp), place="search.tp")
    return tuple(LayoutShape(slicing=cut, gpu=gpu) for gpu in inputs.kinds for cut in cuts)


def takes(model: ModelSpec, slicing: Slicing) -> bool:
    """Say whether a model can be sliced so, its experts included."""
    return tp_rule(model, slicing.tp) is None and expert_rule(model, slicing) is None


def profile_rule(inputs: Inputs, layout: Layout) -> str | None:
    """Return the rule of the engine profile, as `serving` deploys it, that a layout breaks."""
    for role, shape in layout.shapes.items():
        pp = shape.slicing.pp
        if pp not in inputs.engine.pp:
            return f"{role} PP{pp}: NIXL pairs PP {', '.join(map(str, inputs.engine.pp))}"
    return None


def check_slicing(inputs: Inputs, slicing: Slicing, *, place: str) -> None:
    """Refuse degrees that do not divide the model, or that no cluster of this size holds."""
    model, layers = inputs.model, inputs.model.num_layers
    rule = tp_rule(model, slicing.tp) or expert_rule(model, slicing)
    if slicing.pp > layers:
        rule = f"at most {layers} stages: the model has {layers} layers"
    elif slicing.gpus > inputs.cluster.max_gpus:
        rule = f"at most cluster.max_gpus = {inputs.cluster.max_gpus} GPUs"
    if rule is not None:
        raise InputError(place, str(slicing), rule)


def pairing_rule(model: ModelSpec, layout: Layout) -> str | None:
    """Return the rule of the NIXL connector that a pair of degrees breaks, if any."""
    if layout.prefill is None:
        return None
    prefill_tp, decode_tp = layout.prefill.slicing.tp, layout.decode.slicing.tp
    return nixl_rule(model, prefill_tp=prefill_tp, decode_tp=decode_tp)


def max_model_len(inputs: Inputs) -> int:
    """
    Longest sequence that the engines accept.

    What the scenario says, else the longest request of its load, in whole blocks.
    """
    asked = inputs.scenario.model.max_context_tokens
    if asked is not None:
        return asked
    longest = max(part.longest_tokens for part in inputs.scenario.workload.parts)
    block = block_size(inputs)
    return min(-(-longest // block) * block, inputs.model.max_context_tokens)


def block_size(inputs: Inputs) -> int:
    """Tokens of a KV block on this kind of machine."""
    return inputs.engine.on(inputs.gpu).block_size


def memory_rule(inputs: Inputs, shape: LayoutShape) -> str | None:
    """Return why the model does not fit a replica; `None` where it fits, and on a CPU."""
    gpu = inputs.kinds[shape.gpu]
    if gpu.kind == "cpu":
        return None
    left = kv_space(inputs, shape, sequences=2 * shape.slicing.pp)
    pages = pages_of(inputs, shape)
    needed = 2 * shape.slicing.pp * pages.blocks(max_model_len(inputs)) * pages.block_bytes
    needed += pages.block_bytes  # the null block
    if left >= needed:
        return None
    weights = weight_bytes(inputs.model, slicing=shape.slicing)
    slots = slot_bytes(inputs.model, inputs.engine, slicing=shape.slicing)
    adapters = f" and {gigabytes(slots)} of slots for LoRA adapters" if slots else ""
    return (
        f"{shape}: {gigabytes(weights, 0)} of weights{adapters} per GPU leave"
        f" {gigabytes(max(0.0, left))} of {gigabytes(gpu.require('hbm_bytes'), 0)} for the KV"
        f" cache; two of the longest requests need {gigabytes(needed)}"
    )


def max_decode_batch(
    inputs: Inputs, shape: LayoutShape, *, context: float, deviation: float
) -> int:
    """
    Return the largest batch whose KV cache fits, three deviations of its context included.

        B M_s(E[s]) + 3 sqrt(B) b(1) sigma_s + M_0 <= M_kv(pp B) / pp      (docs/model.md, eq. M5)

    Args:
        shape: one replica; each of its batches has its own share of the cache.
        context: E[s], tokens of a sequence.
        deviation: sigma_s.

    Returns:
        Sequences; 0 if none fits, at most what engine and calibration allow.

    Source:
        The contexts of a batch are independent; vLLM preempts where their sum exceeds the cache.
        M_0: the null block, and what the windows of a prompt hold beyond a sequence's while its
        steps run (`SlidingWindowSpec.max_admission_blocks_per_request`).

    Ignores:
        Prefixes that sequences share.

    """
    pp = shape.slicing.pp
    engine = inputs.engine_on(shape.gpu)
    limit = max(1, engine.max_num_seqs // pp)
    if inputs.calibration is not None:
        limit = min(limit, inputs.calibration.decode.max_batch)
    if inputs.kinds[shape.gpu].kind == "cpu":
        return limit
    ahead = LOOKAHEAD_STEPS * inputs.engine.speculative_tokens
    pages, half = pages_of(inputs, shape), block_size(inputs) / 2
    # Contexts fill long blocks, those of hybrid models, by far not evenly: the mean over them.
    evenly = math.sqrt(3) * deviation if pages.block_tokens > block_size(inputs) else 0.0
    blocks = pages.blocks(context + half + ahead, spread=evenly)
    each = pages.block_bytes * blocks
    spread = MARGIN * pages.block_bytes * (blocks - pages.fixed_blocks) / context * deviation
    longest, in_flight = max_model_len(inputs), STEPS_IN_FLIGHT * engine.max_num_batched_tokens
    more = pages.blocks(longest, in_flight=in_flight) - pages.blocks(longest)
    aside = (1 + more) * pages.block_bytes

    def missing(batch: int) -> float:
        needed = batch * each + math.sqrt(batch) * spread + aside
        return needed - kv_space(inputs, shape, sequences=pp * batch) / pp

    return bisect_right(range(1, limit + 1), 0.0, key=missing)


def kv_space(inputs: Inputs, shape: LayoutShape, *, sequences: int) -> float:
    """Return the KV cache per GPU of an engine that runs *sequences*: `max_num_seqs` (eq. M4)."""
    engine = replace(inputs.engine_on(shape.gpu), max_num_seqs=sequences)
    return kv_space_bytes(inputs.model, inputs.kinds[shape.gpu], engine, slicing=shape.slicing)


def memory_parts(
    inputs: Inputs, shape: LayoutShape, utilization: float, kv_bytes: float
) -> dict[str, float]:
    """
    Return what the memory of a replica's fullest GPU is divided into, in bytes by name (eq. M4).

    Args:
        utilization: share of the memory that the engine takes; a CPU's is not divided.
        kv_bytes: KV cache of the GPU.
    """
    weights = weight_bytes(inputs.model, slicing=shape.slicing)
    gpu = inputs.kinds[shape.gpu]
    if gpu.kind == "cpu":
        return {"weights": weights, "KV cache": kv_bytes}
    whole = gpu.require("hbm_bytes")
    parts = {
        "weights": weights,
        "KV cache": kv_bytes,
        "left to others": whole * (1 - utilization),
    }
    if inputs.engine.lora is not None:
        parts["adapters"] = slot_bytes(inputs.model, inputs.engine, slicing=shape.slicing)
    return {**parts, "activations and engine": whole - sum(parts.values())}


def kv_pool_bytes(
    inputs: Inputs, shape: LayoutShape, *, max_num_seqs: int, held: int, context_tokens: int
) -> float:
    """
    Return the KV cache per GPU: what memory leaves, or on a CPU what the sequences need.

    (docs/model.md, eq. M4)

    Args:
        max_num_seqs: sequences that it may run, which need working memory.
        held: sequences whose caches it holds, beside the null block.
    """
    if inputs.kinds[shape.gpu].kind == "cpu":
        pages = pages_of(inputs, shape)
        return pages.block_bytes * (held * pages.blocks(context_tokens) + 1)
    return float(math.floor(kv_space(inputs, shape, sequences=max_num_seqs)))


def pages_of(inputs: Inputs, shape: LayoutShape) -> KvPages:
    """Return the blocks of a replica's KV cache (eq. M12)."""
    return kv_pages(
        inputs.model,
        slicing=shape.slicing,
        block_size=block_size(inputs),
        drafts=inputs.engine.speculative_tokens,
        one_pool=inputs.engine.one_kv_pool,
    )
