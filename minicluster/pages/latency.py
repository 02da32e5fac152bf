"""Which latency a share of the requests stays within, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.pages.figure import ORANGE, RED, Figure, axes, axis, line, log_axis, marks
from minicluster.stats.quantiles import quantile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.pages.figure import Json

TAIL_TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
"""Shares that an axis names; 95 % has no room beside 90 %."""
IN_SECONDS_S = 10.0
"""An axis that reaches this value is in seconds: 45 s reads better than 45,000 ms."""
BODY, TAIL = 400, 300  # points drawn of one curve: of all its values, and of the slowest hundredth
HEADROOM = 1.05  # how far an axis goes beyond the largest value, so that its mark is whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCurve:
    """Latencies of requests under one name, in any order; at least one."""

    name: str
    values_s: Sequence[float] | NDArray[np.float64]
    colour: str
    dash: str = "solid"


def latency_distribution(
    title: str,
    curves: Sequence[LatencyCurve],
    *,
    predicted_s: Mapping[float, float] | None = None,
    limit: tuple[float, float] | None = None,
) -> Figure:
    """
    Draw which share of the requests stays within a latency.

    Latencies lie along x. A share p lies at log(1 - p), so 90 %, 99 % and 99.9 % are equally far
    apart.

    Args:
        curves: one at least; the k-th of n values, in order, is what (k - 1/2) / n stay within.
        predicted_s: share to predicted latency, as marks.
        limit: share and latency of the SLO: a curve that passes left of this corner keeps it.
    """
    predicted, ordered = predicted_s or {}, [np.sort(np.asarray(c.values_s)) for c in curves]
    highest_s = max(*(float(values[-1]) for values in ordered), *predicted.values(), 0.0)
    highest_s = HEADROOM * max(highest_s, limit[1] if limit else 0.0) or 1.0
    unit, scale = latency_unit(highest_s)
    least = min(0.005, *(0.5 / len(values) for values in ordered), *(1 - p for p in predicted))
    traces = [
        _curve(curve, values, unit, scale) for curve, values in zip(curves, ordered, strict=True)
    ]
    if predicted:
        shares = sorted(predicted)
        traces.append(
            marks(
                "predicted",
                [scale * predicted[share] for share in shares],
                [1 - share for share in shares],
                colour=ORANGE,
                hover=f"%{{text}} within %{{x:,.4g}} {unit}",
                texts=[f"{100 * share:.10g} %" for share in shares],
                symbol="circle-open",
            )
        )
    if limit:
        traces.append(_corner(*limit, top=scale * highest_s, unit=unit, scale=scale))
    ticks = {1 - p: f"{100 * p:.10g}%" for p in TAIL_TICKS if 1 - p >= least * (1 - 1e-9)}
    return Figure(
        title=title,
        caption=_caption(curves, limit, unit, scale),
        traces=tuple(traces),
        layout=axes(
            axis(unit, 0.0, scale * highest_s),
            log_axis("share of requests within", ticks, 1.0, least),
        ),
    )


def latency_unit(highest_s: float) -> tuple[str, float]:
    """Return the unit of an axis that reaches *highest_s*, and how many of it are a second."""
    return ("s", 1.0) if highest_s >= IN_SECONDS_S else ("ms", 1e3)


def _curve(curve: LatencyCurve, ordered: NDArray[np.float64], unit: str, scale: float) -> Json:
    places = _places(len(ordered))
    within = (places + 0.5) / len(ordered)
    return line(
        curve.name,
        scale * ordered[places],
        1 - within,
        colour=curve.colour,
        dash=curve.dash,
        hover=f"%{{customdata:.5g}} % within %{{x:,.4g}} {unit}",
        hover_values=100 * within,
    )


def _places(count: int) -> NDArray[np.int64]:
    body = np.linspace(0, count - 1, min(count, BODY)).astype(np.int64)
    tail = np.linspace(int(0.99 * count), count - 1, min(count, TAIL)).astype(np.int64)
    return np.unique(np.concatenate([body, tail]))


def _corner(share: float, limit_s: float, *, top: float, unit: str, scale: float) -> Json:
    return line(
        "SLO",
        [scale * limit_s, scale * limit_s, top],
        [1.0, 1 - share, 1 - share],
        colour=RED,
        hover=f"{100 * share:.10g} % within {scale * limit_s:,.4g} {unit}",
    )


def _caption(
    curves: Sequence[LatencyCurve], limit: tuple[float, float] | None, unit: str, scale: float
) -> str:
    captions = []
    for curve in curves:
        values = np.asarray(curve.values_s, np.float64).tolist()
        half, most = (scale * quantile(values, share) for share in (0.5, 0.99))
        captions.append(
            f"{curve.name}: of {len(values):,} requests 50 % within {half:,.4g} {unit},"
            f" 99 % within {most:,.4g} {unit}"
        )
    if limit:
        captions.append(f"SLO: {100 * limit[0]:.10g} % within {scale * limit[1]:,.4g} {unit}")
    return "; ".join(captions).replace(" %", "\N{NO-BREAK SPACE}%")
