"""Charts as inline SVG, coloured by the page's own style sheet."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sizing.report.axes import Axis, frame, line, round_ticks, upright

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 16, 42
MAX_POINTS = 1_000
"""More marks than that are not drawn: nobody sees them, and every browser loads them."""
TAIL_TICKS = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """
    Points under one name of the style sheet.

    Attributes:
        xs: shape (n,).
        ys: shape (n,).
        marks: whether they are marks; else a line.
        titles: of the marks, shown under the pointer; empty: none.
    """

    style: str
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    marks: bool = False
    titles: tuple[str, ...] = ()


def horizontal(low: float, high: float, name: str) -> Axis:
    """Return a horizontal axis from *low* to *high*, with round ticks."""
    ticks = round_ticks(low, high)
    return Axis(low=low, high=high, start=LEFT, end=WIDTH - RIGHT, ticks=ticks, name=name)


def vertical(high: float, name: str) -> Axis:
    """Return a vertical axis from 0 to a round number of at least *high*."""
    return upright(high, name, foot=HEIGHT - BOTTOM, top=TOP)


def tail(count: int, name: str) -> Axis:
    """
    Return a horizontal axis of shares that gives the tail its room.

    A share p lies at -log10(1 - p), so 90 %, 99 % and 99.9 % are equally far apart.
    """
    high = max(at_tail(0.995), math.log10(max(count, 2)))
    shares = [share for share in TAIL_TICKS if at_tail(share) <= high]
    ticks = tuple((at_tail(share), f"{100 * share:.10g}%") for share in shares)
    return Axis(low=0, high=high, start=LEFT, end=WIDTH - RIGHT, ticks=ticks, name=name)


def at_tail(share: float) -> float:
    """Return where a share lies on a `tail` axis."""
    return -math.log10(1 - share)


def chart(x: Axis, y: Axis, series: Sequence[Series], *, limit: float | None = None) -> str:
    """
    Draw series in a frame.

    Args:
        x: horizontal axis.
        y: vertical axis.
        series: in the order in which they are drawn.
        limit: of y, as a line of its own.
    """
    parts = [frame(x, y)]
    if limit is not None:
        at = float(y.at(limit))
        parts.append(line("limit", x.start, at, x.end, at))
    parts += [_marks(x, y, each) if each.marks else _curve(x, y, each) for each in series]
    return svg(parts, f"{y.name} over {x.name}", WIDTH, HEIGHT)


def svg(parts: Sequence[str], label: str, width: float, height: float) -> str:
    """Wrap parts into a drawing."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
        f' aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def rectangle(x: float, y: float, size: tuple[float, float], style: str, title: str = "") -> str:
    """Draw a box with rounded corners."""
    inner = f"<title>{html.escape(title)}</title>" if title else ""
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}"'
        f' height="{size[1]:.1f}" rx="3">{inner}</rect>'
    )


def thinned(count: int) -> NDArray[np.int64]:
    """Return about `MAX_POINTS` of *count* places at most, the last one among them."""
    if not count:
        return np.arange(0)
    return np.unique(np.append(np.arange(0, count, -(-count // MAX_POINTS)), count - 1))


def _curve(x: Axis, y: Axis, series: Series) -> str:
    """Draw a line through the points."""
    places = thinned(len(series.xs))
    pairs = zip(x.at(series.xs[places]), y.at(series.ys[places]), strict=True)
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)
    return f'<polyline class="{series.style}" points="{path}"/>' if path else ""


def _marks(x: Axis, y: Axis, series: Series) -> str:
    """Draw a mark a point that the axes hold; its title appears under the pointer."""
    seen = (series.xs <= x.high) & (series.ys <= y.high)
    places = np.flatnonzero(seen)
    places = places[thinned(len(places))]
    parts = []
    for at in places.tolist():
        a, b = float(x.at(series.xs[at])), float(y.at(series.ys[at]))
        title = f"<title>{html.escape(series.titles[at])}</title>" if series.titles else ""
        parts.append(
            f'<circle class="{series.style}" cx="{a:.1f}" cy="{b:.1f}" r="3.4">{title}</circle>'
        )
    return "".join(parts)
