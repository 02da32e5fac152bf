"""predictions.csv: one line a row, in the order of the file."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sizing.evidence.verdict import RowVerdict

COLUMNS = (
    "id", "status", "reason", "ttft_s", "tpot_s", "ttft_p99_s",
    "ttft_low_s", "ttft_high_s", "tpot_low_s", "tpot_high_s",
)  # fmt: skip


def record(verdict: RowVerdict) -> dict[str, object]:
    """Return what is written of one row; `None`: an empty cell."""
    found = verdict.found
    ttft, tpot = verdict.ttft, verdict.tpot
    return {
        "id": verdict.id,
        "status": found.status,
        "reason": found.reason,
        "ttft_s": found.ttft_s,
        "tpot_s": found.tpot_s,
        "ttft_p99_s": found.ttft_p99_s,
        "ttft_low_s": ttft and ttft.low_s,
        "ttft_high_s": ttft and ttft.high_s,
        "tpot_low_s": tpot and tpot.low_s,
        "tpot_high_s": tpot and tpot.high_s,
    }


def to_csv(verdicts: Iterable[RowVerdict]) -> str:
    """Write the predictions as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: "" if value is None else value for key, value in record(verdict).items()}
        for verdict in verdicts
    )
    return text.getvalue()
