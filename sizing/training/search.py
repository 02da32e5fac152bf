"""Layouts of a training job: micro-batch and chunks of a given one, or every one there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from sizing.training.job import TrainingJob, TrainingLayout
from sizing.training.memory import training_memory
from sizing.training.step import TrainingMachine, training_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_RANKED = 10
"""Layouts that a search returns."""
FILL = 0.97
"""Share of the memory that CUDA reports which a chosen layout may take: the rest is for the
context, communication buffers and fragmentation."""
SLACK = 0.06
"""A layout may be this much slower than the fastest if it takes less memory."""
MICRO_BATCHES = (1, 2, 4, 8)
SLICES = (1, 2, 4, 8, 16)
"""Slices of a sequence that are tried."""
LEAST_SLICE = 4096
"""Tokens of a slice at least: below, kernels are too small to be worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A layout that was tried, with the memory of its fullest GPU."""

    layout: TrainingLayout
    step_s: float
    memory_bytes: float


def best_choice(
    job: TrainingJob,
    layout: TrainingLayout,
    machine: TrainingMachine,
    *,
    micro_batch: int | None = None,
    interleave: int | None = None,
) -> Trial | None:
    """
    Return the choice of micro-batch and chunks that takes least memory of the fastest ones.

    What is given is not chosen. Of all that the job allows and that fit memory, those at most
    `SLACK` slower than the fastest are compared; `None`: none fits.
    """
    chunks = range(1, job.model.num_layers // layout.pp + 2) if layout.pp > 1 else range(1, 2)
    room = FILL * machine.gpu.require("hbm_bytes")
    tried: list[Trial] = []
    for sequences in MICRO_BATCHES if micro_batch is None else (micro_batch,):
        seen: set[int] = set()
        for count in chunks if interleave is None else (interleave,):
            choice = replace(layout, micro_batch=sequences, interleave=count)
            if choice.refusal(job) is not None:
                continue
            # More chunks that make no stage shorter only fill the pipeline with empty ones.
            chunk_layers = -(-job.model.num_layers // (layout.pp * count))
            memory = training_memory(job, choice).total
            if chunk_layers in seen or memory > room:
                continue
            seen.add(chunk_layers)
            step_s = training_step(job, choice, machine).step_s
            tried.append(Trial(layout=choice, step_s=step_s, memory_bytes=memory))
    fastest = min((trial.step_s for trial in tried), default=0.0)
    near = [trial for trial in tried if trial.step_s <= fastest * (1 + SLACK)]
    return min(near, key=lambda trial: (trial.memory_bytes, trial.step_s), default=None)


def search_layouts(
    job_of: Callable[[TrainingLayout], TrainingJob],
    gpus: int,
    machine: TrainingMachine,
) -> list[Trial]:
    """
    Rank every layout of *gpus* GPUs: tp within the HB domain, pp, cp, dp, ep, micro-batch, chunks.

    Args:
        job_of: what is trained in a layout: sharding may follow from it.

    Returns:
        The fastest first, `MOST_RANKED` of them; of equal ones the one with less memory.

    Raises:
        NegativeAnswer: no layout fits the job and the memory.
    """
    layouts = _degrees(job_of(TrainingLayout(dp=gpus)), gpus, machine)
    tried = [best_choice(job_of(layout), layout, machine) for layout in layouts]
    fitting = [trial for trial in tried if trial is not None]
    if not fitting:
        room = machine.gpu.require("hbm_bytes") * FILL / 1e9
        raise NegativeAnswer(
            f"no layout of {gpus} {machine.gpu.name} fits: heads, layers, batch and"
            f" {room:.0f} GB of memory a GPU; take more GPUs or --recompute full"
        )
    return sorted(fitting, key=lambda trial: (trial.step_s, trial.memory_bytes))[:MOST_RANKED]


def _degrees(job: TrainingJob, gpus: int, machine: TrainingMachine) -> Iterator[TrainingLayout]:
    model = job.model
    experts = model.moe.num_experts if model.moe else 1
    domain = machine.cluster.gpus_per_hb_domain
    for tp in _divisors(min(domain, model.num_heads)):
        for pp in range(1, min(model.num_layers, gpus // tp) + 1):
            if gpus % (tp * pp):
                continue
            for cp in SLICES:
                if (cp > 1 and job.sequence_tokens // cp < LEAST_SLICE) or gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                for ep in sorted({1, *(e for e in _divisors(experts) if dp * cp % e == 0)}):
                    layout = TrainingLayout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
                    if layout.refusal(job) is None:
                        yield layout


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
