"""What one step sends between GPUs: bytes and group, no seconds yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PATTERNS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """
    One collective, run `repeats` times a step.

    Attributes:
        equation: of its bytes, in docs/model.md.
        pattern: one of `PATTERNS`; decides how it is timed.
        group: GPUs that take part.
        stride: distance between neighbours of the group in GPU order: 1 for tensor parallel,
            tp for data-parallel ranks, tp x dp for pipeline stages; decides which links it crosses.
        size_bytes: S of one run. all-reduce: the buffer, the same on every GPU. all-gather and
            reduce-scatter: the whole, of all GPUs together. all-to-all: what one GPU sends to all
            others together. point-to-point: what one GPU sends.
    """

    name: str
    equation: str
    pattern: str
    group: int
    stride: int
    repeats: int
    size_bytes: NDArray[np.float64]
