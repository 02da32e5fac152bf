"""Predicted against measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.errors import InputError
from sizing.specs.slo import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadtest.spread import Spread
    from sizing.plan import Prediction

PREDICTED = ("ttft", "tpot", "itl", "e2e")
TOLERANCE = {"ttft": 0.35, "tpot": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One statistic; `error_fraction` is predicted / measured - 1."""

    metric: str
    statistic: str
    predicted_s: float
    measured_s: float
    error_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """
    A prediction and how it held.

    Attributes:
        tolerance: by metric, the error of the mean that is allowed.
        held: every mean with a tolerance was measured, and lies within it.
    """

    rows: tuple[Compared, ...]
    tolerance: dict[str, float]
    held: bool

    def row(self, metric: str, statistic: str) -> Compared | None:
        """Return one row, `None` where nothing was measured."""
        found = (r for r in self.rows if (r.metric, r.statistic) == (metric, statistic))
        return next(found, None)


def compare(
    predicted: Prediction, measured: Mapping[str, Spread | None], tolerance: dict[str, float]
) -> Comparison:
    """Compare at every statistic that both have."""
    rows = []
    for metric in PREDICTED:
        spread = measured[metric]
        for statistic in PERCENTILES if spread else ():
            planned_s = getattr(predicted, metric).at(statistic)
            seen_s = spread.at(statistic) if spread else 0.0
            if seen_s > 0:
                rows.append(
                    Compared(
                        metric=metric,
                        statistic=statistic,
                        predicted_s=planned_s,
                        measured_s=seen_s,
                        error_fraction=planned_s / seen_s - 1,
                    )
                )
    means = {r.metric: abs(r.error_fraction) for r in rows if r.statistic == "mean"}
    held = all(metric in means and means[metric] <= most for metric, most in tolerance.items())
    return Comparison(rows=tuple(rows), tolerance=tolerance, held=held)


def parse_tolerance(text: str) -> dict[str, float]:
    """Read `ttft=0.35,tpot=0.25`, or one number for both."""
    expectation = "fractions like ttft=0.35,tpot=0.25, or one for both"
    try:
        if "=" not in text:
            given = dict.fromkeys(TOLERANCE, float(text))
        else:
            pairs = (part.split("=") for part in text.split(","))
            given = {key.strip(): float(value) for key, value in pairs}
    except ValueError:
        raise InputError("--tolerance", text, expectation) from None
    if not set(given) <= set(PREDICTED) or not all(
        0 < value < float("inf") for value in given.values()
    ):
        raise InputError("--tolerance", text, expectation)
    return given
