"""The rail-only study as a whole: sweeps, traffic, bills of materials, under its conventions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.specs.study import Conventions
from sizing.network.bom import Bill, NetworkOrder, bill
from sizing.network.rail_only import (
    Iteration,
    Traffic,
    gains,
    hb_bytes_per_s,
    ideal,
    iteration,
    optimal_model_parallel,
    scale_ratio,
    traffic,
    with_batch,
)

if TYPE_CHECKING:
    from minicluster.specs.study import StudyModel

BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Batches of the batch sweep, of the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step of a sweep, and its distance from the ideal network."""

    tokens_per_batch: float
    step: Iteration
    total_s: float
    relative_performance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """
    Steps of one model on one number of GPUs.

    Attributes:
        gains: by which fraction each HB size shortens the step of the one before; one less than
            points; empty for a sweep of batches.
    """

    model: str
    gpus: int
    points: tuple[Point, ...]
    gains: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Traffic of one model, at the study's HB size."""

    model: str
    gpus: int
    hb_size: int
    optimal_model_parallel: float
    model_parallel: int
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Rails against a Clos, at one size and radix."""

    gpus: int
    radix: int
    price_ratio: float
    clos: Bill
    rail_only: Bill
    saving_fraction: float
    links_saved_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that the study says, from our model."""

    conventions: Conventions
    hb_sweeps: tuple[Sweep, ...]
    batch_sweeps: tuple[Sweep, ...]
    shares: tuple[Shares, ...]
    savings: tuple[Saving, ...]
    warnings: tuple[str, ...]
    scale_ratio: float
    hb_bytes_per_s: float


def study(conventions: Conventions, *, price_ratio: float = 2.0) -> Study:
    """
    Run the study.

    Args:
        conventions: models, sizes, constants.
        price_ratio: a switch port's price over a transceiver's.

    Returns:
        HB sizes that do not divide a number of GPUs are left out of its sweep, bills likewise.

    Raises:
        InputError: a radix too small for any tree.

    """
    warnings = [conventions.warning, *(f"{m.name}: {m.warning}" for m in conventions.models)]
    return Study(
        conventions=conventions,
        hb_sweeps=tuple(
            _hb_sweep(model, conventions, gpus)
            for gpus in conventions.gpus
            for model in conventions.models
        ),
        batch_sweeps=tuple(
            _batch_sweep(model, conventions, gpus)
            for gpus in conventions.gpus
            for model in conventions.models
            if gpus % conventions.bill_hb_size == 0
        ),
        shares=tuple(
            _shares(model, conventions, gpus)
            for gpus in conventions.gpus
            for model in conventions.models
            if gpus % conventions.bill_hb_size == 0
        ),
        savings=tuple(_savings(conventions, price_ratio)),
        scale_ratio=scale_ratio(conventions),
        hb_bytes_per_s=hb_bytes_per_s(conventions, conventions.bill_hb_size),
        warnings=tuple(text for text in warnings if text and not text.endswith(": ")),
    )


def _hb_sweep(model: StudyModel, conventions: Conventions, gpus: int) -> Sweep:
    sizes = tuple(size for size in conventions.hb_sizes if gpus % size == 0)
    return Sweep(
        model=model.name,
        gpus=gpus,
        points=tuple(_point(model, conventions, gpus, size) for size in sizes),
        gains=gains(model, conventions, gpus=gpus, hb_sizes=sizes),
    )


def _batch_sweep(model: StudyModel, conventions: Conventions, gpus: int) -> Sweep:
    """Time a step over batches, at the study's HB size."""
    batches = [with_batch(model, factor * model.tokens_per_batch) for factor in BATCHES]
    hb_size = conventions.bill_hb_size
    return Sweep(
        model=model.name,
        gpus=gpus,
        points=tuple(_point(batch, conventions, gpus, hb_size) for batch in batches),
    )


def _point(model: StudyModel, conventions: Conventions, gpus: int, hb_size: int) -> Point:
    step = iteration(model, conventions, gpus=gpus, hb_size=hb_size)
    return Point(
        tokens_per_batch=model.tokens_per_batch,
        step=step,
        total_s=step.total_s,
        relative_performance=ideal(model, conventions, gpus=gpus).total_s / step.total_s,
    )


def _shares(model: StudyModel, conventions: Conventions, gpus: int) -> Shares:
    step = iteration(model, conventions, gpus=gpus, hb_size=conventions.bill_hb_size)
    return Shares(
        model=model.name,
        gpus=gpus,
        hb_size=step.hb_size,
        optimal_model_parallel=optimal_model_parallel(model, gpus),
        model_parallel=step.model_parallel,
        traffic=traffic(model, conventions, step),
    )


def _savings(conventions: Conventions, price_ratio: float) -> list[Saving]:
    found = []
    for gpus in conventions.gpus:
        for radix in conventions.radices:
            if gpus % conventions.bill_hb_size:
                continue
            clos, rails = (
                bill(
                    NetworkOrder(
                        gpus=gpus,
                        hb_size=conventions.bill_hb_size,
                        radix=radix,
                        kind=kind,
                        price_ratio=price_ratio,
                    )
                )
                for kind in ("clos", "rail-only")
            )
            found.append(
                Saving(
                    gpus=gpus,
                    radix=radix,
                    price_ratio=price_ratio,
                    clos=clos,
                    rail_only=rails,
                    saving_fraction=rails.saving_fraction,
                    links_saved_fraction=1 - rails.links / clos.links,
                )
            )
    return found


def savings_range(found: tuple[Saving, ...]) -> tuple[float, float]:
    """Return the smallest and the largest saving; nan for none."""
    values = [saving.saving_fraction for saving in found]
    return (min(values), max(values)) if values else (math.nan, math.nan)
