"""Bounds and first guess of each constant of a fit."""

from __future__ import annotations

GEMM_BOUNDS = {
    "compute_fraction": (0.1, 0.7, 1.0),
    "memory_fraction": (0.1, 0.8, 1.0),
    "latency_s": (1e-7, 4e-6, 1e-4),
    "wave_fraction": (1e-3, 0.1, 1.0),
    "smoothness": (1.0, 2.0, 20.0),
    "small_tile_fraction": (0.1, 0.7, 1.0),
    "ramp_inner": (1e-3, 50.0, 1000.0),
    "inner_latency_s": (1e-14, 1e-10, 3e-9),
    "activation_fraction": (1e-2, 1.0, 4.0),
}
EXPERT_BOUNDS = {**GEMM_BOUNDS, "latency_s": (1e-7, 8e-6, 1e-4), "ramp_inner": (1e-3, 1e-3, 1e-3)}
PREFILL_BOUNDS = {
    "compute_fraction": (0.1, 0.6, 1.0),
    "memory_fraction": (0.1, 0.6, 1.0),
    "latency_s": (1e-7, 1e-5, 1e-4),
    "half_tokens": (1.0, 300.0, 5000.0),
    "head_exponent": (0.01, 0.2, 2.0),
    "key_latency_s": (1e-12, 5e-9, 1e-7),
    "smoothness": (1.0, 2.0, 10.0),
}
DECODE_BOUNDS = {
    "memory_fraction": (0.1, 0.8, 1.0),
    "compute_fraction": (0.02, 0.3, 1.0),
    "latency_s": (1e-7, 1e-5, 1e-4),
    "key_latency_s": (1e-13, 2e-10, 5e-8),
    "item_latency_s": (1e-12, 1e-9, 1e-7),
    "smoothness": (1.0, 2.0, 20.0),
    "fp8_fraction": (0.3, 0.8, 1.0),
}
STREAM_BOUNDS = {
    "memory_fraction": (0.02, 0.5, 1.0),
    "compute_fraction": (0.01, 0.2, 1.0),
    "latency_s": (1e-7, 1e-5, 1e-3),
    "row_latency_s": (1e-13, 1e-9, 1e-6),
}
