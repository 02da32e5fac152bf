"""The rail-only study: step times of training on rails, traffic and cost, by its conventions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.config import overridden, parse, read_toml
from minicluster.specs.checks import Count, Positive, Spec
from minicluster.specs.gpu import NumberSource
from sizing.catalog.folder import find_file
from sizing.network.bom import Bill, NetworkOrder, bill

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Batches of the batch sweep, of the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyModel(Spec):
    """
    A model as a study took it.

    Attributes:
        parameters: P.
        layers: l.
        hidden: h.
        tokens_per_batch: b s, of the whole job.
        warning: what to know of these numbers.
    """

    name: str
    parameters: Positive
    layers: Count
    hidden: Count
    tokens_per_batch: Positive
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions(Spec):
    """
    `configs/studies/*.toml`: constants of a study.

    Attributes:
        flops_per_s: C, one GPU.
        scale_up_bytes_per_s: B_F, one GPU, as the study counts it.
        scale_out_bytes_per_s: B_S.
        bytes_per_number: e, of activations and gradients.
        flops_per_parameter_and_token: c: 6, or 8 with full recompute.
        gpus: cluster sizes that it looks at.
        hb_sizes: HB sizes that it sweeps.
        radices: radices of switches.
        bill_hb_size: HB size of its bill of materials.
        warning: what of it not to use elsewhere.
    """

    name: str
    flops_per_s: Positive
    scale_up_bytes_per_s: Positive
    scale_out_bytes_per_s: Positive
    bytes_per_number: Positive
    flops_per_parameter_and_token: Positive
    gpus: tuple[Count, ...]
    hb_sizes: tuple[Count, ...]
    radices: tuple[Count, ...]
    bill_hb_size: Count
    models: tuple[StudyModel, ...]
    warning: str = ""
    sources: tuple[NumberSource, ...] = ()


def find_study(name: str, overrides: Sequence[str] = ()) -> Conventions:
    """
    Return the conventions of a study, some of them overridden.

    Args:
        name: name of a file in `configs/studies`, or the path of one like it.
    """
    expectation = "a study or a file like one"
    path = find_file("studies", name, place="--study", expectation=expectation)
    raw = overridden(read_toml(path), overrides)
    return parse(Conventions, raw, place=" ".join([path.name, *overrides]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """
    One step of training.

    Attributes:
        gpus: N.
        hb_size: K.
        model_parallel: N_M, GPUs that share the layers of one copy.
        model_parallel_bytes: activations that one GPU sends in the HB domain.
        hb_bytes: gradients that it sends in the HB domain.
        rail_bytes: gradients that it sends on its rail.
        compute_s: time of the arithmetic.
        model_parallel_s: all-reduces of activations.
        hb_s: reduce-scatter and all-gather of gradients in the HB domain.
        rail_s: all-reduce of gradients on the rails.
    """

    gpus: int
    hb_size: int
    model_parallel: int
    model_parallel_bytes: float
    hb_bytes: float
    rail_bytes: float
    compute_s: float
    model_parallel_s: float
    hb_s: float
    rail_s: float

    @property
    def total_s(self) -> float:
        """The whole step: nothing is hidden behind anything."""
        return self.compute_s + self.model_parallel_s + self.hb_s + self.rail_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """
    One step of a sweep.

    Attributes:
        relative_performance: time of the step if all GPUs were one HB domain, the bound of any
            network, over that of this step; 1 at best (docs/model.md, eq. Y5).
    """

    tokens_per_batch: float
    step: Iteration
    total_s: float
    relative_performance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """
    Steps of one model on one number of GPUs.

    Attributes:
        gains: fraction by which each HB size shortens the step of the one before; one less than
            points; empty for a sweep of batches.
    """

    model: str
    gpus: int
    points: tuple[Point, ...]
    gains: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """
    Traffic of a step of one model, at the study's HB size.

    Attributes:
        silent_pairs_fraction: pairs of GPUs that send each other nothing.
        hb_pairs_fraction: pairs that talk inside an HB domain.
        hb_bytes_fraction: share of all bytes sent.
    """

    model: str
    gpus: int
    optimal_model_parallel: float
    step: Iteration
    silent_pairs_fraction: float
    hb_pairs_fraction: float
    hb_bytes_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Rails against a Clos, at one size and radix."""

    gpus: int
    radix: int
    clos: Bill
    rail_only: Bill
    saving_fraction: float
    links_saved_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RailOnlyResult:
    """
    Everything that the study says, from our model.

    Attributes:
        scale_ratio: B_F / B_S as the study counts both: 19.2 in the paper, like for like 9.
        hb_bytes_per_s: rate of all GPUs of an HB domain together, as the study counts B_F.
        price_ratio: a switch port's price over a transceiver's, of all savings.
    """

    conventions: Conventions
    price_ratio: float
    hb_sweeps: tuple[Sweep, ...]
    batch_sweeps: tuple[Sweep, ...]
    shares: tuple[Shares, ...]
    savings: tuple[Saving, ...]
    warnings: tuple[str, ...]
    scale_ratio: float
    hb_bytes_per_s: float

    @property
    def savings_range(self) -> tuple[float, float]:
        """The smallest and the largest saving; nan for none."""
        values = [saving.saving_fraction for saving in self.savings] or [math.nan]
        return min(values), max(values)


