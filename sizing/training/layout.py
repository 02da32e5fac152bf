"""Layout of a training job: how its GPUs share the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, positive

if TYPE_CHECKING:
    from sizing.training.job import TrainingJob

ENDS = 2
"""Stages that hold tables: the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout:
    """
    Parallel degrees of a training job.

    GPU r = tp + TP (cp + CP (pp + PP dp)): tensor slices are neighbours, replicas far apart.

    Attributes:
        tp: tensor slices of every layer.
        pp: pipeline stages.
        cp: slices of every sequence.
        dp: replicas, each with its own sequences.
        ep: replicas that share out the experts; each expert is sliced tp ways.
        micro_batch: sequences that pass the pipeline at a time.
        interleave: chunks of layers that each stage holds.
    """

    __pydantic_config__ = STRICT

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    micro_batch: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        """Check the counts."""
        positive(
            tp=self.tp, pp=self.pp, cp=self.cp, dp=self.dp, ep=self.ep,
            micro_batch=self.micro_batch, interleave=self.interleave,
        )  # fmt: skip

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def copies(self) -> int:
        """GPUs that hold the same slice of the weights: replicas times slices of sequences."""
        return self.dp * self.cp

    def micro_batches(self, job: TrainingJob) -> int:
        """Micro-batches that pass one pipeline in a step."""
        return job.batch_sequences // (self.dp * self.micro_batch)

    def stage_layers(self, job: TrainingJob) -> int:
        """Layers of the fullest stage: chunks of equal size, rounded up."""
        chunks = self.pp * self.interleave
        return -(-job.model.num_layers // chunks) * self.interleave

    def end_layers(self, job: TrainingJob) -> int:
        """Layers of the first and of the last stage: one less where stages cannot be equal."""
        layers = self.stage_layers(job)
        missing = self.pp * layers - job.model.num_layers
        return layers - 1 if self.pp > ENDS and missing >= ENDS else layers

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
