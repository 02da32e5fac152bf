"""Seconds of an op on one GPU: peaks from the datasheet, what kernels achieve of them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError
from sizing.latency.op import ACTIVATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.specs.efficiency import (
        DecodeAttentionEfficiency,
        GemmEfficiency,
        GpuEfficiency,
        PrefillAttentionEfficiency,
        StreamEfficiency,
    )
    from minicluster.specs.gpu import GpuSpec
    from sizing.latency.op import Op

TILES = ((128, 256), (64, 128))
"""Rows and columns of a GEMM's result that one SM computes at a time: large and small kernels."""
HEAD_DIM = 128
"""Head dimension that the compute fraction of prefill attention is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """
    Seconds of all runs of an op in a step, and what they are made of.

    Attributes:
        compute_s: if only compute bound it.
        memory_s: if only HBM bound it.
        launch_s: what it takes however little it does.
    """

    seconds: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    memory_s: NDArray[np.float64]
    launch_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Seconds of one run: t = (sum of overlapped^p)^(1/p) + added (docs/model.md, eq. R1)."""

    compute: NDArray[np.float64]
    memory: NDArray[np.float64]
    latency: NDArray[np.float64] | float = 0.0
    smoothness: float | None = None
    exposed_memory: NDArray[np.float64] | float = 0.0
    launch: NDArray[np.float64] | float


def op_time(op: Op, gpu: GpuSpec, efficiency: GpuEfficiency | None = None) -> OpTime:
    """
    Time one op by its kind (docs/model.md, eq. R1 to R5); without work, it is not launched.

    Args:
        efficiency: of the kernels of one engine; `None`: those that all engines share.

    Raises:
        InputError: the GPU has no peaks, as a CPU has none.
    """
    parts = _BY_KIND[op.kind](op, gpu, efficiency or efficiency_of(gpu))
    runs = op.repeats * ((op.work.flops > 0) | (op.work.hbm_bytes > 0))
    joined = smooth_max(
        parts.compute, parts.memory, np.asarray(parts.latency), smoothness=parts.smoothness
    )
    return OpTime(
        seconds=np.asarray(runs * (joined + parts.exposed_memory + parts.launch)),
        compute_s=np.asarray(runs * parts.compute),
        memory_s=np.asarray(runs * (parts.memory + parts.exposed_memory)),
        launch_s=np.asarray(runs * (parts.latency + parts.launch)),
    )


def smooth_max(*bounds_s: NDArray[np.float64], smoothness: float | None) -> NDArray[np.float64]:
    """
    Join the bounds of a roofline.

        t = (t_1^p + t_2^p + ...)^(1/p)      (docs/model.md, eq. R1)

    Args:
        bounds_s: seconds that each bound alone would take.
        smoothness: p; 1 adds them, `None` takes the largest.

    Source:
        Fits of GEMM tables: near the ridge neither bound is reached (p from 1.5 to 3).

    Ignores:
        Launch and tail effects: those are in the fixed time and in the waves.
    """
    largest = bounds_s[0]
    for bound in bounds_s[1:]:
        largest = np.maximum(largest, bound)
    if smoothness is None:
        return np.asarray(largest)
    safe = np.where(largest > 0, largest, 1.0)
    total = sum((bound / safe) ** smoothness for bound in bounds_s)
    return np.asarray(safe * total ** (1 / smoothness))


def multiply_dtype(weight_dtype: str, gpu: GpuSpec) -> str:
    """
    Return the dtype a GEMM multiplies in: the weights' own where the GPU has it, else bf16.

    Weight-only quantisation (int4 everywhere, fp4 before Blackwell, fp8 on Ampere) streams fewer
    bytes but computes in 16 bits.

    Raises:
        InputError: fp32 weights, for which no 16-bit multiplication stands in.
    """
    if weight_dtype in gpu.peak_flops_per_s and weight_dtype in efficiency_of(gpu).gemm:
        return weight_dtype
    if weight_dtype == "fp32":
        where = f"gpu {gpu.name}: peak_flops_per_s.fp32"
        raise InputError(where, None, "a number with its source", "set model.weight_dtype to bf16")
    return "bf16"


def efficiency_of(gpu: GpuSpec) -> GpuEfficiency:
    """Return the efficiencies, or say what a machine without them needs."""
    if gpu.efficiency is None:
        expected = "a GPU of the catalog, or a calibration of this machine"
        way_out = "run `serving measure -o steps.csv`, then `sizing calibrate --engine steps.csv`"
        raise InputError(f"gpu {gpu.name}", gpu.kind, expected, way_out)
    return gpu.efficiency


def _gemm(op: Op, gpu: GpuSpec, efficiency: GpuEfficiency) -> _Parts:
    """
    Time a GEMM, or one per group.

        t_c = F / (P e_c f) A / (m n) (1 + k_0 / k),  t_m = Q_w / (BW e_m),
        t = (t_c^p + t_m^p)^(1/p) + b Q_a / BW + r k + t_0      (docs/model.md, eq. R2)

    Q_w are the bytes of the weights, Q_a those of the activations, A the area of R2's tiles,
    f what the power limit leaves of e_c.
    """
    dtype = multiply_dtype(op.dtype, gpu)
    key = f"{dtype}_block" if op.block_scaled else op.dtype
    fit = efficiency.gemm.get(key, efficiency.gemm[dtype])
    if op.kind == "grouped gemm":
        fit = efficiency.grouped_gemm.get(op.dtype, efficiency.grouped_gemm.get(dtype, fit))
    hbm = gpu.require("hbm_bytes_per_s")
    activations = op.rows * (op.inner + op.columns) * ACTIVATION_BYTES
    sustained = fit.compute_fraction * efficiency.sustained_fraction.get(dtype, 1.0)
    compute = op.work.flops / (_peak(gpu, dtype) * sustained)
    return _Parts(
        compute=np.asarray(compute * _padding(op, gpu, fit) * (1 + fit.ramp_inner / op.inner)),
        memory=np.maximum(0.0, op.work.hbm_bytes - activations) / (hbm * fit.memory_fraction),
        smoothness=fit.smoothness,
        exposed_memory=activations * fit.activation_fraction / hbm,
        launch=fit.latency_s + fit.inner_latency_s * op.inner,
    )


