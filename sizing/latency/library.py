"""Seconds of a collective of one library, from its measured table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from sizing.latency.roofline import efficiency_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from minicluster.specs.gpu import GpuSpec, MeasuredCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """
    One measured point against what follows from the others of its table.

    Attributes:
        error_fraction: predicted over measured, less 1.
        outlier: known not to follow; not read for others either.
    """

    library: str
    gpus: int
    domains: int
    size_bytes: float
    seconds: float
    predicted_s: float
    error_fraction: float
    outlier: bool


def with_gpu_points(
    measured: Sequence[MeasuredCollective], gpu: GpuSpec
) -> tuple[MeasuredCollective, ...]:
    """
    Return tables with the points that stand in the GPU's own file filled in.

    Raises:
        InputError: the GPU's file has no such table.
    """
    filled = [*measured]
    for at, table in enumerate(measured):
        if table.from_gpu is None:
            continue
        kind, _, group = table.from_gpu.partition(".")
        found = getattr(efficiency_of(gpu), kind, {}).get(group)
        if found is None:
            where = f"configs/collectives: measured.{table.library}.from_gpu"
            raise InputError(where, table.from_gpu, f"a table of configs/gpus/{gpu.name}.toml")
        points = {"size_bytes": found.size_bytes, "seconds": found.seconds}
        filled[at] = replace(table, from_gpu=None, **points)
    return tuple(filled)


def measured_s(size_bytes: ArrayLike, table: MeasuredCollective) -> NDArray[np.float64]:
    """
    Read a table of one library.

        t is linear in S between two measured sizes of one algorithm, and beyond the outermost of
        them; above the last dt/dS = 2 (n - 1)/n / busbw where it is known
        (docs/model.md, eq. H4)

    Source:
        Each algorithm is a latency and a bandwidth: MSCCL++ 6.4 us + S / 272 GB/s on one node.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    result = np.zeros_like(size)
    edges = (0.0, *table.switches_bytes, np.inf)
    for low, high in itertools.pairwise(edges):
        points = [
            (s, t)
            for s, t in zip(table.size_bytes, table.seconds, strict=True)
            if low <= s < high and s not in table.outlier_bytes
        ]
        in_range = (size >= low) & (size < high)
        if points:
            known, seconds = (np.array(column) for column in zip(*points, strict=True))
            result = np.where(in_range, _linear(size, known, seconds, table), result)
    return np.asarray(np.where(size > 0, result, 0.0))


def left_out(table: MeasuredCollective) -> Iterator[LeftOut]:
    """Predict each point of a table from the others."""
    for index, (size, seconds) in enumerate(zip(table.size_bytes, table.seconds, strict=True)):
        rest = replace(
            table,
            size_bytes=(*table.size_bytes[:index], *table.size_bytes[index + 1 :]),
            seconds=(*table.seconds[:index], *table.seconds[index + 1 :]),
        )
        predicted = float(measured_s(size, rest))
        yield LeftOut(
            library=table.library,
            gpus=table.gpus,
            domains=table.domains,
            size_bytes=size,
            seconds=seconds,
            predicted_s=predicted,
            error_fraction=predicted / seconds - 1,
            outlier=size in table.outlier_bytes,
        )


def _linear(
    size: NDArray[np.float64],
    known: NDArray[np.float64],
    seconds: NDArray[np.float64],
    table: MeasuredCollective,
) -> NDArray[np.float64]:
    if known.size == 1:
        return np.full_like(size, seconds[0])
    at = np.clip(np.searchsorted(known, size), 1, known.size - 1)
    slope = (seconds[at] - seconds[at - 1]) / (known[at] - known[at - 1])
    line = np.asarray(seconds[at - 1] + slope * (size - known[at - 1]))
    last_of_all = not any(known[-1] < switch for switch in table.switches_bytes)
    if table.bus_bytes_per_s is not None and last_of_all:
        plateau = 2 * (table.gpus - 1) / table.gpus / table.bus_bytes_per_s
        above = seconds[-1] + plateau * (size - known[-1])
        return np.where(size > known[-1], above, line)
    return line
