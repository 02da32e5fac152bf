"""Intervals and claims tried on configurations that they were not made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.checks import STRICT
from sizing.evidence.interval import FOLDS, fit_intervals, folds, together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sizing.evidence.interval import Intervals
    from sizing.evidence.residual import RowResidual

CONFIDENCES = (0.5, 0.8, 0.9, 0.95)
LIMITS_A_DECADE = 24
"""SLO limits are 10 % apart, whatever was predicted or measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """
    Intervals tried.

    Attributes:
        source: of the rows; `all`: every one.
        quantity: `ttft` or `tpot`.
        rows: latencies tried.
        covered_fraction: of them inside their interval.
        median_width: (high - low) / predicted.
    """

    __pydantic_config__ = STRICT

    source: str
    quantity: str
    rows: int
    covered_fraction: float
    median_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """
    Claims "below this limit, with this confidence" tried, as the search makes them.

    Attributes:
        source: of the rows; `all`: every one.
        quantity: `ttft` or `tpot`.
        confidence: nominal.
        rows: claims: one a row, of the lowest limit that the bound is below.
        right_fraction: of them where the measurement is below the limit, too.
        bound_fraction: where it is below the bound itself: limits with no space between them.
    """

    __pydantic_config__ = STRICT

    source: str
    quantity: str
    confidence: float
    rows: int
    right_fraction: float
    bound_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Coverage of intervals and claims on configurations that were left out."""

    coverages: tuple[Coverage, ...]
    claims: tuple[Claim, ...]


def tried(residuals: Sequence[RowResidual]) -> Tried:
    """Cross-fit: every configuration is judged by quantiles of the others."""
    inside: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    right: dict[tuple[str, str, float], list[tuple[bool, bool]]] = {}
    for train, test in folds(residuals, FOLDS, key=together):
        made = fit_intervals(train)
        for each in test:
            found = made.around(1.0, each.quantity, each.path, stand_in=each.stand_in)
            if found is None:
                continue
            hit = found.low_s <= math.exp(each.log_ratio) <= found.high_s
            for source in ("all", each.source):
                hits = inside.setdefault((source, each.quantity), [])
                hits.append((hit, found.high_s - found.low_s))
                for confidence, claim in _claims(made, each):
                    right.setdefault((source, each.quantity, confidence), []).append(claim)
    return Tried(
        coverages=tuple(
            Coverage(
                source=source,
                quantity=quantity,
                rows=len(hits),
                covered_fraction=float(np.mean([hit for hit, _ in hits])),
                median_width=float(np.median([width for _, width in hits])),
            )
            for (source, quantity), hits in sorted(inside.items())
        ),
        claims=tuple(
            Claim(
                source=source,
                quantity=quantity,
                confidence=confidence,
                rows=len(hits),
                right_fraction=float(np.mean([grid for grid, _ in hits])),
                bound_fraction=float(np.mean([edge for _, edge in hits])),
            )
            for (source, quantity, confidence), hits in sorted(right.items())
        ),
    )


def _claims(made: Intervals, each: RowResidual) -> Iterator[tuple[float, tuple[bool, bool]]]:
    """Whether the claim of each confidence is right, at the lowest limit and at the bound."""
    for confidence in CONFIDENCES:
        factor = made.bound(each.quantity, each.path, confidence, stand_in=each.stand_in)
        if factor is not None:
            bound_s = factor * each.predicted_s
            limit_s = 10 ** (math.ceil(math.log10(bound_s) * LIMITS_A_DECADE) / LIMITS_A_DECADE)
            measured_s = each.predicted_s * math.exp(each.log_ratio)
            yield confidence, (measured_s <= limit_s, measured_s <= bound_s)