def _padding(op: Op, gpu: GpuSpec, fit: GemmEfficiency) -> NDArray[np.float64] | float:
    """
    Return how much the tiles of a GEMM, whole waves of them, are larger than its result.

        A / (m n),  A = min(A(128, 256), A(64, 128) / e_s),
        A(a, b) = (1 - h) m n + h ceil(T / SM) SM a b,
        T = g ceil(m / (g a)) ceil(n / b)      (docs/model.md, eq. R2)
    """
    if not fit.wave_fraction or gpu.num_sms is None:
        return 1.0
    columns = np.asarray(op.columns, dtype=np.float64)
    groups: NDArray[np.float64] | float = 1.0 if op.groups is None else np.maximum(1.0, op.groups)
    rows = np.maximum(1e-9, np.asarray(op.rows, dtype=np.float64))
    areas = []
    for (high, wide), fraction in zip(TILES, (1.0, fit.small_tile_fraction), strict=True):
        tiles = groups * np.ceil(rows / groups / high) * np.ceil(columns / wide)
        waves = np.ceil(tiles / gpu.num_sms) * gpu.num_sms
        padded = fit.wave_fraction * waves * (high * wide) / (rows * columns)
        areas.append((1 - fit.wave_fraction + padded) / fraction)
    return np.asarray(np.minimum(*areas))


def _prefill_attention(op: Op, gpu: GpuSpec, efficiency: GpuEfficiency) -> _Parts:
    """
    Time attention over prompts.

        t_c = F / (P e_c) (1 + s_0 / s) (128 / d)^x,  t_l = l s d / 128,
        t = (t_c^p + t_l^p)^(1/p) + Q / (BW e_m) + t_0      (docs/model.md, eq. R3)

    s are the keys that a query sees at most: the last block of queries meets them one by one.
    """
    fit: PrefillAttentionEfficiency = efficiency.prefill_attention
    keys = np.maximum(1.0, op.keys)
    head = op.head_dim / HEAD_DIM
    ramp = (1 + fit.half_tokens / keys) * head**-fit.head_exponent
    return _Parts(
        compute=op.work.flops / (_peak(gpu, "bf16") * fit.compute_fraction) * ramp,
        memory=0 * op.work.flops,
        latency=fit.key_latency_s * keys * head,
        smoothness=fit.smoothness,
        exposed_memory=op.work.hbm_bytes / (gpu.require("hbm_bytes_per_s") * fit.memory_fraction),
        launch=fit.latency_s,
    )


def _decode_attention(op: Op, gpu: GpuSpec, efficiency: GpuEfficiency) -> _Parts:
    """
    Time attention of one token per sequence over its cache.

        t_m = Q / (BW e_m),  t_c = F / (P e_c),  t_l = l s,
        t = (t_m^p + t_c^p + t_l^p)^(1/p) + r B N / tp + t_0      (docs/model.md, eq. R5)

    Over a latent (MLA: heads wider than any other) with the constants of those kernels.
    """
    fit: DecodeAttentionEfficiency = efficiency.decode_attention
    latent = efficiency.latent_decode_attention
    if latent is not None and np.max(op.head_dim) > LATENT_DIM:
        fit = latent
    streamed = fit.memory_fraction * (fit.fp8_fraction if op.kv_dtype == "fp8" else 1.0)
    return _Parts(
        compute=op.work.flops / (_peak(gpu, "bf16") * fit.compute_fraction),
        memory=op.work.hbm_bytes / (gpu.require("hbm_bytes_per_s") * streamed),
        latency=fit.key_latency_s * op.keys,
        smoothness=fit.smoothness,
        launch=fit.latency_s + fit.item_latency_s * op.rows * op.heads,
    )


LATENT_DIM = 512
"""Decode heads wider than this attend over a latent; no model has keys so wide."""


def _streaming(op: Op, gpu: GpuSpec, efficiency: GpuEfficiency) -> _Parts:
    """Time what mostly moves bytes: t = max(F / (P e_c), Q / (BW e_m)) + r n + t_0 (eq. R4)."""
    fit: StreamEfficiency = efficiency.elementwise
    if op.kind == "linear attention" and efficiency.linear_attention is not None:
        fit = efficiency.linear_attention
    return _Parts(
        compute=op.work.flops / (_peak(gpu, "bf16") * fit.compute_fraction),
        memory=op.work.hbm_bytes / (gpu.require("hbm_bytes_per_s") * fit.memory_fraction),
        launch=fit.latency_s + fit.row_latency_s * op.rows,
    )


_BY_KIND: dict[str, Callable[[Op, GpuSpec, GpuEfficiency], _Parts]] = {
    "gemm": _gemm,
    "grouped gemm": _gemm,
    "prefill attention": _prefill_attention,
    "decode attention": _decode_attention,
    "linear attention": _streaming,
    "elementwise": _streaming,
}


def _peak(gpu: GpuSpec, dtype: str) -> float:
    """Return the dense peak of *dtype*, or say that the catalog has none."""
    if dtype not in gpu.peak_flops_per_s:
        raise InputError(
            f"gpu {gpu.name}: peak_flops_per_s.{dtype}", None, "a number with its source"
        )
    return gpu.peak_flops_per_s[dtype]
