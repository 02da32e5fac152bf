"""Constants of one GPU, kind of op by kind of op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.specs.efficiency import (
    DecodeAttentionEfficiency,
    GemmEfficiency,
    GpuEfficiency,
    PrefillAttentionEfficiency,
    StreamEfficiency,
)
from op_tables import shapes, tables
from op_tables.bounds import (
    DECODE_BOUNDS,
    EXPERT_BOUNDS,
    GEMM_BOUNDS,
    PREFILL_BOUNDS,
    STREAM_BOUNDS,
)
from op_tables.solver import solved
from sizing.latency.roofline import op_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minicluster.specs.gpu import GpuSpec
    from op_tables.tables import Table
    from sizing.latency.op import Op

SMALLEST, LARGEST = 1024, 2**28
"""Bytes of the collectives kept: less costs the same, more goes at the last bandwidth."""
ROWS = 4000
"""Rows of a table that a fit sees, evenly over octaves of what grows with the load."""
SMALLEST_WEIGHT = 2e6
LARGE_CACHE = {"l40s": 1e8, "rtx-pro-6000": 1.4e8}
"""Values of a weight below which a benchmark finds it in cache, as no engine does: these GPUs have
96 and 128 MB of it."""
SMALLEST_SIDE = 256
FEWEST_ROWS = 100
"""Shapes below which a table is too small to fit."""
FEWEST_PROMPT, FEWEST_CONTEXT, LARGEST_HEAD, LARGEST_GROUP = 32, 60, 256, 16
"""Attention shapes that are served: prompt, context, head dimension, heads per KV head."""
GEMM_DTYPES = {
    "bf16": {"bfloat16", "float16"},
    "fp8": {"fp8"},
    "fp8_block": {"fp8_block"},
    "int8": {"sq"},
    "fp4": {"nvfp4"},
    "int4": {"int4_wo"},
}
EXPERT_DTYPES: dict[str, tuple[set[str], ...]] = {
    "bf16": ({"bfloat16", "float16"},),
    "fp8": ({"fp8_block"},),
    "int4": ({"int4_wo"},),
    "fp4": ({"nvfp4"}, {"w4a16_mxfp4"}),
}
"""Names of experts' dtypes in the wheel; the second only where there are no tables of the first."""
EXPERT_KEYS = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
OTHER_KERNELS = ("nongated", "_as_silu")
FEWEST_EXPERT_ROWS = 50
MANY_TOKENS = 512
HELD = ("memory_fraction", "latency_s", "smoothness", "inner_latency_s", "wave_fraction")
"""Constants of experts that do not differ between engines; nor does the speed of small tiles."""
RELATIVES = {
    "a100-sxm": ("a100-sxm-40gb", "a100-pcie"),
    "h100-sxm": ("h100-pcie", "h100-nvl", "h800", "gh200"),
    "h200-sxm": ("h200-nvl",),
    "l40s": ("l4", "rtx-4090"),
}
ENGINES = ("vllm", "trtllm", "sglang")
EVEN = {"distribution": {"balanced"}, "moe_ep_size": {"1"}}
TRAFFIC = {"distribution": {"power_law_1.01"}, "moe_ep_size": {"1"}}
"""Rows of experts that stand for traffic: popularity by `feedforward.POPULARITY_EXPONENT`."""
QUANTISING = ("vllm", "trtllm")
"""Engines whose quantisation of activations is timed as one kernel; SGLang's as plain torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """
    Constants of one kind of op.

    Attributes:
        key: its table in `[efficiency]`, dotted.
        numbers: the constants.
        errors: predicted over measured, less 1, of every row of the fit.
        engines: whose tables were read.
    """

    key: str
    numbers: dict[str, float]
    errors: NDArray[np.float64]
    engines: tuple[str, ...]


def relatives(gpu: str) -> tuple[str, ...]:
    """GPUs of the catalog with the kernels of *gpu*, itself first; only it counts as fitted."""
    return (gpu, *RELATIVES.get(gpu, ()))


def fitted(gpu: GpuSpec) -> list[Fitted]:
    """Fit all kinds of ops that the wheel has tables of for *gpu*."""
    return [
        *_gemms(gpu),
        *_experts(gpu),
        *_attention(gpu),
        *_latent(gpu),
        *_linear(gpu),
    ]


def collectives(gpu: str) -> dict[str, tuple[list[float], list[float]]]:
    """
    Tables of collectives in a CUDA graph: key in `[efficiency]` -> bytes and seconds.

    All-reduce: the engine's own, or NCCL where that is faster; the others: NCCL. Sizes of the
    wheel are elements of 2 bytes, of the whole; in an all to all one share of a GPU's stays put.
    """
    nccl = tables.tables(gpu, "comm", "nccl").get("nccl", {})
    found: dict[str, tuple[list[float], list[float]]] = {}
    for ours, theirs in (
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("all_to_all", "alltoall"),
    ):
        for group, points in _points(nccl, {"op_name": theirs, "nccl_dtype": "half"}).items():
            sent = (group - 1) / group if ours == "all_to_all" else 1.0
            found[f"{ours}.{group}"] = _table({s * sent: t for s, t in points.items()})
    shared = dict(found)
    for engine, own in tables.tables(gpu, "comm", "custom_allreduce").items():
        captured = {"backend": f"{engine}_graph"} if "backend" in own else {}
        prefix = "" if engine == "vllm" else f"engines.{engine}."
        for group, points in _points(own, captured).items():
            both = dict(points)
            for size, seconds in zip(*shared.get(f"all_reduce.{group}", ((), ())), strict=True):
                both[size] = min(seconds, both.get(size, np.inf))
            found[f"{prefix}all_reduce.{group}"] = _table(both)
    return found


def _points(table: Table, chosen: dict[str, str]) -> dict[int, dict[float, float]]:
    """Seconds by bytes, by group."""
    if not table:
        return {}
    keep = np.ones(len(table["latency"]), dtype=bool)
    for column, value in chosen.items():
        keep &= table[column].astype(str) == value
    found: dict[int, dict[float, float]] = {}
    rows = zip(
        table["num_gpus"][keep].tolist(),
        table["message_size"][keep].tolist(),
        table["latency"][keep].tolist(),
        strict=True,
    )
    for group, elements, latency in rows:
        points = found.setdefault(int(group), {})
        size = float(elements) * 2
        points[size] = min(latency * 1e-3, points.get(size, np.inf))
    return found


def _table(points: dict[float, float]) -> tuple[list[float], list[float]]:
    """Points from 1 KiB to 256 MiB, in order, none undercut by a larger one."""
    sizes = [size for size in sorted(points) if SMALLEST <= size <= LARGEST]
    seconds = np.minimum.accumulate([points[size] for size in sizes][::-1])[::-1]
    return sizes, [float(f"{value:.4g}") for value in seconds]


def _gemms(gpu: GpuSpec) -> Iterator[Fitted]:
    """
    Dense GEMMs, per dtype, on matrices that no cache holds.

    Of all engines, the fastest: their tables differ by launches and quantisation beside the
    kernel. Only vLLM's kernels of fp8 with static scales are slower themselves, by a quarter to
    two fifths from 256 rows on, on every GPU, and have constants of their own.
    """
    found = tables.tables(gpu.name, "gemm", "gemm")
    for key, names in GEMM_DTYPES.items():
        dtype = key.partition("_")[0]
        if dtype not in gpu.peak_flops_per_s and dtype != "int4":
            continue
        own = quantised_before(gpu, found) if key == "fp8" else found
        yield from _gemm(gpu, f"gemm.{key}", own, names)
        for engine in OWN_GEMMS.get(key, ()):
            if engine in own and engine in QUANTISING:
                yield from _gemm(gpu, f"engines.{engine}.gemm.{key}", {engine: own[engine]}, names)


OWN_GEMMS = {"fp8": ("vllm",)}
"""Engines with kernels of a dtype that are slower than the fastest of all, not only launched so."""


def _gemm(gpu: GpuSpec, key: str, own: dict[str, Table], names: set[str]) -> Iterator[Fitted]:
    """Fit GEMMs of one dtype; nothing without tables."""
    dtype = key.rpartition(".")[2].partition("_")[0]
    table = tables.minimum(own, ("m", "n", "k"), {"gemm_dtype": names})
    keep = (table["n"] >= SMALLEST_SIDE) & (table["k"] >= SMALLEST_SIDE)
    keep &= table["n"] * table["k"] >= LARGE_CACHE.get(gpu.name, SMALLEST_WEIGHT)
    table = {column: values[keep] for column, values in table.items()}
    if not keep.any():
        return
    table = tables.rising(table, "m", ("n", "k"))
    table = tables.sampled(table, ROWS, along="m")
    op = shapes.gemms(table, dtype)
    yield _fit(
        key,
        GEMM_BOUNDS,
        table["seconds"],
        lambda numbers: _seconds(
            op, gpu, gemm={dtype: GemmEfficiency(**numbers), "bf16": GemmEfficiency(**numbers)}
        ),
        tuple(own),
    )


def quantised_before(gpu: GpuSpec, found: dict[str, Table]) -> dict[str, Table]:
    """
    Take off the tables of fp8 GEMMs what they spend on quantising their activations.

    The wheel's GEMMs find a scale and apply it first; checkpoints with static scales let the op
    before do so (its `fp8_static` is the same difference). Engines whose quantisation was not
    timed as a kernel are left out where others were, and rows of which less is left than the
    peaks allow: the two were not timed alike.
    """
    scales = tables.tables(gpu.name, "quantize", "computescale")
    casts = tables.tables(gpu.name, "quantize", "scale_matrix")
    kept = {}
    for engine, table in found.items():
        if engine not in QUANTISING or engine not in scales or engine not in casts:
            continue
        m, k = table["m"].astype(float), table["k"].astype(float)
        spent = sum(tables.on_grid(t, ("m", "k"), (m, k)) for t in (scales[engine], casts[engine]))
        least = np.maximum(
            2 * m * table["n"] * k / gpu.peak_flops_per_s["fp8"],
            table["n"] * k / gpu.require("hbm_bytes_per_s"),
        )
        rest = {**table, "latency": table["latency"] - spent}
        possible = rest["latency"] > least * 1e3
        kept[engine] = {column: values[possible] for column, values in rest.items()}
    return kept or found


def _experts(gpu: GpuSpec) -> Iterator[Fitted]:
    """
    Experts up and down in one op, per dtype: the fastest kernels first, then each engine's own.

    As with GEMMs, tables of few tokens differ by launches and quantisation beside the kernel, so
    that what weights and launches take is the fastest engine's, tokens spread evenly. What many
    tokens take is an engine's own, its tokens spread as those of traffic.
    """
    found = {engine: _expert_tables(gpu, engine) for engine in ENGINES}
    for dtype, kinds in EXPERT_DTYPES.items():
        own = {engine: _newest(versions, kinds, EVEN) for engine, versions in found.items()}
        even = {engine: table for engine, table in own.items() if table is not None}
        if not even:
            continue
        table = _sampled_experts(tables.fastest(even, EXPERT_KEYS))
        shared = _fit_experts(gpu, f"grouped_gemm.{dtype}", table, dict(EXPERT_BOUNDS), even=True)
        yield replace(shared, engines=tuple(even))
        for engine, versions in found.items():
            table = _newest(versions, kinds, TRAFFIC)
            if table is None:
                continue
            many = table["num_tokens"] >= MANY_TOKENS
            table = _sampled_experts({key: values[many] for key, values in table.items()})
            held = {name: (value,) * 3 for name, value in shared.numbers.items() if name in HELD}
            key = f"engines.{engine}.grouped_gemm.{dtype}"
            bounds = {**EXPERT_BOUNDS, **held}
            del bounds["small_tile_fraction"]
            speed = shared.numbers["compute_fraction"] * shared.numbers["small_tile_fraction"]
            fit = _fit_experts(gpu, key, table, bounds, even=False, small_tile_speed=speed)
            yield replace(fit, engines=(engine,))


def _fit_experts(
    gpu: GpuSpec, key: str, table: Table, bounds: dict[str, tuple[float, float, float]], *,
    even: bool, small_tile_speed: float | None = None,
) -> Fitted:  # fmt: skip
    """Fit experts; with *small_tile_speed*, a share of the peak, small tiles keep that speed."""
    dtype = key.rpartition(".")[2]
    ops = shapes.experts(table, dtype, even=even)

    def whole(numbers: dict[str, float]) -> dict[str, float]:
        if small_tile_speed is None:
            return numbers
        share = min(1.0, small_tile_speed / numbers["compute_fraction"])
        return {**numbers, "small_tile_fraction": float(f"{share:.4g}")}

    def predict(numbers: dict[str, float]) -> NDArray[np.float64]:
        efficiency = {dtype: GemmEfficiency(**whole(numbers))}
        return np.asarray(sum(_seconds(op, gpu, grouped_gemm=efficiency) for op in ops))

    fit = _fit(key, bounds, table["seconds"], predict, ())
    return replace(fit, numbers=whole(fit.numbers))


def _sampled_experts(table: Table) -> Table:
    table = tables.rising(table, "num_tokens", EXPERT_KEYS[1:])
    return tables.sampled(table, ROWS, along="num_tokens")


def _expert_tables(gpu: GpuSpec, engine: str) -> dict[str, Table]:
    """Read all versions of an engine, less kernels of plain experts and of stand-in activations."""
    kept = {}
    for version, table in tables.tables(gpu.name, "moe", "moe", engine, every=True).items():
        kernels = table["kernel_source"].astype(str)
        keep = np.ones(len(kernels), dtype=bool)
        for other in OTHER_KERNELS:
            keep &= np.char.find(kernels, other) < 0
        kept[version] = {column: values[keep] for column, values in table.items()}
    return kept


def _newest(
    found: dict[str, Table], kinds: tuple[set[str], ...], chosen: dict[str, set[str]]
) -> Table | None:
    """
    Return the table of the newest version that has enough shapes; `None`: none has.

    Args:
        kinds: the wheel's names of a dtype, those first that are meant first.
    """
    for names in kinds:
        for version in reversed(found):
            only = {version: found[version]}
            table = tables.minimum(only, EXPERT_KEYS, {"moe_dtype": names, **chosen})
            if len(table["seconds"]) >= FEWEST_EXPERT_ROWS:
                return table
    return None


def _attention(gpu: GpuSpec) -> Iterator[Fitted]:
    """Attention without a window, per engine: vLLM's is the shared one."""
    for engine in ENGINES:
        prefix = "" if engine == "vllm" else f"engines.{engine}."
        keys = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
        found = _unwindowed(tables.tables(gpu.name, "attention", "context_attention", engine))
        plain = {"attn_dtype": {"bfloat16", "float16"}, "kv_cache_dtype": {"bfloat16", "float16"}}
        table = tables.minimum(found, keys, plain)
        keep = (table["isl"] >= FEWEST_PROMPT) & (table["head_dim"] <= LARGEST_HEAD)
        table = tables.sampled({k: v[keep] for k, v in table.items()}, ROWS, along="isl")
        if keep.any():
            op = shapes.prefills(table)
            yield _fit(
                f"{prefix}prefill_attention",
                PREFILL_BOUNDS,
                table["seconds"],
                lambda numbers, op=op: _seconds(
                    op, gpu, prefill_attention=PrefillAttentionEfficiency(**numbers)
                ),
                tuple(found),
            )
        keys = ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim")
        found = _unwindowed(tables.tables(gpu.name, "attention", "generation_attention", engine))
        yield from _decode(
            gpu, f"{prefix}decode_attention", found, keys, shapes.decodes, "decode_attention"
        )


