"""Measured op times out of the installed aiconfigurator-core wheel (Apache-2.0)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

WHEEL = "aiconfigurator-core"
SYSTEMS = {
    "a100-sxm": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "b300-sxm": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
"""Our catalog name -> folder of the wheel."""

Table = dict[str, np.ndarray[Any, Any]]


def folder() -> Path | None:
    """Return where the wheel keeps its tables, or nothing if it is not installed."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or not found.submodule_search_locations:
        return None
    data = Path(next(iter(found.submodule_search_locations))) / "systems" / "data"
    return data if data.is_dir() else None


def tables(
    gpu: str, family: str, name: str, engine: str = "*", *, every: bool = False
) -> dict[str, Table]:
    """
    Read the newest table of every engine, or all.

    Args:
        gpu: catalog name.
        family: folder: gemm, attention, moe, comm, mla, linear_attention.
        name: of the file, less `_perf.parquet`.
        engine: vllm, trtllm, sglang, nccl; all by default.
        every: all versions of each; a later one may hold a part of the shapes only.

    Returns:
        Columns by engine (and version); `latency` in milliseconds as the wheel has it.
    """
    from pyarrow import parquet  # noqa: PLC0415  (only where the wheel is installed)

    root = folder()
    if root is None:
        raise FileNotFoundError(WHEEL)
    newest: dict[str, Path] = {}
    paths = (root / SYSTEMS[gpu] / family).glob(f"{engine}/*/{name}_perf.parquet")
    for path in sorted(paths, key=lambda p: _version(p.parent.name)):
        own = path.parent.parent.name
        newest[f"{own} {path.parent.name}" if every else own] = path
    found = {}
    for own, path in newest.items():
        table = parquet.read_table(path)
        found[own] = {c: np.array(table[c].to_pylist()) for c in table.column_names}
    return found


def minimum(found: dict[str, Table], keys: tuple[str, ...], chosen: dict[str, set[str]]) -> Table:
    """
    Return each shape once, with its shortest time over all engines and kernels.

    Some tables carry launch time or a quantisation beside the kernel; the fastest is the kernel.

    Args:
        found: tables by engine.
        keys: numeric columns that make a shape.
        chosen: column -> values to keep.

    Returns:
        `keys` as floats and `seconds`.
    """
    best: dict[tuple[float, ...], float] = {}
    for table in found.values():
        if any(key not in table for key in (*keys, *chosen)):
            continue
        keep = np.ones(len(table["latency"]), dtype=bool)
        for column, values in chosen.items():
            keep &= np.isin(table[column].astype(str), sorted(values))
        shapes = np.stack([table[key][keep].astype(float) for key in keys], axis=1).tolist()
        for shape, latency in zip(shapes, table["latency"][keep].tolist(), strict=True):
            key = tuple(shape)
            if latency < best.get(key, np.inf):
                best[key] = latency
    columns = np.array([(*key, value) for key, value in best.items()]).reshape(-1, len(keys) + 1)
    return {**{key: columns[:, i] for i, key in enumerate(keys)}, "seconds": columns[:, -1] * 1e-3}


def fastest(found: dict[str, Table], keys: tuple[str, ...]) -> Table:
    """Return each shape of some tables of `minimum` once, with its shortest time."""
    best: dict[tuple[float, ...], float] = {}
    for table in found.values():
        shapes = np.stack([table[key] for key in keys], axis=1).tolist()
        for shape, seconds in zip(shapes, table["seconds"].tolist(), strict=True):
            best[tuple(shape)] = min(seconds, best.get(tuple(shape), np.inf))
    columns = np.array([(*shape, seconds) for shape, seconds in best.items()])
    return {**{key: columns[:, i] for i, key in enumerate(keys)}, "seconds": columns[:, -1]}


def on_grid(
    table: Table,
    keys: tuple[str, str],
    at: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any]:
    """Read `latency` between the points of a full grid of two columns, linear in their logs."""
    axes = [np.unique(table[key].astype(float)) for key in keys]
    grid = np.full([len(axis) for axis in axes], np.nan)
    where = [
        np.searchsorted(axis, table[key].astype(float))
        for key, axis in zip(keys, axes, strict=True)
    ]
    grid[where[0], where[1]] = table["latency"]
    places = []
    for axis, values in zip(axes, at, strict=True):
        logs, wanted = np.log(axis), np.log(np.clip(values, axis[0], axis[-1]))
        low = np.clip(np.searchsorted(logs, wanted, side="right") - 1, 0, len(axis) - 2)
        places.append((low, (wanted - logs[low]) / (logs[low + 1] - logs[low])))
    (i, u), (j, v) = places
    lower = (1 - v) * grid[i, j] + v * grid[i, j + 1]
    upper = (1 - v) * grid[i + 1, j] + v * grid[i + 1, j + 1]
    return np.asarray((1 - u) * lower + u * upper)


def rising(table: Table, along: str, others: tuple[str, ...]) -> Table:
    """Keep of every shape only times that no larger *along* undercuts: more work is not faster."""
    order = np.lexsort((table[along], *(table[key] for key in others)))
    arranged = {key: values[order] for key, values in table.items()}
    same = np.ones(len(order), dtype=bool)
    for key in others:
        same[1:] &= arranged[key][1:] == arranged[key][:-1]
    same[:1] = False
    seconds = arranged["seconds"].copy()
    for i in range(len(seconds) - 1, 0, -1):
        if same[i]:
            seconds[i - 1] = min(seconds[i - 1], seconds[i])
    return {**arranged, "seconds": seconds}


def sampled(table: Table, most: int, *, along: str | None = None) -> Table:
    """Return at most *most* rows, drawn with a fixed seed, evenly over the octaves of *along*."""
    count = len(table["seconds"])
    if count <= most:
        return table
    weights = np.ones(count)
    if along is not None:
        octave = np.floor(np.log2(np.maximum(1.0, table[along])))
        _, position, sizes = np.unique(octave, return_inverse=True, return_counts=True)
        weights = 1 / sizes[position]
    rng = np.random.default_rng(0)
    rows = rng.choice(count, most, replace=False, p=weights / weights.sum())
    return {key: values[rows] for key, values in table.items()}


def _version(name: str) -> tuple[int, ...]:
    """Order versions by their numbers; a release candidate before its release."""
    number, _, candidate = name.partition("rc")
    digits = [int(part) for part in number.replace("post", "").split(".") if part.isdigit()]
    return (*digits, *[0] * (4 - len(digits)), int(candidate) if candidate.isdigit() else 10**6)
