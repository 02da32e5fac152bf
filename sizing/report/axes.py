"""Axes of charts as inline SVG."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values, where it lies in the drawing, its ticks and its name."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    name: str

    def at(self, values: ArrayLike) -> NDArray[np.float64]:
        """Return coordinates, cut at the ends of the axis."""
        share = (np.asarray(values, np.float64) - self.low) / (self.high - self.low)
        return np.asarray(self.start + np.clip(share, 0, 1) * (self.end - self.start))


def upright(high: float, name: str, *, foot: float, top: float) -> Axis:
    """Return a vertical axis from 0 to a round number of at least *high*, from *foot* to *top*."""
    step = _step(high or 1.0)
    last = step * math.ceil((high or 1.0) / step - 1e-9)
    return Axis(low=0, high=last, start=foot, end=top, ticks=round_ticks(0, last), name=name)


def round_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Return round values from *low* to *high* with their names."""
    step = _step(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple((step * at, f"{step * at:,.10g}") for at in range(first, last + 1))


def frame(x: Axis, y: Axis, *, upright_lines: bool = True) -> str:
    """Draw grid, ticks and names of both axes."""
    parts = []
    for value, name in y.ticks:
        at = float(y.at(value))
        parts += [line("grid", x.start, at, x.end, at), text(x.start - 8, at + 4, name, "end")]
    for value, name in x.ticks:
        at = float(x.at(value))
        if upright_lines:
            parts.append(line("grid", at, y.end, at, y.start))
        parts.append(text(at, y.start + 17, name))
    parts.append(text((x.start + x.end) / 2, y.start + 37, x.name))
    middle = (y.start + y.end) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    name = html.escape(y.name)
    parts.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{name}</text>')
    return "".join(parts)


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw a straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, content: str, anchor: str = "middle", style: str = "") -> str:
    """Write text."""
    mark = f' class="{style}"' if style else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text{mark} {place}>{html.escape(content)}</text>"


def _step(high: float) -> float:
    """Return a round distance between about five ticks."""
    unit: float = 10.0 ** math.floor(math.log10(high / TICKS))
    return next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m * TICKS >= high * (1 - 1e-9))