def _latent(gpu: GpuSpec) -> Iterator[Fitted]:
    """Attention over the latent of MLA, over all engines that have kernels of it alone."""
    found = tables.tables(gpu.name, "mla", "generation_mla")
    keys = ("batch_size", "step", "num_heads")
    yield from _decode(
        gpu,
        "latent_decode_attention",
        found,
        keys,
        shapes.latents,
        "latent_decode_attention",
    )


def _decode(
    gpu: GpuSpec,
    key: str,
    found: dict[str, Table],
    keys: tuple[str, ...],
    ops_of: Callable[[Table], Op],
    field: str,
) -> Iterator[Fitted]:
    """Fit decode attention on caches of 16 and of 8 bits together."""
    parts = []
    for name, kinds in (("bf16", {"bfloat16", "float16"}), ("fp8", {"fp8"})):
        table = tables.minimum(found, keys, {"kv_cache_dtype": kinds})
        keep = table["step"] >= FEWEST_CONTEXT
        if "head_dim" in table:
            keep &= table["head_dim"] <= LARGEST_HEAD
            groups = table["num_heads"] / np.maximum(1.0, table["num_key_value_heads"])
            keep &= groups <= LARGEST_GROUP
        if not keep.any():
            continue
        table = {k: v[keep] for k, v in table.items()}
        table = tables.sampled(table, ROWS, along="step")
        table["kv_bytes"] = np.full(len(table["seconds"]), 1.0 if name == "fp8" else 2.0)
        parts.append((replace(ops_of(table), kv_dtype=name), table["seconds"]))
    if parts:
        bounds = dict(DECODE_BOUNDS)
        if len(parts) == 1:
            bounds["fp8_fraction"] = (1.0, 1.0, 1.0)
        yield _fit(
            key,
            bounds,
            np.concatenate([seconds for _, seconds in parts]),
            lambda numbers: np.concatenate(
                [
                    _seconds(op, gpu, **{field: DecodeAttentionEfficiency(**numbers)})
                    for op, _ in parts
                ]
            ),
            tuple(found),
        )


