"""Layouts of a training job: micro-batch and chunks of a given one, or every one there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from sizing.training.layout import TrainingLayout
from sizing.training.memory import training_memory
from sizing.training.step import training_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sizing.training.job import TrainingJob
    from sizing.training.step import TrainingMachine

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
    """One layout that was tried: seconds of a step, bytes of its fullest GPU."""

    layout: TrainingLayout
    step_s: float
    memory_bytes: float


def settled(
    job: TrainingJob,
    layout: TrainingLayout,
    machine: TrainingMachine,
    *,
    micro_batch: int | None,
    interleave: int | None,
) -> TrainingLayout:
    """
    Choose micro-batch and chunks of a layout where they are not given.

    Of all that fit, the one of least memory among those at most `SLACK` slower than the fastest;
    if none fits, one sequence at a time and one chunk.
    """
    micros = MICRO_BATCHES if micro_batch is None else (micro_batch,)
    chunks = range(1, job.model.num_layers // layout.pp + 2) if layout.pp > 1 else range(1, 2)
    choices = [
        replace(layout, micro_batch=b, interleave=v)
        for b in micros
        for v in (chunks if interleave is None else (interleave,))
    ]
    tried = trials(job, choices, machine)
    if not tried:
        return replace(layout, micro_batch=micros[0], interleave=interleave or 1)
    fastest = min(each.step_s for each in tried)
    near = [each for each in tried if each.step_s <= fastest * (1 + SLACK)]
    return min(near, key=lambda each: (each.memory_bytes, each.step_s)).layout


def trials(
    job: TrainingJob, layouts: Iterable[TrainingLayout], machine: TrainingMachine
) -> list[Trial]:
    """Time those layouts that the job allows and that fit memory; even chunks first."""
    room = FILL * machine.gpu.require("hbm_bytes")
    tried: list[Trial] = []
    seen: set[tuple[int, ...]] = set()
    for layout in layouts:
        if layout.refusal(job) is not None:
            continue
        # More chunks that make no stage shorter only fill the pipeline with empty ones.
        chunk = -(-job.model.num_layers // (layout.pp * layout.interleave))
        key = (layout.tp, layout.pp, layout.cp, layout.dp, layout.ep, layout.micro_batch, chunk)
        needed = training_memory(job, layout).total
        if key in seen or needed > room:
            continue
        seen.add(key)
        seconds = training_step(job, layout, machine).step_s
        tried.append(Trial(layout=layout, step_s=seconds, memory_bytes=needed))
    return tried


def search_layouts(
    job_of: Callable[[TrainingLayout], TrainingJob],
    gpus: int,
    machine: TrainingMachine,
    *,
    top: int = 10,
) -> list[Trial]:
    """
    Rank every layout of *gpus* GPUs: tp within the HB domain, pp, cp, dp, ep, micro-batch, chunks.

    Args:
        job_of: what is trained in a layout: sharding may follow from it.
        gpus: all of them are used.
        machine: GPU and cluster.
        top: how many to return, the fastest first; of equal ones the one with less memory.

    Raises:
        NegativeAnswer: no layout fits the job and the memory.

    """
    found: list[Trial] = []
    for degrees in _degrees(job_of(TrainingLayout(dp=gpus)), gpus, machine):
        job = job_of(degrees)
        layout = settled(job, degrees, machine, micro_batch=None, interleave=None)
        found += trials(job, [layout], machine)
    if not found:
        room = machine.gpu.require("hbm_bytes") * FILL / 1e9
        raise NegativeAnswer(
            f"no layout of {gpus} {machine.gpu.name} fits: heads, layers, batch and"
            f" {room:.0f} GB of memory a GPU; take more GPUs or --recompute full"
        )
    return sorted(found, key=lambda each: (each.step_s, each.memory_bytes))[:top]


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
