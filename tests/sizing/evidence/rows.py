"""Measured rows: cells of a line, and the row that is read from them."""

from __future__ import annotations

from sizing.evidence.row import MeasuredRow, row_from

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
