"""Charts of load tests: requests over time, and goodput against load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.figure import (
    AMBER,
    BLUE,
    ORANGE,
    RED,
    SOFT,
    Figure,
    Json,
    axes,
    axis,
    line,
    marks,
    thinned,
)
from minicluster.pages.latency import HEADROOM, latency_unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOUND_COLOURS = {True: BLUE, False: RED, None: AMBER}
"""Colours of runs, by whether the SLO held; `None`: it is not known."""


def requests_over_time(
    title: str,
    points: Sequence[tuple[float, float]],
    *,
    failed: Sequence[tuple[float, str]],
    window_s: tuple[float, float],
    limit_s: float | None,
    end_s: float,
) -> Figure:
    """
    Draw each request at its scheduled arrival; failed ones at the top.

    Args:
        points: scheduled arrival and latency, in seconds, of what was answered; at least one.
        failed: scheduled arrival in seconds of each other request, and how it ended.
        window_s: begin and end of what is measured; the rest is shaded.
        limit_s: of the SLO, whatever its percentile.
        end_s: of the chart.
    """
    top_s = HEADROOM * max(*(value for _, value in points), limit_s or 0.0) or 1.0
    unit, scale = latency_unit(top_s)
    shown = points[thinned(len(points))]
    traces = [
        marks(
            "a request",
            [due for due, _ in shown],
            [scale * value for _, value in shown],
            colour=BLUE,
            hover=f"arrival %{{x:.2f}} s: %{{y:,.4g}} {unit}",
            size=5,
            opacity=0.55,
        )
    ]
    if failed:
        lost = failed[thinned(len(failed))]
        traces.append(
            marks(
                "a request that failed",
                [due for due, _ in lost],
                [0.98 * scale * top_s] * len(lost),
                colour=RED,
                hover="arrival %{x:.2f} s: %{text}",
                texts=[how for _, how in lost],
                symbol="line-ns-open",
            )
        )
    if limit_s:
        level = [scale * limit_s] * 2
        hover = f"{scale * limit_s:,.4g} {unit}"
        traces.append(line("SLO", [0.0, end_s], level, colour=RED, hover=hover))
    drawn = "" if len(shown) == len(points) else f", {len(shown):,} of them drawn"
    return Figure(
        title=title,
        caption=f"{len(points):,} requests answered{drawn}, {len(failed):,} failed; measured from"
        f" {window_s[0]:,.4g} to {window_s[1]:,.4g} s, the rest is shaded",
        traces=tuple(traces),
        layout=axes(
            axis("scheduled arrival, s", 0.0, end_s),
            axis(unit, 0.0, scale * top_s),
            shapes=[_shade(0.0, window_s[0]), _shade(window_s[1], end_s)],
        ),
    )


def goodput_against_load(
    points: Sequence[tuple[float, float, bool | None]],
    names: Mapping[bool | None, str],
    *,
    limits: Mapping[str, tuple[float, str]],
    predicted: Sequence[tuple[float, float]] = (),
) -> Figure:
    """
    Draw goodput against offered load.

    Args:
        points: offered and good requests/s of each run, and whether the SLO held; `None`: unknown.
        names: legend, by whether the SLO held.
        limits: requests/s and colour of a vertical line, by its name.
        predicted: offered and good requests/s, by load.
    """
    loads = [load for load, _, _ in points] + [load for load, _ in predicted]
    high = 1.1 * max(*loads, *(at for at, _ in limits.values()), 0.0) or 1.0
    offered = "%{x:.2f}/s offered, %{y:.2f}/s good"
    traces = [
        line(
            "all that is offered", [0, high], [0, high], colour=SOFT, dash="dot", hover="%{y:.2f}/s"
        )
    ]
    if len(points) > 1:
        by_load = sorted((load, good) for load, good, _ in points)
        xs, ys = [load for load, _ in by_load], [good for _, good in by_load]
        traces.append({**line("", xs, ys, colour=SOFT, hover=offered), **SILENT})
    for name, (at, colour) in limits.items():
        hover = f"{at:.2f} requests/s"
        traces.append(line(name, [at, at], [0, high], colour=colour, dash="dash", hover=hover))
    if predicted:
        xs, ys = [load for load, _ in predicted], [good for _, good in predicted]
        traces.append(
            marks("predicted", xs, ys, colour=ORANGE, hover=offered, lines=True,
                  symbol="circle-open")
        )  # fmt: skip
    for holds, name in names.items():
        runs = [(load, good) for load, good, held in points if held is holds]
        if runs:
            xs, ys = [load for load, _ in runs], [good for _, good in runs]
            colour = FOUND_COLOURS[holds]
            traces.append(marks(name, xs, ys, colour=colour, hover=offered, size=11))
    captions = [f"{name}: {at:.2f} requests/s" for name, (at, _) in limits.items()]
    if len(points) == 1:
        captions += [
            f"{load:.2f} requests/s offered: {good:.2f} met the SLO" for load, good, _ in points
        ]
    return Figure(
        title="Goodput against load",
        caption="; ".join(captions),
        traces=tuple(traces),
        layout=axes(
            axis("requests/s offered", 0.0, high), axis("requests/s that met the SLO", 0.0, high)
        ),
    )


SILENT: Json = {"showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
"""A trace that only guides the eye."""


def _shade(begin_s: float, end_s: float) -> Json:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": begin_s,
        "x1": max(begin_s, end_s),
        "y0": 0,
        "y1": 1,
        "fillcolor": "var(--shade)",
        "line": {"width": 0},
        "layer": "below",
    }
