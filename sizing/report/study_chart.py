"""Charts as inline SVG, coloured by the page's own style sheet."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.report.axes import Axis, frame, text, upright

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 36, 42
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
class StudySeries:
    """Points of one line or bars of one colour; x ascending for lines."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def lines(title: str, series: Sequence[StudySeries], *, x_name: str, y_name: str) -> str:
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
        name=x_name,
    )
    y = _upright(series, y_name)
    parts = [frame(x, y, upright_lines=False)]
    for index, one in enumerate(series):
        places = list(zip(x.at(np.log2(one.x)), y.at(one.y), strict=True))
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline class="s{index}" points="{path}"/>')
        parts += [
            f'<circle class="f{index}" cx="{a:.1f}" cy="{b:.1f}" r="3">'
            f"<title>{_e(one.name)}: {short(p)}, {q:.4g}</title></circle>"
            for (a, b), p, q in zip(places, one.x, one.y, strict=True)
        ]
    return _svg(title, parts, [one.name for one in series])


def bars(title: str, names: Sequence[str], series: Sequence[StudySeries], *, y_name: str) -> str:
    """Draw groups of bars, one group a name; `Series.x` is not read."""
    y = _upright(series, y_name)
    slot = (WIDTH - RIGHT - LEFT) / len(names)
    wide = 0.7 * slot / len(series)
    x = Axis(
        low=0,
        high=len(names),
        start=LEFT,
        end=WIDTH - RIGHT,
        ticks=tuple((place + 0.5, name) for place, name in enumerate(names)),
        name="",
    )
    parts = [frame(x, y, upright_lines=False)]
    for index, one in enumerate(series):
        for place, value in enumerate(one.y):
            top = float(y.at(value))
            left = LEFT + slot * (place + 0.15) + wide * index
            parts.append(
                f'<rect class="f{index}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}"'
                f' height="{y.start - top:.1f}">'
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


def _upright(series: Sequence[StudySeries], name: str) -> Axis:
    """Return a vertical axis that holds every series."""
    high = max(value for one in series for value in one.y)
    return upright(high, name, foot=HEIGHT - BOTTOM, top=TOP)


def _svg(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    """Put a title and a legend around a drawing."""
    legend, left = [], float(LEFT)
    for index, name in enumerate(names):
        legend.append(f'<circle class="f{index}" cx="{left:.0f}" cy="25" r="4"/>')
        legend.append(text(left + 8, 29, name, "start"))
        left += 24 + 6.2 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{_e(title)}">{text(LEFT, 13, title, "start")}'
        + "".join([*legend, *parts])
        + "</svg>"
    )


def _e(text: object) -> str:
    return html.escape(str(text))
