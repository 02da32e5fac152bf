"""Seconds of an op on one GPU: peaks from the datasheet, what kernels achieve of them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sizing.errors import InputError

if TYPE_CHECKING:
    from sizing.latency.op import Op
    from sizing.specs.gpu import GemmEfficiency, GpuEfficiency, GpuSpec

TILE = 128
"""Rows and columns of a GEMM's result that one SM computes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """
    Seconds of all runs of an op in a step, and what they are made of.

    Attributes:
        compute_s: if only compute bound it.
        memory_s: if only HBM bound it.
        launch_s: fixed part.
    """

    seconds: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    memory_s: NDArray[np.float64]
    launch_s: NDArray[np.float64]


def op_time(op: Op, gpu: GpuSpec) -> OpTime:
    """
    Time one op by its kind (docs/model.md, eq. R1, R2, R3 or R4); without work, it is not launched.

    Raises:
        InputError: the GPU has no peaks, as a CPU has none.
    """
    efficiency = _efficiency(gpu)
    hbm = gpu.require("hbm_bytes_per_s")
    flops, moved = op.work.flops, op.work.hbm_bytes
    smoothness: float | None = None
    if op.kind in ("gemm", "grouped gemm"):
        compute, memory, launch, smoothness = _gemm(op, gpu, efficiency)
    elif op.kind == "prefill attention":
        length = np.maximum(1.0, op.keys if op.keys is not None else 1.0)
        ramp = 1 + efficiency.prefill_attention_half_tokens / length
        peak = _peak(gpu, "bf16") * efficiency.prefill_attention_compute_fraction
        compute, memory = flops / peak * ramp, moved / hbm
        launch, smoothness = efficiency.prefill_attention_latency_s, 1.0
    elif op.kind == "decode attention":
        peak = _peak(gpu, "bf16") * efficiency.prefill_attention_compute_fraction
        compute = flops / peak
        memory = moved / (hbm * efficiency.decode_attention_memory_fraction)
        launch = efficiency.decode_attention_latency_s
    else:
        compute, memory = 0 * flops, moved / (hbm * efficiency.elementwise_memory_fraction)
        launch = efficiency.elementwise_latency_s
    fixed = np.asarray(launch * ((flops > 0) | (moved > 0)), dtype=np.float64)
    return OpTime(
        seconds=op.repeats * (smooth_max(compute, memory, smoothness) + fixed),
        compute_s=op.repeats * compute,
        memory_s=op.repeats * memory,
        launch_s=op.repeats * fixed,
    )


def smooth_max(
    compute_s: NDArray[np.float64], memory_s: NDArray[np.float64], smoothness: float | None
) -> NDArray[np.float64]:
    """
    Join the two bounds of a roofline.

        t = (t_c^p + t_m^p)^(1/p)      (docs/model.md, eq. R1)

    Args:
        compute_s: t_c.
        memory_s: t_m.
        smoothness: p; 1 adds the two, `None` takes the larger.

    Returns:
        Seconds, at least the larger and at most the sum.

    Source:
        Fits of GEMM tables: near the ridge neither bound is reached (p from 1.8 to 3.8).

    Ignores:
        Launch and tail effects: those are in the fixed time and in the waves.

    """
    larger = np.maximum(compute_s, memory_s)
    if smoothness is None:
        return larger
    safe = np.where(larger > 0, larger, 1.0)
    ratio = np.minimum(compute_s, memory_s) / safe
    return np.asarray(larger * (1 + ratio**smoothness) ** (1 / smoothness))


def multiply_dtype(weight_dtype: str, gpu: GpuSpec) -> str:
    """
    Return the dtype a GEMM multiplies in: the weights' own where the GPU has it, else bf16.

    Weight-only quantisation (int4 everywhere, fp4 before Blackwell, fp8 on Ampere) streams fewer
    bytes but computes in 16 bits.

    Raises:
        InputError: fp32 weights, for which no 16-bit multiplication stands in.
    """
    if weight_dtype in gpu.peak_flops_per_s and weight_dtype in _efficiency(gpu).gemm:
        return weight_dtype
    if weight_dtype == "fp32":
        raise InputError(
            f"gpu {gpu.name}: peak_flops_per_s.fp32",
            None,
            "a number with its source",
            "set model.weight_dtype to bf16",
        )
    return "bf16"


def _gemm(
    op: Op, gpu: GpuSpec, efficiency: GpuEfficiency
) -> tuple[NDArray[np.float64], NDArray[np.float64], float, float | None]:
    """
    Time a GEMM.

        t_c = F (1 + h (W - 1)) / (P e_c),  t_m = Q / (BW e_m)      (docs/model.md, eq. R2)
    """
    dtype = multiply_dtype(op.dtype, gpu)
    fit = efficiency.gemm[dtype]
    waves = _wave_penalty(op, gpu, fit)
    compute = op.work.flops * waves / (_peak(gpu, dtype) * fit.compute_fraction)
    memory = op.work.hbm_bytes / (gpu.require("hbm_bytes_per_s") * fit.memory_fraction)
    return compute, memory, fit.latency_s, fit.smoothness


def _wave_penalty(op: Op, gpu: GpuSpec, fit: GemmEfficiency) -> NDArray[np.float64] | float:
    """
    Return how much longer the last, partly filled wave of tiles makes a GEMM.

        1 + h (W - 1),  W = ceil(T / SM) SM / T,  T = ceil(m / 128) ceil(n / 128)
        (docs/model.md, eq. R2)
    """
    if not fit.wave_fraction or gpu.num_sms is None or op.rows is None or op.columns is None:
        return 1.0
    groups = np.maximum(1.0, op.groups) if op.groups is not None else 1.0
    tiles = groups * np.ceil(op.rows / groups / TILE) * np.ceil(np.asarray(op.columns) / TILE)
    tiles = np.maximum(1.0, tiles)
    waves = np.ceil(tiles / gpu.num_sms) * gpu.num_sms / tiles
    return np.asarray(1 + fit.wave_fraction * (waves - 1))


def _efficiency(gpu: GpuSpec) -> GpuEfficiency:
    """Return the efficiencies, or say what a machine without them needs."""
    if gpu.efficiency is None:
        raise InputError(
            f"gpu {gpu.name}",
            gpu.kind,
            "a GPU of the catalog, or a calibration of this machine",
            "run `serving measure -o steps.csv`, then `sizing calibrate --engine steps.csv`",
        )
    return gpu.efficiency


def _peak(gpu: GpuSpec, dtype: str) -> float:
    """Return the dense peak of *dtype*, or say that the catalog has none."""
    if dtype not in gpu.peak_flops_per_s:
        raise InputError(
            f"gpu {gpu.name}: peak_flops_per_s.{dtype}", None, "a number with its source"
        )
    return gpu.peak_flops_per_s[dtype]
