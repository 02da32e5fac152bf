"""A training job, and its layout: how its GPUs share the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Spec, choice, one_of
from minicluster.specs.model import ModelSpec

ZERO_STAGES = (0, 1, 2, 3)
TRAINED_DTYPES = ("bf16", "fp16", "fp8")
ENDS = 2
"""Stages that hold tables: the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(Spec):
    """
    One training run, its layout apart.

    Attributes:
        model: shapes; its `weight_dtype` is what its GEMMs multiply in.
        sequence_tokens: tokens of one sequence.
        batch_sequences: sequences of one optimiser step, over all replicas.
        family: `gpt`: dropout, LayerNorm, biases, learned positions; `llama`: RMSNorm, rotary
            positions, none of these.
        recompute: `selective` runs the core of attention (scores, softmax, dropout, values) again
            in the backward pass, `full` every layer from its input.
        attention: `materialised` writes the scores to memory (all pairs computed), `flash` does
            not (the pairs of the causal mask only).
        sequence_parallel: norms, dropouts and residuals are sliced over tp, too.
        zero: 0: every replica holds everything; 1: optimiser states are sharded over replicas,
            2: gradients too, 3: weights too.
        overlap_experts: experts' all to all runs beside the compute of another micro-batch, as in
            DualPipe; else everything waits for it.
    """

    model: ModelSpec
    sequence_tokens: Count
    batch_sequences: Count
    family: Annotated[str, choice("gpt", "llama")] = "llama"
    recompute: Annotated[str, choice("none", "selective", "full")] = "none"
    attention: Annotated[str, choice("materialised", "flash")] = "flash"
    sequence_parallel: bool = True
    zero: int = 0
    overlap_experts: bool = False

    def _check(self) -> None:
        one_of(TRAINED_DTYPES, dtype=self.model.weight_dtype)
        if self.zero not in ZERO_STAGES:
            raise InputError("zero", self.zero, "0, 1, 2 or 3")
        if self.model.linear or self.model.index or self.model.full_heads:
            raise InputError(
                f"model {self.model.id}", "sparse or linear attention, or heads of several kinds",
                "attention over all keys or a window; the memory of other kinds is not modelled",
            )  # fmt: skip
        if self.overlap_experts and self.model.moe is None:
            raise InputError("overlap_experts", "true", "a model with experts")
        if self.attention == "materialised" and (self.model.window_tokens or self.model.mla):
            raise InputError("attention", self.attention, "flash: windows and latents need it")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step."""
        return self.batch_sequences * self.sequence_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout(Spec):
    """
    Parallel degrees of a training job.

    GPU r = tp + TP (cp + CP (pp + PP dp)): tensor slices are neighbours, replicas far apart.

    Attributes:
        cp: slices of every sequence.
        dp: replicas, each with its own sequences.
        ep: replicas that share out the experts; each expert is sliced tp ways.
        micro_batch: sequences that pass the pipeline at a time.
        interleave: chunks of layers that each stage holds.
    """

    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    dp: Count = 1
    ep: Count = 1
    micro_batch: Count = 1
    interleave: Count = 1

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def copies(self) -> int:
        """GPUs that hold the same slice of the weights: replicas times slices of sequences."""
        return self.dp * self.cp

    def tokens_per_micro_batch(self, job: TrainingJob) -> float:
        """Return the tokens of a micro-batch that one GPU works on."""
        return self.micro_batch * job.sequence_tokens / self.cp

    def micro_batches(self, job: TrainingJob) -> int:
        """Micro-batches that pass one pipeline in a step."""
        return job.batch_sequences // (self.dp * self.micro_batch)

    def stage_layers(self, job: TrainingJob) -> int:
        """Layers of the fullest stage: chunks of equal size, rounded up."""
        chunks = self.pp * self.interleave
        return -(-job.model.num_layers // chunks) * self.interleave

    def layers_of(self, job: TrainingJob, stage: str) -> int:
        """Layers of a stage; of the first and the last one less where stages cannot be equal."""
        layers = self.stage_layers(job)
        missing = self.pp * layers - job.model.num_layers
        return layers - 1 if stage != "second" and self.pp > ENDS and missing >= ENDS else layers

    def refusal(self, job: TrainingJob) -> InputError | None:
        """Return the reason why *job* cannot have this layout; `None`: it can."""
        model, moe = job.model, job.model.moe
        share = self.dp * self.micro_batch
        heads = model.num_heads % self.tp or (
            self.tp % model.num_kv_heads and model.num_kv_heads % self.tp
        )
        shared = (
            f"a divisor of {model.num_heads} heads that shares out {model.num_kv_heads} KV heads"
        )
        rules: tuple[tuple[bool | int, str, int, str], ...] = (
            (heads, "tp", self.tp, shared),
            (model.ffn_size % self.tp, "tp", self.tp, f"a divisor of ffn = {model.ffn_size}"),
            (self.pp * max(1, self.interleave - 1) > model.num_layers, "pp x interleave",
             self.pp * self.interleave, f"at most {model.num_layers} layers"),
            (self.pp == 1 and self.interleave > 1, "interleave", self.interleave,
             "1 without pipeline stages"),
            (job.sequence_tokens % (2 * self.cp) if self.cp > 1 else 0, "cp", self.cp,
             f"a divisor of half the {job.sequence_tokens} tokens of a sequence"),
            (job.batch_sequences % share, "batch", job.batch_sequences,
             f"a multiple of dp x micro-batch = {share}"),
            (self.ep > 1 and moe is None, "ep", self.ep, "1: the model has no experts"),
            (moe is not None and (moe.num_experts % self.ep or self.copies % self.ep), "ep",
             self.ep, f"a divisor of the experts and of dp x cp = {self.copies}"),
        )  # fmt: skip
        broken = next((rule for rule in rules if rule[0]), None)
        return None if broken is None else InputError(*broken[1:])
