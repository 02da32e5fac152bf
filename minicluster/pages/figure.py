"""Charts in Plotly's own terms: plain traces and layouts, without its Python library."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike

Json = dict[str, Any]

BLUE, GREEN, ORANGE, PURPLE, RED, AMBER, SOFT, PALE, INK = (
    f"var(--{name})"
    for name in ("blue", "green", "orange", "purple", "red", "amber", "soft", "line", "ink")
)
"""Colours of the style sheet (page.css); page.js looks them up, for light and dark screens."""
POOL_COLOURS = {"prefill": BLUE, "decode": GREEN, "mixed": PURPLE}  # colours of pools, by role
SERIES_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
"""Colours of series that have no meaning of their own, in their order."""
MAX_MARKS = 1_500  # marks of one trace at most: a browser draws each as an element of its own
DIGITS = 6  # significant digits of numbers in a page: more than a chart can show


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart: Plotly's `data` and `layout`; the *caption* stands for it where it is not seen."""

    title: str
    caption: str
    traces: tuple[Json, ...]
    layout: Json

    def trace(self, name: str) -> Json:
        """Return the trace of that *name*. Raises KeyError: the chart has none."""
        traces = [trace for trace in self.traces if trace["name"] == plain(name)]
        if not traces:
            raise KeyError(name)
        return traces[0]


def line(  # noqa: PLR0913  (what a line of a chart is)
    name: str,
    xs: ArrayLike,
    ys: ArrayLike,
    *,
    colour: str,
    hover: str,
    dash: str = "solid",
    hover_values: ArrayLike | None = None,
) -> Json:
    """
    Return a line through points.

    Args:
        colour: one of this module's.
        hover: Plotly's `hovertemplate`: our own words, never those of a user.
        dash: Plotly's `line.dash`.
        hover_values: what *hover* calls `%{customdata}`, shape (n,).
    """
    drawn = _trace("scatter", name, numbers(xs), numbers(ys), hover)
    drawn |= {"mode": "lines", "line": {"color": colour, "dash": dash, "width": 2}}
    return drawn if hover_values is None else {**drawn, "customdata": numbers(hover_values)}


def marks(  # noqa: PLR0913  (what marks of a chart are)
    name: str,
    xs: ArrayLike,
    ys: ArrayLike,
    *,
    colour: str,
    hover: str,
    texts: Sequence[str] = (),
    size: int = 9,
    symbol: str = "circle",
    opacity: float = 1.0,
    lines: bool = False,
) -> Json:
    """
    Return a mark a point, as `line` does.

    Args:
        texts: what *hover* calls `%{text}`: any words; n of them, or none.
        size: diameter in pixels.
        symbol: Plotly's `marker.symbol`.
        lines: whether a line joins them.
    """
    drawn = _trace("scatter", name, numbers(xs), numbers(ys), hover) | {
        "mode": "lines+markers" if lines else "markers",
        "marker": {
            "color": colour,
            "size": size,
            "symbol": symbol,
            "opacity": opacity,
            "line": {"width": 2 if symbol.endswith("-open") else 0, "color": colour},
        },
        "line": {"color": colour, "width": 2},
    }
    return {**drawn, "text": [plain(text) for text in texts]} if texts else drawn


def bars(name: str, labels: Sequence[str], ys: ArrayLike, *, colour: str, hover: str) -> Json:
    """Return a bar a label; *hover* is Plotly's `hovertemplate`, our own words."""
    drawn = _trace("bar", name, [plain(label) for label in labels], numbers(ys), hover)
    return drawn | {"marker": {"color": colour}}


def heat_map(
    name: str,
    values: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    *,
    hover: str,
    colours: tuple[str, str, str],
) -> Json:
    """
    Return a cell a value, shape (rows, columns), at the places 0, 1, ... of both axes.

    *hover* calls *texts* `%{text}`; *colours* are of the lowest value, of zero and of the highest,
    on a symmetric scale.
    """
    most = max((abs(value) for row in values for value in row if math.isfinite(value)), default=1.0)
    scale = [[place, colour] for place, colour in zip((0, 0.5, 1), colours, strict=True)]
    return {
        "type": "heatmap",
        "name": plain(name),
        "z": [numbers(row) for row in values],
        "text": [[plain(text) for text in row] for row in texts],
        "hovertemplate": hover + "<extra></extra>",
        "colorscale": scale,
        "zmin": -(most or 1.0),
        "zmax": most or 1.0,
        "xgap": 1,
        "ygap": 1,
    }


def contour(name: str, values: Sequence[Sequence[float]], *, at: float) -> Json:
    """Return the line over a heat map of the same *values* where they are *at*."""
    return {
        "type": "contour",
        "name": plain(name),
        "z": [numbers(row) for row in values],
        "contours": {"start": at, "end": at, "size": 1, "coloring": "none"},
        "line": {"color": INK, "width": 3},
        "hoverinfo": "skip",
        "showscale": False,
        "showlegend": True,
    }


def _trace(kind: str, name: str, xs: Sequence[object], ys: Sequence[object], hover: str) -> Json:
    extra = "<extra>%{fullData.name}</extra>"
    return {"type": kind, "name": plain(name), "x": xs, "y": ys, "hovertemplate": hover + extra}


def axes(x: Json, y: Json, **more: Any) -> Json:  # noqa: ANN401  (any part of a layout)
    """Return a layout of two axes, and *more* of it in Plotly's keys."""
    return {"xaxis": x, "yaxis": y, **more}


def axis(title: str, low: float | None = None, high: float | None = None) -> Json:
    """Return an axis with its unit in the *title*; without ends it holds whatever is drawn."""
    named: Json = {"title": {"text": plain(title)}}
    return named if high is None else {**named, "range": numbers([low or 0.0, high])}


def log_axis(title: str, ticks: Mapping[float, str], low: float, high: float) -> Json:
    """Return a logarithmic axis from *low* to *high*, either of which may be the larger."""
    return {
        "title": {"text": plain(title)},
        "type": "log",
        "range": numbers([math.log10(low), math.log10(high)]),
        "tickvals": list(ticks),
        "ticktext": [plain(text) for text in ticks.values()],
    }


def thinned(count: int) -> slice:
    """Return every so many of *count* places, so that at most `MAX_MARKS` are left."""
    return slice(None, None, max(1, -(-count // MAX_MARKS)))


def numbers(values: ArrayLike) -> list[float | None]:
    """Return values as JSON has them: `DIGITS` significant digits; `None` for what is no number."""
    flat = np.asarray(values, np.float64).tolist()
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in flat]


def plain(text: str) -> str:
    """Return *text* so that Plotly shows it as it stands: it takes `<b>` and `<a>` for markup."""
    return html.escape(text, quote=False)
