"""Charts as inline SVG, coloured by the page's own style sheet."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 36, 42
TICKS = 5
STYLE = (
    ":root{color-scheme:light dark;--ink:#222;--soft:#777;--grid:#ddd;--paper:#fff;"
    "--a:#2563a8;--b:#c2571a;--c:#2e7d4f;--d:#8b3a86}"
    "@media(prefers-color-scheme:dark){:root{--ink:#eee;--soft:#999;--grid:#333;--paper:#16181c;"
    "--a:#6ea8e8;--b:#f0955a;--c:#6cc492;--d:#cf86ca}}"
    "svg{background:var(--paper)}svg text{font:11px system-ui,sans-serif;fill:var(--ink)}"
    "svg .grid{stroke:var(--grid);stroke-width:1}"
    "svg polyline{fill:none;stroke-width:2}"
    "svg .s0{stroke:var(--a)}svg .s1{stroke:var(--b)}svg .s2{stroke:var(--c)}"
    "svg .s3{stroke:var(--d)}"
    "svg .f0{fill:var(--a)}svg .f1{fill:var(--b)}svg .f2{fill:var(--c)}svg .f3{fill:var(--d)}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one line or bars of one colour; x ascending for lines."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range, where it lies in the drawing, and how its ticks are called."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Return the coordinate of *value*."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def lines(title: str, series: Sequence[Series], *, x_name: str, y_name: str) -> str:
    """
    Draw lines over a logarithmic horizontal axis, zero at the foot of the vertical one.

    Args:
        title: above the drawing.
        series: one line each, up to four; all x above zero.
        x_name: of the horizontal axis.
        y_name: of the vertical axis.

    Returns:
        One `<svg>` element; its colours are those of `STYLE`.

    """
    known = sorted({value for one in series for value in one.x})
    logs = [math.log2(value) for value in known]
    wide = max(logs[-1] - logs[0], 1e-9)
    x = Axis(
        low=logs[0],
        high=logs[0] + wide,
        start=LEFT,
        end=WIDTH - RIGHT,
        ticks=tuple((math.log2(value), short(value)) for value in known),
    )
    y = _upright(max(value for one in series for value in one.y))
    parts = [_frame(x, y, x_name, y_name)]
    for index, one in enumerate(series):
        places = [(x.at(math.log2(a)), y.at(b)) for a, b in zip(one.x, one.y, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline class="s{index}" points="{path}"/>')
        parts += [
            f'<circle class="f{index}" cx="{a:.1f}" cy="{b:.1f}" r="3">'
            f"<title>{_e(one.name)}: {short(p)}, {q:.4g}</title></circle>"
            for (a, b), p, q in zip(places, one.x, one.y, strict=True)
        ]
    return _svg(title, parts, [one.name for one in series])


def bars(title: str, names: Sequence[str], series: Sequence[Series], *, y_name: str) -> str:
    """Draw groups of bars, one group a name; `Series.x` is not read."""
    y = _upright(max(value for one in series for value in one.y))
    slot = (WIDTH - RIGHT - LEFT) / len(names)
    wide = 0.7 * slot / len(series)
    x = Axis(
        low=0,
        high=len(names),
        start=LEFT,
        end=WIDTH - RIGHT,
        ticks=tuple((place + 0.5, name) for place, name in enumerate(names)),
    )
    parts = [_frame(x, y, "", y_name)]
    for index, one in enumerate(series):
        for place, value in enumerate(one.y):
            left = LEFT + slot * (place + 0.15) + wide * index
            parts.append(
                f'<rect class="f{index}" x="{left:.1f}" y="{y.at(value):.1f}" width="{wide:.1f}"'
                f' height="{y.at(0) - y.at(value):.1f}">'
                f"<title>{_e(one.name)}, {_e(names[place])}: {value:.4g}</title></rect>"
            )
    return _svg(title, parts, [one.name for one in series])


def short(value: float) -> str:
    """Write a number the way axes do: 2K, 16K, 4M."""
    for unit, name in ((1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    if value >= 1024 and value % 1024 == 0:  # noqa: PLR2004  (sizes of clusters are powers of two)
        return f"{value / 1024:.3g}K"
    return f"{value:.4g}"


def round_ticks(high: float) -> tuple[float, ...]:
    """Return about five round numbers from 0 to at least *high*."""
    if high <= 0:
        return (0.0, 1.0)
    step = 10 ** math.floor(math.log10(high / TICKS))
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if step * m * TICKS >= high * (1 - 1e-9))
    return tuple(step * i for i in range(math.ceil(high / step - 1e-9) + 1))


def _upright(high: float) -> Axis:
    """Return a vertical axis from zero."""
    ticks = round_ticks(high)
    named = tuple((tick, f"{tick:.6g}") for tick in ticks)
    return Axis(low=0, high=ticks[-1], start=HEIGHT - BOTTOM, end=TOP, ticks=named)


def _svg(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    """Put a title and a legend around a drawing."""
    legend, left = [], float(LEFT)
    for index, name in enumerate(names):
        legend.append(f'<circle class="f{index}" cx="{left:.0f}" cy="25" r="4"/>')
        legend.append(_text(left + 8, 29, name, "start"))
        left += 24 + 6.2 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{_e(title)}">{_text(LEFT, 13, title, "start")}'
        + "".join([*legend, *parts])
        + "</svg>"
    )


def _frame(x: Axis, y: Axis, x_name: str, y_name: str) -> str:
    """Draw grid, ticks and names of both axes."""
    parts = [_line(x.start, y.at(v), x.end, y.at(v)) for v, _ in y.ticks]
    parts += [_text(x.start - 8, y.at(v) + 4, name, "end") for v, name in y.ticks]
    parts += [_text(x.at(v), HEIGHT - BOTTOM + 16, name, "middle") for v, name in x.ticks]
    parts.append(_text((x.start + x.end) / 2, HEIGHT - 6, x_name, "middle"))
    middle = (y.start + y.end) / 2
    parts.append(
        f'<text x="14" y="{middle:.1f}" text-anchor="middle"'
        f' transform="rotate(-90 14 {middle:.1f})">{_e(y_name)}</text>'
    )
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_e(text)}</text>'


def _e(text: object) -> str:
    return html.escape(str(text))
