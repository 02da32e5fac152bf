"""Iteration time of training on rails, after the rail-only paper: what the HB domain is worth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.checks import positive

if TYPE_CHECKING:
    from minicluster.specs.study import Conventions, StudyModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """
    One step of training.

    Attributes:
        gpus: N.
        hb_size: K.
        model_parallel: N_M, GPUs that share the layers of one copy.
        compute_s: of the arithmetic.
        model_parallel_s: all-reduces of activations in the HB domain.
        hb_s: reduce-scatter and all-gather of gradients in the HB domain.
        rail_s: all-reduce of gradients on the rails.
    """

    gpus: int
    hb_size: int
    model_parallel: int
    compute_s: float
    model_parallel_s: float
    hb_s: float
    rail_s: float

    @property
    def total_s(self) -> float:
        """The whole step: nothing is hidden behind anything."""
        return self.compute_s + self.model_parallel_s + self.hb_s + self.rail_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """
    Traffic between GPUs in a step.

    Attributes:
        silent_pairs_fraction: pairs of GPUs that send each other nothing.
        hb_pairs_fraction: pairs that talk inside an HB domain.
        hb_bytes_fraction: of all bytes sent.
        model_parallel_bytes: that one GPU sends, as the two below.
        hb_bytes: of gradients inside the HB domain.
        rail_bytes: of gradients on its rail.
    """

    silent_pairs_fraction: float
    hb_pairs_fraction: float
    hb_bytes_fraction: float
    model_parallel_bytes: float
    hb_bytes: float
    rail_bytes: float


def optimal_model_parallel(model: StudyModel, gpus: int) -> float:
    """
    Return the model-parallel size that balances activations against gradients.

        N_M* = sqrt(P N / (4 b s h l))      (docs/model.md, eq. Y4)

    No bandwidth and no HB size enters; it falls as the batch grows.
    """
    positive(**{"--gpus": gpus})
    activations = 4 * model.tokens_per_batch * model.hidden * model.layers
    return float(np.sqrt(model.parameters * gpus / activations))


def iteration(
    model: StudyModel, conventions: Conventions, *, gpus: int, hb_size: int, model_parallel: int = 0
) -> Iteration:
    """
    Time one step.

        T_comp = c P b s / (N C);  T_mp = 8 l D (N_M - 1)/N_M / B_F, D = e b s h N_M / N
        (docs/model.md, eq. Y1, Y2)
        T_hb = 2 G (1 - N_M/K) / B_F,  T_rail = 2 G (N_M/K) (1 - K/N) / B_S,  G = e P / N_M
        (eq. Y3)

    Args:
        model: parameters, layers, hidden size and tokens of a batch.
        conventions: C, B_F, B_S, e, c.
        gpus: N.
        hb_size: K.
        model_parallel: N_M; 0: the power of two up to K that takes least.

    Raises:
        InputError: N is no multiple of K, or N_M does not divide K.

    Source:
        Rebuilt from arXiv 2307.12169: its printed 12, 0.95, 37 and 7.5 % follow within 0.1.

    Ignores:
        Pipelines, latencies, overlap, memory: as the paper's first version does.

    """
    _check(gpus, hb_size, model_parallel)
    sizes = [model_parallel] if model_parallel else _powers(hb_size)
    steps = [_iteration(model, conventions, gpus, hb_size, size) for size in sizes]
    return min(steps, key=lambda step: step.total_s)


def ideal(model: StudyModel, conventions: Conventions, *, gpus: int) -> Iteration:
    """Time one step where all GPUs are one HB domain: the bound of any network (eq. Y5)."""
    return iteration(model, conventions, gpus=gpus, hb_size=gpus)


def traffic(model: StudyModel, conventions: Conventions, step: Iteration) -> Traffic:
    """
    Count pairs and bytes of a step.

        a GPU talks to N_M - 1, K/N_M - 1 and N/K - 1 others      (docs/model.md, eq. Y6)

    """
    mp, hb, rail = step.model_parallel, step.hb_size, step.gpus
    peers = (mp - 1, hb // mp - 1, rail // hb - 1)
    possible = max(1, step.gpus - 1)
    sent = _bytes(model, conventions, step.gpus, step.hb_size, mp)
    return Traffic(
        silent_pairs_fraction=1 - sum(peers) / possible,
        hb_pairs_fraction=(peers[0] + peers[1]) / possible,
        hb_bytes_fraction=(sent[0] + sent[1]) / max(sum(sent), 1e-300),
        model_parallel_bytes=sent[0],
        hb_bytes=sent[1],
        rail_bytes=sent[2],
    )


def scale_ratio(conventions: Conventions) -> float:
    """Return B_F / B_S as the study counts both: 19.2 in the paper, like for like 9."""
    return conventions.scale_up_bytes_per_s / conventions.scale_out_bytes_per_s


def hb_bytes_per_s(conventions: Conventions, hb_size: int) -> float:
    """Return what the GPUs of an HB domain send together, as the study counts B_F."""
    return hb_size * conventions.scale_up_bytes_per_s


def gains(
    model: StudyModel, conventions: Conventions, *, gpus: int, hb_sizes: tuple[int, ...]
) -> tuple[float, ...]:
    """Return by which fraction each HB size shortens the step of the one before (eq. Y3)."""
    totals = [iteration(model, conventions, gpus=gpus, hb_size=size).total_s for size in hb_sizes]
    return tuple(1 - after / before for before, after in itertools.pairwise(totals))


def relative_performance(
    model: StudyModel, conventions: Conventions, *, gpus: int, hb_size: int
) -> float:
    """Return the ideal step's time over that on rails, 1 at best (docs/model.md, eq. Y5)."""
    step = iteration(model, conventions, gpus=gpus, hb_size=hb_size)
    return ideal(model, conventions, gpus=gpus).total_s / step.total_s


