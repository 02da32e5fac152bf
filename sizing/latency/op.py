"""Work, and the op that does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minicluster.specs.model import DTYPE_BYTES

ACTIVATION_BYTES = DTYPE_BYTES["bf16"]
"""Activations are kept in 16 bits whatever the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of HBM traffic on one GPU."""

    flops: NDArray[np.float64]
    hbm_bytes: NDArray[np.float64]

    def __mul__(self, times: float) -> Work:
        """Do it *times* times."""
        return Work(flops=self.flops * times, hbm_bytes=self.hbm_bytes * times)


@dataclass(frozen=True, slots=True)
class Op:
    """
    One kernel, run `repeats` times a step.

    Attributes:
        equation: of its work, in docs/model.md.
        kind: decides which efficiency applies, see `roofline`.
        dtype: of the weights it streams (GEMM), else of what it computes in.
        work: of one run, on one GPU.
        rows: m of a GEMM; of a grouped GEMM, rows of all its groups; query tokens of one prompt
            in prefill attention; sequences in decode attention.
        columns: n of a GEMM or of one group.
        inner: k of a GEMM or of one group.
        groups: experts that a grouped GEMM runs, on this GPU.
        keys: keys that each query sees at most in attention.
        heads: query heads on this GPU, in attention.
        head_dim: of a query, in attention.
        kv_dtype: of the cache that decode attention reads.
        block_scaled: activations of a GEMM in 8 bits are scaled in blocks before it, which counts
            as part of it.
    """

    name: str
    equation: str
    kind: str
    dtype: str
    repeats: int
    work: Work
    rows: NDArray[np.float64] | float = 0.0
    columns: NDArray[np.float64] | float = 0.0
    inner: NDArray[np.float64] | float = 0.0
    groups: NDArray[np.float64] | None = None
    keys: NDArray[np.float64] | float = 1.0
    heads: NDArray[np.float64] | float = 1.0
    head_dim: NDArray[np.float64] | float = 1.0
    kv_dtype: str | None = None
    block_scaled: bool = False

    @property
    def total(self) -> Work:
        """Work of all its runs in the step."""
        return self.work * self.repeats


def gemm(  # noqa: PLR0913  (a GEMM has three sizes, a dtype and a name)
    name: str,
    equation: str,
    rows: NDArray[np.float64],
    inner: float,
    columns: float,
    *,
    dtype: str,
    repeats: int,
) -> Op:
    """
    Multiply *rows* x *inner* activations with *inner* x *columns* weights.

        F = 2 m n k,  Q = n k w + m (n + k) a      (docs/model.md, eq. W1)

    Returns:
        The op; a GEMM without rows is not launched and reads nothing.

    Source:
        Every weight and activation moves once between HBM and the chip.

    Ignores:
        Activations that stay in cache between two kernels.
    """
    weights = inner * columns * DTYPE_BYTES[dtype] * (rows > 0)
    activations = rows * (inner + columns) * ACTIVATION_BYTES
    work = Work(2 * rows * inner * columns, weights + activations)
    return Op(name, equation, "gemm", dtype, repeats, work, rows=rows, columns=columns, inner=inner)
