"""
Set op times that `gpu_ops.py` measured beside the sizer's: median and mean error by kind and size.

    python benchmarks/gpu_compare.py h200-sxm tests/published/h200_ops.csv
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from op_tables import shapes

from minicluster.errors import InputError
from minicluster.specs.model import DTYPE_BYTES
from sizing import catalog
from sizing.latency.roofline import op_time

Row = dict[str, str]
SMALL = 128
"""Rows of a GEMM of a step that only decodes."""


def main() -> int:
    """Print a line per kind of op, data type and range of sizes."""
    if len(sys.argv) != 3:  # noqa: PLR2004
        print(__doc__, file=sys.stderr)
        return 2
    try:
        gpu = catalog.find_gpu(sys.argv[1])
        with Path(sys.argv[2]).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if gpu.efficiency is None:
        print(f"{gpu.name} has no efficiencies to compare")
        return 2
    efficiency = replace(gpu.efficiency, sustained_fraction={})  # short bursts, as in the tables
    print("| op | size | ops | median error | mean | bias |\n|---|---|---|---|---|---|")
    for kind, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["op"], row["dtype"]) == (kind, dtype)]
        if not dtype:  # a copy: its bandwidth
            size, taken = (float(own[0][key]) for key in ("bytes", "seconds"))
            print(f"| {kind} | {size / 2**30:.0f} GiB | 1 | {size / taken / 1e9:,.1f} GB/s | | |")
            continue
        predicted = op_time(_op(kind, dtype, own), gpu, efficiency).seconds
        errors = predicted / np.array([float(row["seconds"]) for row in own]) - 1
        sizes = np.array([_size(row) for row in own])
        for name in dict.fromkeys(sizes):
            some = errors[sizes == name]
            print(
                f"| {kind} {dtype} | {name} | {len(some)} | {np.median(abs(some)):.1%} "
                f"| {abs(some).mean():.1%} | {np.median(some):+.1%} |"
            )
    return 0


def _size(row: Row) -> str:
    """Return the range of sizes that an op counts to."""
    if row["op"] == "gemm":
        return "up to 128 rows" if int(row["m"]) <= SMALL else "512 rows and more"
    return f"context {row['context']}"


def _op(kind: str, dtype: str, rows: list[Row]) -> shapes.Op:
    """Return the sizer's op of measured ones."""
    if kind == "gemm":
        table = {key: np.array([float(row[key]) for row in rows]) for key in ("m", "n", "k")}
        return shapes.gemms(table, dtype)
    names = {"heads": "num_heads", "kv_heads": "num_key_value_heads", "batch": "batch_size"}
    table = {to: np.array([float(row[of]) for row in rows]) for of, to in names.items()}
    table["head_dim"] = np.full(len(rows), 128.0)
    context = np.array([float(row["context"]) for row in rows])
    if kind == "prefill_attention":
        return shapes.prefills(table | {"isl": context})
    return shapes.decodes(
        table | {"step": context - 1, "kv_bytes": np.full(len(rows), DTYPE_BYTES[dtype])}
    )


if __name__ == "__main__":
    raise SystemExit(main())
