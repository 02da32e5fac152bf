"""Seconds of one engine step, term by term: ops, collectives, engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sizing.latency.collectives import all_gather_s, all_reduce_s
from sizing.latency.op import ACTIVATION_BYTES
from sizing.latency.roofline import op_time
from sizing.latency.work import step_ops
from sizing.specs.cluster import ClusterSpec
from sizing.specs.engine import EngineProfile
from sizing.specs.gpu import GpuSpec
from sizing.specs.model import ModelSpec
from sizing.specs.slicing import Slicing

if TYPE_CHECKING:
    from sizing.latency.load import StepLoad

BOUNDS = ("compute", "memory bandwidth", "network", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a step runs on: one model on one kind of GPU in one cluster under one engine."""

    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """
    One term of a step.

    Attributes:
        name: op, collective or engine constant.
        equation: in docs/model.md.
        seconds: of all its runs in the step.
        compute_s: if only compute bound it.
        memory_s: if only HBM bound it.
        network_s: if only links bound it.
        launch_s: fixed part, whatever the size.
        flops: on one GPU.
        hbm_bytes: on one GPU.
    """

    name: str
    equation: str
    seconds: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    memory_s: NDArray[np.float64]
    network_s: NDArray[np.float64]
    launch_s: NDArray[np.float64]
    flops: NDArray[np.float64]
    hbm_bytes: NDArray[np.float64]

    @property
    def bound(self) -> str:
        """What takes most of it, of `BOUNDS`; arrays are summed first."""
        parts = (self.compute_s, self.memory_s, self.network_s, self.launch_s)
        return BOUNDS[int(np.argmax([np.sum(part) for part in parts]))]


def step_terms(machine: Machine, load: StepLoad, *, tp: int) -> tuple[Term, ...]:
    """
    Split the seconds of a step into terms.

        t = sum of ops + 2 L all-reduces + logits gather + L t_layer + t_step + B t_seq
        (docs/model.md, eq. S5)

    Args:
        machine: model, GPU, cluster, engine.
        load: what the step holds, arrays of any shape.
        tp: tensor-parallel degree.

    Returns:
        Terms whose seconds add up to the step, each of the shape of *load*.

    Source:
        Ops run one after another on a stream; sums of op tables predict static batches within
        6 to 12 % (aiconfigurator, measured in our research notes).

    Ignores:
        Overlap of communication with compute, and of the host with the GPU beyond what the
        engine's constants were fitted with.

    """
    terms = [
        _term(
            op.name,
            op.equation,
            time.seconds,
            compute=time.compute_s,
            memory=time.memory_s,
            launch=time.launch_s,
            flops=op.total.flops,
            hbm_bytes=op.total.hbm_bytes,
        )
        for op in step_ops(machine.model, load, slicing=Slicing(tp=tp))
        for time in (op_time(op, machine.gpu),)
    ]
    return (*terms, *_network_terms(machine, load, tp=tp), *_engine_terms(machine, load))


def step_s(machine: Machine, load: StepLoad, *, tp: int) -> NDArray[np.float64]:
    """Sum the terms of `step_terms` (docs/model.md, eq. S5)."""
    return np.asarray(sum(term.seconds for term in step_terms(machine, load, tp=tp)))


def beyond_hb_domain_s(machine: Machine, load: StepLoad, *, tp: int) -> NDArray[np.float64]:
    """
    What crossing the HB domain adds to a step: its collectives, less those within one domain.

    Zero while *tp* fits the domain.
    """
    inner = min(tp, machine.cluster.gpus_per_hb_domain)
    across, inside = (
        sum(term.seconds for term in _network_terms(machine, load, tp=group))
        for group in (tp, inner)
    )
    return np.asarray(across - inside)


def _network_terms(machine: Machine, load: StepLoad, *, tp: int) -> tuple[Term, ...]:
    """All-reduces after attention and feed-forward (eq. N1, N2), gather of the logits (eq. N3)."""
    if tp == 1:
        return ()
    model = machine.model
    hidden = load.tokens * model.hidden_size * ACTIVATION_BYTES
    logits = (load.prompts + load.sequences) * model.vocab_size * ACTIVATION_BYTES
    terms = []
    for name, equation, repeats, size, seconds_of in (
        ("all-reduce", "N1", 2 * model.num_layers, hidden, all_reduce_s),
        ("logits gather", "N3", 1, logits, all_gather_s),
    ):
        seconds = repeats * seconds_of(size, tp, machine.gpu, machine.cluster)
        tiny = np.where(size > 0, 1e-9, 0.0)
        fixed = repeats * seconds_of(tiny, tp, machine.gpu, machine.cluster)
        terms.append(_term(name, equation, seconds, network=seconds - fixed, launch=fixed))
    return tuple(terms)


def _engine_terms(machine: Machine, load: StepLoad) -> tuple[Term, ...]:
    """Host time that the GPU waits for, constants of the engine version (eq. S5)."""
    engine, one = machine.engine, np.ones_like(load.tokens)
    return tuple(
        _term(name, "S5", seconds, launch=seconds)
        for name, seconds in (
            ("engine per layer", engine.per_layer_s * machine.model.num_layers * one),
            ("engine per step", engine.per_step_s * one),
            ("engine per sequence", engine.per_sequence_s * (load.prompts + load.sequences)),
        )
    )


def _term(
    name: str, equation: str, seconds: NDArray[np.float64], **parts: NDArray[np.float64]
) -> Term:
    """Make a term; parts that are not given are zero."""
    zero = np.zeros_like(seconds)
    return Term(
        name=name,
        equation=equation,
        seconds=seconds,
        compute_s=parts.get("compute", zero),
        memory_s=parts.get("memory", zero),
        network_s=parts.get("network", zero),
        launch_s=parts.get("launch", zero),
        flops=parts.get("flops", zero),
        hbm_bytes=parts.get("hbm_bytes", zero),
    )
