"""FLOPs of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.slicing import Slicing
from sizing.latency.load import pairs, prefill_load
from sizing.latency.work import step_ops

if TYPE_CHECKING:
    from sizing.training.job import TrainingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """
    FLOPs of one optimiser step over all GPUs.

    Attributes:
        forward: of one forward pass.
        core: the part of it in scores and values of attention.
        head: the part of it in the output table.
        recompute: what the backward pass runs again.
    """

    forward: float
    core: float
    head: float
    recompute: float

    @property
    def model(self) -> float:
        """Forward and backward, once each: what MFU counts."""
        return 3 * self.forward

    @property
    def executed(self) -> float:
        """With what is run again: what HFU counts."""
        return self.model + self.recompute


def step_flops(job: TrainingJob) -> StepFlops:
    """
    FLOPs of one optimiser step on all GPUs together, multiplication by multiplication.

        F = 3 (sum of GEMMs + core + head) + recompute; core = 4 N H A per layer, A the pairs of
        the causal mask (flash) or all s^2 (materialised); recompute = 0, core, or all but the head
        (docs/model.md, eq. J2)

    Source:
        Megatron (arXiv 2104.04473), appendix: with full recompute, materialised scores and
        f = 4 h this is 96 B s L h^2 (1 + s / 6h + V / 16 L h); a backward pass multiplies twice.

    Ignores:
        Elementwise work; the scores that flash attention makes again inside its backward kernel.

    """
    s, none = np.asarray(float(job.sequence_tokens)), np.zeros(())
    ops = [
        op for op in step_ops(job.model, prefill_load(s), slicing=Slicing()) if op.name != "lm_head"
    ]
    core = sum(float(op.total.flops) for op in ops if op.kind == "prefill attention")
    if job.attention == "materialised":
        core *= float(s * s / pairs(s, none))
    rest = sum(float(op.total.flops) for op in ops if op.kind != "prefill attention")
    head = 2.0 * job.sequence_tokens * job.model.hidden_size * job.model.vocab_size
    again = {"none": 0.0, "selective": core, "full": core + rest}[job.recompute]
    n = job.batch_sequences
    return StepFlops(
        forward=n * (core + rest + head), core=n * core, head=n * head, recompute=n * again
    )
