"""Bytes of a training job on its fullest GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.specs.parameters import parameters

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec
    from sizing.training.job import TrainingJob, TrainingLayout

WEIGHT_BYTES = 2.0
GRADIENT_BYTES = 4.0
"""Gradients are summed up in 32 bits."""
OPTIMISER_BYTES = 12.0
"""Adam: 32-bit weights and two moments."""
LOGIT_BYTES = 4.0
VALUE = 2.0
"""Bytes of an activation."""
MASK = 1.0
"""Bytes of a value's dropout mask."""
STAGES = ("first", "second", "last")
"""Pipeline stages of which one is the fullest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """
    Bytes on one GPU.

    Attributes:
        optimiser: 32-bit weights and two moments.
        activations: kept for the backward passes under way.
        working: values of the layer that is being run again, and the logits.
    """

    weights: float
    gradients: float
    optimiser: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.working


def trained_parameters(job: TrainingJob) -> int:
    """
    Count the parameters of the job's model.

        gpt: P + 11 h L + s h      (docs/model.md, eq. J3), P by eq. P1

    The gpt family has biases (3 h of the queries, keys and values, h of the output, 5 h of the
    feed-forward, 2 h of the norms) and s learned positions.

    Source:
        Megatron (arXiv 2104.04473), section 5.1: 12 L h^2 (1 + 13/12h + (V + s)/12 L h).

    Ignores:
        What P1 ignores, in the llama family.
    """
    model, own = job.model, parameters(job.model).total
    if job.family != "gpt":
        return own
    return own + (11 * model.num_layers + job.sequence_tokens) * model.hidden_size


def stage_parameters(job: TrainingJob, layout: TrainingLayout, stage: str = "first") -> float:
    """
    Parameters on one GPU of a pipeline stage.

        p = L_stage / (L tp) (P - P_experts - tables + P_experts / ep) + tables of the stage / tp
        (docs/model.md, eq. J3)

    Layers are taken to be alike; a tied table lies on both end stages.
    """
    parts = parameters(job.model)
    layers = layout.layers_of(job, stage)
    positions = job.sequence_tokens * job.model.hidden_size if job.family == "gpt" else 0
    body = trained_parameters(job) - parts.embedding - parts.lm_head - positions - parts.experts
    if layout.pp == 1:
        tables = parts.embedding + parts.lm_head + positions
    else:
        head = parts.lm_head or parts.embedding
        tables = {"first": parts.embedding + positions, "second": 0, "last": head}[stage]
    share = layers / job.model.num_layers / layout.tp
    return share * (body + parts.experts / layout.ep) + tables / layout.tp


def layer_activation_bytes(
    job: TrainingJob, layout: TrainingLayout, *, recompute: str | None = None
) -> float:
    """
    Bytes that one layer keeps of one micro-batch for its backward pass, on one GPU.

        none: m h (10 + 24/t + 5 N s/(h t)) (gpt, f = 4 h); selective: without 5 N s/(h t);
        full: 2 m h; sequence parallel: all over t      (docs/model.md, eq. J4)

    m = micro-batch x s / cp tokens, t = tp. llama: no dropout masks, and a gated feed-forward keeps
    its two inputs and their product, 6 f; flash attention keeps 4 bytes per query and head instead
    of scores; latent attention keeps its latents, whole on every slice, and what they expand to.

    Source:
        Korthikanti et al. (arXiv 2205.05198), section 4, eq. 2, 4 and 6; its terms by tensor.

    Ignores:
        Expert layers: kept as k routed copies of each token, permuted once.
    """
    model, t = job.model, layout.tp
    h = model.hidden_size
    m = layout.tokens_per_micro_batch(job)
    recompute = recompute or job.recompute
    if recompute == "full":
        return m * h * VALUE
    outside = 4 * VALUE * h  # inputs of two norms and of what follows them
    heads, whole = _attention_values(model, t)
    inside = VALUE * (heads + _feedforward_values(model))
    if job.family == "gpt":
        outside += 2 * MASK * h
    scores = 0.0
    if job.attention == "flash":
        scores = 4.0 * model.num_heads
    elif recompute == "none":
        masks = VALUE + MASK if job.family == "gpt" else 0.0
        scores = model.num_heads * job.sequence_tokens * (VALUE + masks)
    outer = outside / t if job.sequence_parallel else outside
    return m * (outer + VALUE * whole + (inside + scores) / t)


def _attention_values(model: ModelSpec, tp: int) -> tuple[float, float]:
    """Values a token keeps for the core of attention: of all heads together, of every slice."""
    if model.mla is None:
        return 2.0 * (model.num_heads + max(model.num_kv_heads, tp)) * model.head_dim, 0.0
    mla = model.mla
    wide = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    return 2.0 * model.num_heads * wide, float(latent)


def _feedforward_values(model: ModelSpec) -> float:
    """Values a token keeps inside the feed-forward of an average layer, all slices together."""
    kept = 3.0 if model.gated_mlp else 2.0
    if model.moe is None:
        return kept * model.ffn_size
    moe, layers = model.moe, model.num_layers
    routed = moe.experts_per_token * (2 * model.hidden_size + kept * moe.expert_ffn_size)
    expert_layers = layers - moe.num_dense_layers
    return (
        moe.num_dense_layers * kept * model.ffn_size
        + expert_layers * (routed + kept * moe.shared_ffn_size)
    ) / layers


def layers_in_flight(job: TrainingJob, layout: TrainingLayout, stage: str = "first") -> float:
    """
    Layers times micro-batches whose activations a stage holds at its peak.

        first stage: L_stage p; in v chunks L_stage p (1 + (p - 1)/(p v)); at most L_stage n
        (docs/model.md, eq. J5)

    p stages of v chunks, n micro-batches. The second stage holds one micro-batch less, in chunks
    two chunks less; the last one.

    Source:
        Korthikanti et al. (arXiv 2205.05198), section 4.2.3; the warm-up of Megatron-LM's
        schedule: 2 (p - 1 - r) + (v - 1) p chunks on stage r.
    """
    p, v = layout.pp, layout.interleave
    rank = {"first": 0, "second": 1, "last": p - 1}[stage]
    chunks = p - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * p + 1
    return layout.layers_of(job, stage) / v * min(chunks, layout.micro_batches(job) * v)


def training_memory(job: TrainingJob, layout: TrainingLayout) -> TrainingMemory:
    """
    Bytes of the fullest GPU, that of the first, the second or the last pipeline stage.

        M = p (2 + 4 + 12), sharded over the dp cp copies from the optimiser on (zero 1, 2, 3),
            + activations (J4) x layers in flight (J5)      (docs/model.md, eq. J6)

    The stage that has the head holds the logits in 32 bits.

    Source:
        ZeRO (arXiv 1910.02054), section 3; Megatron-LM's mixed precision: 18 bytes a parameter.

    Ignores:
        CUDA context, communication buffers and fragmentation: the search leaves room for them;
        all-gathered weights of zero 3 (two layers at a time).
    """
    stages = STAGES if layout.pp > 2 else STAGES[:: layout.pp]  # noqa: PLR2004
    return max((_stage_memory(job, layout, s) for s in stages), key=lambda each: each.total)


def _held(job: TrainingJob, layout: TrainingLayout, stage: str, *, sharded: bool) -> float:
    """Parameters whose state a GPU holds: copies share it out, of experts dp cp/ep copies."""
    whole = stage_parameters(job, layout, stage)
    if not sharded:
        return whole
    share = layout.layers_of(job, stage) / job.model.num_layers
    experts = parameters(job.model).experts * share / layout.tp / layout.ep
    return (whole - experts) / layout.copies + experts * layout.ep / layout.copies


def _stage_memory(job: TrainingJob, layout: TrainingLayout, stage: str) -> TrainingMemory:
    shares = [_held(job, layout, stage, sharded=job.zero >= least) for least in (3, 2, 1)]
    kept = layer_activation_bytes(job, layout)
    working = 0.0
    if job.recompute != "none":
        working = max(0.0, layer_activation_bytes(job, layout, recompute="none") - kept)
    if stage == "last" or layout.pp == 1:
        tokens = layout.tokens_per_micro_batch(job)
        working += LOGIT_BYTES * tokens * job.model.vocab_size / layout.tp
    return TrainingMemory(
        weights=WEIGHT_BYTES * shares[0],
        gradients=GRADIENT_BYTES * shares[1],
        optimiser=OPTIMISER_BYTES * shares[2],
        activations=kept * layers_in_flight(job, layout, stage),
        working=working,
    )