def study(conventions: Conventions, *, price_ratio: float = 2.0) -> RailOnlyResult:
    """
    Run the study.

    Returns:
        HB sizes that do not divide a number of GPUs are left out of its sweep, bills likewise.

    Raises:
        InputError: a radix too small for any tree.
    """
    sizes = [gpus for gpus in conventions.gpus if gpus % conventions.bill_hb_size == 0]
    runs = [(model, gpus) for gpus in sizes for model in conventions.models]
    warnings = [conventions.warning]
    warnings += [f"{model.name}: {model.warning}" for model in conventions.models if model.warning]
    return RailOnlyResult(
        conventions=conventions,
        price_ratio=price_ratio,
        hb_sweeps=tuple(
            _hb_sweep(model, conventions, gpus)
            for gpus in conventions.gpus
            for model in conventions.models
        ),
        batch_sweeps=tuple(_batch_sweep(model, conventions, gpus) for model, gpus in runs),
        shares=tuple(_shares(model, conventions, gpus) for model, gpus in runs),
        savings=tuple(
            _saving(conventions, gpus, radix, price_ratio)
            for gpus in sizes
            for radix in conventions.radices
        ),
        scale_ratio=conventions.scale_up_bytes_per_s / conventions.scale_out_bytes_per_s,
        hb_bytes_per_s=conventions.bill_hb_size * conventions.scale_up_bytes_per_s,
        warnings=tuple(text for text in warnings if text),
    )


def optimal_model_parallel(model: StudyModel, gpus: int) -> float:
    """
    Return the model-parallel size that balances activations against gradients.

        N_M* = sqrt(P N / (4 b s h l))      (docs/model.md, eq. Y4)

    No bandwidth and no HB size enters; it falls as the batch grows.
    """
    activations = 4 * model.tokens_per_batch * model.hidden * model.layers
    return math.sqrt(model.parameters * gpus / activations)