def _linear(gpu: GpuSpec) -> Iterator[Fitted]:
    """Gated delta rule, prompts and single steps together."""
    found = tables.tables(gpu.name, "linear_attention", "gdn")
    for table in found.values():
        table["rule"] = np.char.find(table["kernel_source"].astype(str), "delta_rule") >= 0
    keys = ("num_tokens", "seq_len", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
    table = tables.minimum(found, keys, {"rule": {"True"}})
    if len(table["seconds"]) < FEWEST_ROWS:
        return
    table = tables.sampled(table, ROWS, along="num_tokens")
    op = shapes.recurrences(table)
    yield _fit(
        "linear_attention",
        STREAM_BOUNDS,
        table["seconds"],
        lambda numbers: _seconds(op, gpu, linear_attention=StreamEfficiency(**numbers)),
        tuple(found),
    )


def _unwindowed(found: dict[str, Table]) -> dict[str, Table]:
    """Leave out rows with a window; some tables know of none."""
    kept = {}
    for engine, table in found.items():
        keep = table.get("window_size", np.zeros(len(table["latency"]))).astype(float) == 0
        kept[engine] = {column: values[keep] for column, values in table.items()}
    return kept


def _fit(
    key: str,
    bounds: dict[str, tuple[float, float, float]],
    seconds: NDArray[np.float64],
    predict: Callable[[dict[str, float]], NDArray[np.float64]],
    engines: tuple[str, ...],
) -> Fitted:
    """Fit, round as it is written, and keep the errors of the rounded constants."""
    numbers = {k: float(f"{v:.4g}") for k, v in solved(predict, bounds, seconds).items()}
    return Fitted(key=key, numbers=numbers, errors=predict(numbers) / seconds - 1, engines=engines)


def _seconds(op: Op, gpu: GpuSpec, **changed: object) -> NDArray[np.float64]:
    """Time *op* with some efficiencies changed."""
    efficiency: GpuEfficiency | None = gpu.efficiency
    if efficiency is None:
        raise ValueError(gpu.name)
    for name in ("gemm", "grouped_gemm"):
        if name in changed:
            changed[name] = {**getattr(efficiency, name), **changed[name]}  # type: ignore[dict-item]
    changed["sustained_fraction"] = {}  # the tables were measured in short bursts
    return op_time(op, gpu, replace(efficiency, **changed)).seconds  # type: ignore[arg-type]
