"""A training job: model, batch, recompute, precision."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, one_of, positive
from minicluster.specs.model import ModelSpec

RECOMPUTES = ("none", "selective", "full")
ATTENTIONS = ("materialised", "flash")
FAMILIES = ("gpt", "llama")
ZERO_STAGES = (0, 1, 2, 3)
TRAINED_DTYPES = ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
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

    __pydantic_config__ = STRICT

    model: ModelSpec
    sequence_tokens: int
    batch_sequences: int
    family: str = "llama"
    recompute: str = "none"
    attention: str = "flash"
    sequence_parallel: bool = True
    zero: int = 0
    overlap_experts: bool = False

    def __post_init__(self) -> None:
        """Check the names, and that what is asked for is modelled."""
        positive(sequence_tokens=self.sequence_tokens, batch_sequences=self.batch_sequences)
        one_of(FAMILIES, family=self.family)
        one_of(RECOMPUTES, recompute=self.recompute)
        one_of(ATTENTIONS, attention=self.attention)
        one_of(TRAINED_DTYPES, dtype=self.model.weight_dtype)
        if self.zero not in ZERO_STAGES:
            raise InputError("zero", self.zero, "0, 1, 2 or 3")
        if self.model.linear or self.model.index:
            raise InputError(
                f"model {self.model.id}", "sparse or linear attention",
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
