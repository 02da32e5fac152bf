"""What a prediction of a measured row is worth, by the rules of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sizing.evidence.interval import PredictionInterval
from sizing.evidence.prediction import RowPrediction
from sizing.evidence.row import MeasuredRow

OVERLOADED_S = 10.0
OVERLOADED_RATIO = 10.0
"""A row is overloaded if its measured TTFT is above either: seconds, times its unloaded prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """
    One line of the file, predicted.

    Attributes:
        row: `None`: the line could not be read.
        ttft: interval around the prediction; `None`: no prediction, or no row stands behind one.
    """

    id: str
    source: str
    row: MeasuredRow | None
    found: RowPrediction
    ttft: PredictionInterval | None = None
    tpot: PredictionInterval | None = None

    @property
    def answered(self) -> bool | None:
        """Whether the row counts as answered; `None` where nothing was measured."""
        if self.row is None or self.found.status == "unsupported":
            return False
        if self.found.status == "infeasible":
            return self._overloaded()
        return all(
            getattr(self.found, name) is not None
            for name in ("ttft_s", "tpot_s")
            if getattr(self.row, name) is not None
        )

    def _overloaded(self) -> bool | None:
        """Whether the measurement shows the overload that `infeasible` claims."""
        if self.row is None or self.row.ttft_s is None:
            return None
        unloaded = self.found.unloaded_s or float("inf")
        return self.row.ttft_s > OVERLOADED_S or self.row.ttft_s > OVERLOADED_RATIO * unloaded