def with_batch(model: StudyModel, tokens_per_batch: float) -> StudyModel:
    """Return the model with another batch."""
    return replace(model, tokens_per_batch=tokens_per_batch)


def _bytes(
    model: StudyModel, conventions: Conventions, gpus: int, hb_size: int, mp: int
) -> tuple[float, float, float]:
    """Return what one GPU sends: activations, gradients in the HB domain, gradients on its rail."""
    unit = conventions.bytes_per_number
    activations = unit * model.tokens_per_batch * model.hidden * mp / gpus
    gradients = unit * model.parameters / mp
    return (
        8 * model.layers * activations * (mp - 1) / mp,
        2 * gradients * (1 - mp / hb_size),
        2 * gradients * (mp / hb_size) * (1 - hb_size / gpus),
    )


def _iteration(
    model: StudyModel, conventions: Conventions, gpus: int, hb_size: int, mp: int
) -> Iteration:
    sent = _bytes(model, conventions, gpus, hb_size, mp)
    work = conventions.flops_per_parameter_and_token * model.parameters * model.tokens_per_batch
    return Iteration(
        gpus=gpus,
        hb_size=hb_size,
        model_parallel=mp,
        compute_s=work / (gpus * conventions.flops_per_s),
        model_parallel_s=sent[0] / conventions.scale_up_bytes_per_s,
        hb_s=sent[1] / conventions.scale_up_bytes_per_s,
        rail_s=sent[2] / conventions.scale_out_bytes_per_s,
    )


def _powers(hb_size: int) -> list[int]:
    """Return the powers of two that divide an HB domain."""
    return [2**i for i in range(hb_size.bit_length()) if hb_size % 2**i == 0]


def _check(gpus: int, hb_size: int, model_parallel: int) -> None:
    positive(**{"--gpus": gpus, "--hb-size": hb_size})
    if gpus % hb_size:
        raise InputError("--gpus", gpus, f"whole HB domains: a multiple of {hb_size}")
    if model_parallel < 0 or (model_parallel and hb_size % model_parallel):
        raise InputError(
            "--model-parallel",
            model_parallel,
            f"a divisor of the HB domain's {hb_size} GPUs: activations stay in it",
        )
