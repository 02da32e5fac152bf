"""One chart of several series over the same axis."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

from minicluster.pages.figure import SERIES_COLOURS, Figure, axes, bars, marks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def series_figure(
    title: str,
    series: Mapping[str, tuple[Sequence[float | str], Sequence[float]]],
    x_axis: dict[str, Any],
    y_axis: dict[str, Any],
    *,
    unit: str,
) -> Figure:
    """
    Draw series over a shared axis: a line through marks over numbers, bars over names.

    Args:
        series: by name, the places on the axis and the values there.
        unit: of the values.
    """
    traces, said = [], []
    for (name, (xs, ys)), colour in zip(series.items(), cycle(SERIES_COLOURS), strict=False):
        hover = f"%{{y:,.4g}} {unit} at %{{x}}"
        labels = [x for x in xs if isinstance(x, str)]
        traces.append(
            bars(name, labels, ys, colour=colour, hover=hover)
            if labels
            else marks(name, xs, ys, colour=colour, hover=hover, lines=True)
        )
        drawn = ", ".join(
            f"{y:,.4g} at {x if isinstance(x, str) else format(x, ',g')}"
            for x, y in zip(xs, ys, strict=True)
        )
        said.append(f"{name}: {drawn}" if len(series) > 1 else drawn)
    caption = f"{unit if title == unit else f'{title}, {unit}'}: {'; '.join(said)}"
    return Figure(title=title, caption=caption, traces=tuple(traces), layout=axes(x_axis, y_axis))
