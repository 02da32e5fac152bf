"""Measured rows: cells of a line, the row that is read from them, and files of lines."""

from __future__ import annotations

import csv
from pathlib import Path

from sizing.evidence.measured_row import MeasuredRow
from sizing.evidence.row import row_from

CELLS = {
    "id": "one", "source": "here", "model": "meta-llama/Llama-3.1-70B", "gpu": "h100-sxm",
    "engine": "vllm", "engine_version": "0.18.0", "weight_dtype": "fp8", "serving": "aggregated",
    "gpus": "8", "tp": "8", "load": "closed", "concurrency": "16", "isl": "1024", "osl": "256",
}  # fmt: skip
SPLIT = {
    "model": "deepseek-ai/DeepSeek-V3", "gpu": "h200-sxm", "serving": "disaggregated",
    "gpus": "24", "tp": "", "prefill_replicas": "1", "prefill_tp": "8", "decode_replicas": "2",
    "decode_tp": "8", "concurrency": "64",
}  # fmt: skip


def row(**cells: str) -> MeasuredRow:
    """Return the row of `CELLS`, some of them replaced."""
    return row_from(CELLS | cells, "rows.csv:2")


def write_rows(path: Path, *lines: dict[str, str]) -> Path:
    """Write lines of measured rows, with all columns that any of them has; return the file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)))
        writer.writeheader()
        writer.writerows(lines)
    return path
