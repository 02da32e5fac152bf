"""Fitted constants into configs/gpus, errors of the fits into a file that the docs read."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from op_tables.constants import Fitted

BEGIN = "# Written by benchmarks/fit_ops.py: do not edit below."
DATE = "2026-11-25"
HAND_WRITTEN = ("efficiency", "efficiency.elementwise", "efficiency.sustained_fraction")
"""Tables of `[efficiency]` that no op table speaks of; the others are replaced."""


def write_constants(
    path: Path,
    measured: str,
    found: list[Fitted],
    collectives: dict[str, tuple[list[float], list[float]]],
) -> None:
    """
    Replace the fitted tables of one GPU's file, and the sources that covered them.

    Args:
        path: of configs/gpus.
        measured: GPU whose tables were fitted: this one or a relative of the same silicon.
        found: constants.
        collectives: bytes and seconds, by key.
    """
    kept = path.read_text(encoding="utf-8").partition(BEGIN)[0]
    sections = re.split(r"(?m)^(?=\[)", kept)
    kept = "".join(part for part in sections if not _replaced(part)).rstrip() + "\n"
    own = path.stem == measured
    kept = re.sub(r"(?m)^fitted = .*$", f"fitted = {str(own).lower()}", kept)
    lines = [kept, BEGIN]
    for fit in found:
        lines += ["", f"[efficiency.{fit.key}]  # {_error(fit)}"]
        lines += [f"{name} = {value!r}" for name, value in fit.numbers.items()]
    for key, (sizes, seconds) in sorted(collectives.items()):
        lines += ["", f"[efficiency.{key}]"]
        lines += [f"size_bytes = {[round(size) for size in sizes]}"]
        lines += [f"seconds = {seconds}"]
    engines = sorted({engine.partition(" ")[0] for fit in found for engine in fit.engines})
    other = "" if own else f"; not measured on this GPU, which runs the kernels of {measured}"
    lines += [
        "",
        "[[sources]]",
        f'covers = "{_covers(fit.key for fit in found)}"',
        (
            f'document = "aiconfigurator-core 0.12.0 op tables (Apache-2.0, NVIDIA) of {measured},'
            f" {', '.join(engines)}: shortest time of each shape over engines and kernels,"
            " attention, experts (tokens by its power_law_1.01) and vLLM's fp8 GEMMs per engine;"
            " fp8 of static scales: less what quantising activations takes, as its fp8_static;"
            f' mean errors beside each table{other}"'
        ),
        f'date = "{DATE}"',
        "",
    ]
    links = [
        "[[sources]]",
        f'covers = "{_covers(key for key in collectives if not key.startswith("engines"))}"',
        (
            f'document = "aiconfigurator-core 0.12.0 (Apache-2.0, NVIDIA) of {measured}: custom'
            " all-reduce in CUDA graphs or NCCL, whichever is faster; NCCL for the others; sizes"
            ' there are elements of 2 bytes"'
        ),
        f'date = "{DATE}"',
        "",
    ]
    lines += links if collectives else []
    path.write_text("\n".join(lines), encoding="utf-8")


def write_errors(path: Path, gpu: str, found: list[Fitted]) -> None:
    """Put the errors of one GPU's fits in place of those the file had of it."""
    known = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = [row for row in known.get("fits", []) if row["gpu"] != gpu]
    for fit in found:
        error = np.abs(fit.errors)
        rows.append(
            {
                "gpu": gpu,
                "op": fit.key,
                "rows": len(error),
                "mean_error": round(float(error.mean()), 4),
                "median_error": round(float(np.median(error)), 4),
                "bias": round(float(np.median(fit.errors)), 4),
            }
        )
    rows.sort(key=lambda row: (row["gpu"], row["op"]))
    lines = [
        "# Errors of the fits in configs/gpus: written by benchmarks/fit_ops.py.",
        'source = "aiconfigurator-core 0.12.0 op tables (Apache-2.0, NVIDIA)"',
        f'date = "{DATE}"',
    ]
    for row in rows:
        lines += ["", "[[fits]]"]
        lines += [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
            for key, value in row.items()
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _covers(keys: Iterable[str]) -> str:
    """Name the tables of `[efficiency]` that a source speaks of."""
    return ", ".join(sorted({f"efficiency.{key.partition('.')[0]}" for key in keys}))


def _replaced(section: str) -> bool:
    """Whether the fit writes this table of the file."""
    header = section.partition("]")[0].lstrip("[")
    if header == "sources":
        covers = re.search(r'covers = "([^"]*)"', section)
        text = covers.group(1) if covers else ""
        return text.startswith("efficiency") and not re.search(
            r"elementwise|scale_|collective_latency|sustained", text
        )
    return (
        header.startswith("efficiency")
        and not header.startswith(HAND_WRITTEN[1:])
        and (header != HAND_WRITTEN[0])
    )


def _error(fit: Fitted) -> str:
    """Return the errors of a fit as text."""
    error = np.abs(fit.errors)
    return f"{error.mean():.1%} mean error over {len(error)} shapes"