def iteration(model: StudyModel, conventions: Conventions, *, gpus: int, hb_size: int) -> Iteration:
    """
    Time one step, with the power of two up to K as N_M that takes least.

        T_comp = c P b s / (N C);  T_mp = 8 l D (N_M - 1)/N_M / B_F, D = e b s h N_M / N
        (docs/model.md, eq. Y1, Y2)
        T_hb = 2 G (1 - N_M/K) / B_F,  T_rail = 2 G (N_M/K) (1 - K/N) / B_S,  G = e P / N_M
        (eq. Y3)

    Args:
        model: parameters, layers, hidden size and tokens of a batch.
        conventions: C, B_F, B_S, e, c.
        gpus: N.
        hb_size: K, a divisor of N.

    Source:
        Rebuilt from arXiv 2307.12169: its printed 12, 0.95, 37 and 7.5 % follow within 0.1.

    Ignores:
        Pipelines, latencies, overlap, memory: as the paper's first version does.
    """
    work = conventions.flops_per_parameter_and_token * model.parameters * model.tokens_per_batch
    unit, up = conventions.bytes_per_number, conventions.scale_up_bytes_per_s
    steps = []
    for mp in (2**i for i in range(hb_size.bit_length()) if hb_size % 2**i == 0):
        hidden = unit * model.tokens_per_batch * model.hidden * mp / gpus
        gradients = unit * model.parameters / mp
        activations = 8 * model.layers * hidden * (mp - 1) / mp
        inside = 2 * gradients * (1 - mp / hb_size)
        on_rail = 2 * gradients * (mp / hb_size) * (1 - hb_size / gpus)
        steps.append(
            Iteration(
                gpus=gpus,
                hb_size=hb_size,
                model_parallel=mp,
                model_parallel_bytes=activations,
                hb_bytes=inside,
                rail_bytes=on_rail,
                compute_s=work / (gpus * conventions.flops_per_s),
                model_parallel_s=activations / up,
                hb_s=inside / up,
                rail_s=on_rail / conventions.scale_out_bytes_per_s,
            )
        )
    return min(steps, key=lambda step: step.total_s)


def _hb_sweep(model: StudyModel, conventions: Conventions, gpus: int) -> Sweep:
    sizes = [size for size in conventions.hb_sizes if gpus % size == 0]
    points = tuple(_point(model, conventions, gpus, size) for size in sizes)
    pairs = itertools.pairwise(points)
    gains = tuple(1 - after.total_s / before.total_s for before, after in pairs)
    return Sweep(model=model.name, gpus=gpus, points=points, gains=gains)


def _batch_sweep(model: StudyModel, conventions: Conventions, gpus: int) -> Sweep:
    batches = (replace(model, tokens_per_batch=each * model.tokens_per_batch) for each in BATCHES)
    size = conventions.bill_hb_size
    points = tuple(_point(batch, conventions, gpus, size) for batch in batches)
    return Sweep(model=model.name, gpus=gpus, points=points)


def _point(model: StudyModel, conventions: Conventions, gpus: int, hb_size: int) -> Point:
    step = iteration(model, conventions, gpus=gpus, hb_size=hb_size)
    ideal = iteration(model, conventions, gpus=gpus, hb_size=gpus)
    return Point(
        tokens_per_batch=model.tokens_per_batch,
        step=step,
        total_s=step.total_s,
        relative_performance=ideal.total_s / step.total_s,
    )


def _shares(model: StudyModel, conventions: Conventions, gpus: int) -> Shares:
    """
    Count pairs and bytes of a step.

        a GPU talks to N_M - 1, K/N_M - 1 and N/K - 1 others      (docs/model.md, eq. Y6)
    """
    hb_size = conventions.bill_hb_size
    step = iteration(model, conventions, gpus=gpus, hb_size=hb_size)
    mp = step.model_parallel
    inside, outside = (mp - 1) + (hb_size // mp - 1), gpus // hb_size - 1
    possible = max(1, gpus - 1)
    sent_inside = step.model_parallel_bytes + step.hb_bytes
    return Shares(
        model=model.name,
        gpus=gpus,
        optimal_model_parallel=optimal_model_parallel(model, gpus),
        step=step,
        silent_pairs_fraction=1 - (inside + outside) / possible,
        hb_pairs_fraction=inside / possible,
        hb_bytes_fraction=sent_inside / max(sent_inside + step.rail_bytes, 1e-300),
    )


def _saving(conventions: Conventions, gpus: int, radix: int, price_ratio: float) -> Saving:
    size = conventions.bill_hb_size
    order = NetworkOrder(gpus=gpus, hb_size=size, radix=radix, price_ratio=price_ratio)
    clos, rails = bill(order), bill(replace(order, kind="rail-only"))
    return Saving(
        gpus=gpus,
        radix=radix,
        clos=clos,
        rail_only=rails,
        saving_fraction=rails.saving_fraction,
        links_saved_fraction=1 - rails.links / clos.links,
    )
